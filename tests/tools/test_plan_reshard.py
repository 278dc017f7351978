"""`plan_reshard`: planned weight sync as JSON, table and page, split advice, and option errors."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megarl.config import from_dict
from megarl.dry_run.validation import validate
from megarl.models.registry import load_hf_config
from megarl.reshard.plan.bound import NETWORK_SLACK, compute_bound
from megarl.reshard.plan.cost_report import LinkSpeeds, build_report, format_bytes, summarize
from megarl.reshard.plan.layout import EngineLayout, TrainLayout, even_stages
from megarl.reshard.plan.planner import ReshardPlan

pytestmark = [pytest.mark.alone, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
DEEPSEEK = load_hf_config(ROOT / "configs/models/deepseek_v3.json")
QWEN = ("--model", "qwen3-235b", "--train", "tp=4,pp=4,ep=8,world=64", "--engine", "tp=8,ep=8")
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
KEYS = """plan_seconds all_ranks_seconds cross_bytes cross_bound cross_ratio internode_bytes internode_bound
    internode_ratio send_bound recv_bound nic_send_bound nic_recv_bound send_max_over_bound recv_max_over_bound
    nic_send_max_over_bound nic_recv_max_over_bound staging_peak_bytes messages mean_message_bytes rounds
    modelled_seconds"""


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("plan_reshard", ROOT / "tools/plan_reshard.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def main(tool: Any) -> Callable[[list[str]], int]:
    return tool.main  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """JSON output and HTML page for 64 GPUs."""
    page = tmp_path_factory.mktemp("page") / "plan.html"
    command = [sys.executable, str(ROOT / "tools/plan_reshard.py"), *QWEN, "--json", "--html", str(page)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout), page.read_text()


def test_plan_meets_its_bounds(report: tuple[dict[str, Any], str]) -> None:
    result, _ = report
    assert set(KEYS.split()) <= result.keys()
    assert result["cross_bytes"] == result["cross_bound"] and result["cross_ratio"] == 1.0
    assert result["internode_ratio"] == 1.0
    for name in ("send", "recv", "nic_send", "nic_recv"):
        assert 1.0 <= result[f"{name}_max_over_bound"] <= 1.05
    assert 0 < result["staging_peak_bytes"] <= 2 * result["bucket_bytes"]
    assert result["messages"] * result["mean_message_bytes"] == pytest.approx(result["cross_bytes"], rel=1e-3)
    assert result["modelled_seconds"] >= result["modelled_seconds_if_nobody_waits"]
    assert result["modelled_over_busiest_nic"] >= result["nic_send_max_over_bound"]
    assert (
        result["modelled_seconds_if_nobody_waits"] >= result["nic_send_max"] / result["model"]["nic_bytes_per_second"]
    )
    assert "not measured" in result["model"]["what"]


class PageParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.cells = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open_tags.append(tag)
        self.cells += tag == "rect"
        assert not {"src", "href", "xlink:href"} & {name for name, _ in attrs}, "external resource"

    def handle_endtag(self, tag: str) -> None:
        while self.open_tags and self.open_tags[-1] != tag:
            assert self.open_tags.pop() in ("meta", "html")
        self.open_tags.pop()


def test_page_shows_each_pair_of_nodes(report: tuple[dict[str, Any], str]) -> None:
    _, text = report
    page = PageParser()
    page.feed(text)
    assert page.cells == 8 * 8  # one cell per pair of nodes
    assert "node 0 to node 7: " in text and "inside of node 3: " in text
    assert "sends most over the network" in text and "A model, not a measurement" in text
    assert "stage 3" in text and "http" not in text


@pytest.mark.nightly
def test_sync_on_512_ranks_is_bounded_by_the_busiest_nic(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Modelled in lockstep rounds; staging stays within two buckets."""
    layout = ("--train", "world=512,tp=8,pp=16,ep=32", "--engine", "tp=32,ep=32", "--json")
    assert main(["--model", "deepseek-v3", *layout]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["modelled_over_busiest_nic"] <= 1.10
    assert result["staging_peak_bytes"] <= 2 * result["bucket_bytes"]
    # A round takes at least the hand-over of the previous one.
    assert main(["--model", "deepseek-v3", *layout, "--hand-over-ms", "20", "--round-us", "0"]) == 0
    slow = json.loads(capsys.readouterr().out)
    assert slow["modelled_seconds"] == pytest.approx(slow["rounds"] * 0.02, rel=1e-3)


LARGE_SYNCS = re.findall(
    r"^\| `([\w.-]+)` \| `([\w=,]+)` \| (\d+): `([\w=,]+)` \| `(\w+)` \| ([\d.]+) s \| ([\d.]+) s \|",
    (ROOT / "docs/performance.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


@pytest.mark.nightly
@pytest.mark.parametrize("model, train, gpus, engine, wire, seconds, bound", LARGE_SYNCS)
def test_documented_syncs_of_large_models(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], model: str, train: str, gpus: str,
    engine: str, wire: str, seconds: str, bound: str,
) -> None:  # fmt: skip
    first = int(train.split(",")[0].removeprefix("world="))
    ranks = ["--train-ranks", f"0-{first - 1}", "--engine-ranks", f"{first}-{first + int(gpus) - 1}"]
    assert main(["--model", model, "--train", train, "--engine", engine, "--wire", wire, *ranks, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    modelled = result["modelled_seconds"]
    assert modelled == pytest.approx(float(seconds), abs=0.006)
    assert modelled / result["modelled_over_busiest_nic"] == pytest.approx(float(bound), abs=0.006)


def test_finds_the_documented_syncs() -> None:
    assert len(LARGE_SYNCS) == 6


def test_prints_table_and_split_advice(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QWEN, "--pp-layers", "30,20,20,24", "--bucket-mb", "256", "--nic-gbs", "25"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "qwen3-235b, 64 GPUs: TP4 PP4 EP8 -> TP8 EP8, bf16 on the wire" in text
    assert "sent over the network, busiest GPU" in text
    assert "--pp-layers 23,24,24,23" in text
    assert "25 GB/s of network" in text


def test_engines_on_separate_ranks(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Engines share no ranks with the trainer, so each receives the whole model."""
    page = tmp_path / "plan.html"
    layouts = ("--train", "tp=4,pp=4,ep=8,world=32", "--engine", "tp=8,ep=8", "--html", str(page))
    ranks = ("--train-ranks", "0-31", "--engine-ranks", "48-63,32-47")
    assert main(["--model", "qwen3-235b", *layouts, *ranks, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["local_bytes"] == 0 and result["cross_bytes"] == result["cross_bound"] == result["needed_bytes"]
    for name in ("send", "recv", "nic_send", "nic_recv"):
        assert 1.0 <= result[f"{name}_max_over_bound"] <= 1.05
    text = page.read_text()
    assert "32 GPUs -&gt; 32 GPUs" in text and "Each GPU of an engine needs" in text
    assert "node 0 to node 7: " in text and "stage 3" in text and "<td>-</td>" in text


def test_gemma2_bytes_match_hand_computed_value(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """PP2 to TP2. Each rank lacks half of the other's layer and its four norms.

    In addition, one rank lacks half of the tied embedding and the other the final norm.
    """
    hf = {"architectures": ["Gemma2ForCausalLM"], "vocab_size": 128, "hidden_size": 16, "intermediate_size": 24}
    hf |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    hf |= {"query_pre_attn_scalar": 8, "sliding_window": 16, "rms_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"}
    hf |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    layouts = ("--train", "world=2,pp=2", "--engine", "tp=2", "--gpus-per-node", "2")
    assert main(["--model", str(tmp_path), *layouts, "--json"]) == 0
    matrices = 16 * (2 * 32 + 2 * 16 + 3 * 24)  # q and o, k and v, the MLP
    elements = 2 * (matrices // 2 + 4 * 16) + 128 * 16 // 2 + 16
    assert json.loads(capsys.readouterr().out)["cross_bytes"] == 2 * elements


INVALID_LAYOUTS: list[tuple[tuple[str, ...], dict[str, dict[str, Any]]]] = [
    # an engine across nodes, and one that does not divide the heads
    (("--train", "tp=4,pp=2,ep=8,world=96", "--engine", "tp=6"), {"parallel": {"world_size": 96, "pp": 2}}),
    (("--train", "tp=4,pp=2,ep=8,world=96", "--engine", "tp=24"), {"parallel": {"world_size": 96, "pp": 2}}),
    # layers that do not divide over stages or virtual stages
    (("--pp-layers", "24,24,23,23"), {"model": {"megatron": {FIRST: 24, LAST: 23}}}),
    (("--train", "tp=4,pp=4,vpp=3,ep=8,world=64"), {"parallel": {"vpp": 3}}),
    (("--train", "tp=4,pp=2,vpp=47,ep=8,world=64"), {"parallel": {"pp": 2, "vpp": 47}}),
    # unsupported by SGLang
    (("--engine", "tp=8,ep=8,mlp_tp=2"), {"rollout": {"sglang": {"moe_dense_tp_size": 2}}}),
    (("--engine", "tp=8,ep=4,shared_tp=1"), {"rollout": {"ep": 4, "sglang": {"moe_a2a_backend": "deepep"}}}),
    # engines that do not divide their ranks
    (("--engine-ranks", "0-6"), {"placement": {"rollout": "0-6"}}),
]


@pytest.mark.parametrize(("change", "keys"), INVALID_LAYOUTS)
def test_rejects_layouts_like_a_dry_run(
    change: tuple[str, ...],
    keys: dict[str, dict[str, Any]],
    main: Callable[[list[str]], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message equals that of a dry run."""
    model = str(ROOT / "configs/models/qwen3_235b.json")
    base: dict[str, dict[str, Any]] = {
        "model": {"hf_config": model, "megatron": {FIRST: 23, LAST: 23}},
        "parallel": {"world_size": 64, "ranks_per_node": 8, "tp": 4, "pp": 4, "ep": 8},
        "rollout": {"tp": 8, "ep": 8},
        "data": {"train": "nowhere.jsonl"},
        "reward": {"functions": ["megarl.rewards.gsm8k:gsm8k"]},
    }
    if change[-1] in ("tp=6", "tp=24"):
        keys = keys | {"rollout": {"tp": int(change[-1][3:]), "ep": 1}}
    if "pp" in keys.get("parallel", {}) or "vpp" in keys.get("parallel", {}):
        base["model"] = {"hf_config": model}
    tree = {name: base.get(name, {}) | keys.get(name, {}) for name in base.keys() | keys}
    report = validate(from_dict({"algorithm": "grpo", **tree}), dry_run=True)
    assert main([*QWEN, *change]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.removeprefix("error: ").strip() in report.errors


def test_virtual_stages_change_the_layers_of_a_stage(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """With vpp, the first stage has only one of DeepSeek-V3's three dense layers."""
    layout = ("--model", "deepseek-v3", "--engine", "tp=32,ep=32", "--train", "tp=8,pp=4,ep=32,world=128")
    assert main([*layout, "--pp-layers", "16,15,15,15"]) == 0
    text = capsys.readouterr().out
    assert FIRST in text
    assert main([*layout[:-1], "tp=8,pp=4,ep=32,world=128,vpp=2", "--pp-layers", "16,15,15,15"]) == 2
    assert "parallel.vpp=2 does not divide the 15 layers" in capsys.readouterr().err
    qwen = ("--model", "qwen3-30b-a3b", "--engine", "tp=4,ep=4", "--json")
    for train in ("tp=2,pp=4,ep=4,world=16", "tp=2,pp=4,ep=4,world=16,vpp=3"):
        assert main([*qwen, "--train", train]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["cross_bytes"] == result["cross_bound"]


def test_summary_names_sends_above_the_bound() -> None:
    """TP24 engines on nodes of 12 GPUs: traffic inside nodes is less balanced."""
    hf = load_hf_config(ROOT / "configs/models/qwen3_30b_a3b.json") | {"num_attention_heads": 96}
    train = TrainLayout(96, 4, 8, even_stages(48, 3))
    for tp, ep, is_reported in ((24, 4, True), (4, 4, False)):
        engine = EngineLayout(tp, ep)
        bound = compute_bound(hf, train, engine, 12)
        report = build_report(partial(ReshardPlan, hf, train, engine, 12))
        ratio = (report.network + report.inside)[0].sum(0).max() / bound.send_capped
        assert (ratio > NETWORK_SLACK) == is_reported
        line = f"The busiest GPU sends {ratio:.2f} of what some GPU has to send"
        assert any(line in sentence for sentence in summarize(report, bound, LinkSpeeds())) == is_reported


def test_advises_a_better_split(tool: Any) -> None:
    train, engine = TrainLayout(512, 8, 32, even_stages(61, 16)), EngineLayout(32, 32, draft=True)
    advice = tool.advise_split(DEEPSEEK, train, engine, 8)
    # The three dense layers are small, and the last stage also has the MTP layer and the head.
    assert sum(advice.recommended) == 61 and advice.recommended[-1] == 2 and max(advice.recommended) == 4
    current, recommended = (
        compute_bound(DEEPSEEK, layout, engine, 8) for layout in (train, with_layer_counts(train, advice.recommended))
    )
    assert current.nic_send == pytest.approx(advice.current_bytes)
    assert recommended.nic_send == pytest.approx(advice.recommended_bytes)
    assert advice.gain == pytest.approx(0.028, abs=1e-3)
    second_advice = tool.advise_split(DEEPSEEK, with_layer_counts(train, advice.recommended), engine, 8)
    assert second_advice.recommended == advice.recommended and second_advice.gain == 0


def test_split_advice_matches_exhaustive_search(tool: Any) -> None:
    hf = DEEPSEEK | {"num_hidden_layers": 7, "n_routed_experts": 8, "first_k_dense_replace": 2}
    hf |= {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
    engine = EngineLayout(2, 2, draft=True)
    train = TrainLayout(12, 2, 2, even_stages(7, 3))
    advice = tool.advise_split(hf, train, engine, 2)
    splits = [(a, b, 7 - a - b) for a in range(1, 6) for b in range(1, 7 - a)]
    bound = min(compute_bound(hf, with_layer_counts(train, split), engine, 2).nic_send for split in splits)
    assert advice.recommended_bytes == pytest.approx(bound, rel=0.01)


def with_layer_counts(train: TrainLayout, counts: tuple[int, ...]) -> TrainLayout:
    """Return the layout with these layer counts per stage."""
    return replace(train, stages=even_stages(sum(counts), train.pp, counts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--train", "tp=8,world=64,zp=3"), "--train has no 'zp'; it is made of world, tp, pp, vpp, ep, etp, cp"),
        (("--train", "tp=8"), "--train needs world="),
        (("--engine", "tp=x"), "--engine tp must be a positive number of at most 1048576, not 'x'"),
        (("--train", "tp=3,world=64"), "parallel.world_size=64 is not a multiple of tp x pp = 3 x 1 = 3"),
        (("--train", "world=64,ep=16,pp=4", "--pp-layers", "4,4"), "[4, 4] are not layer counts of 4 stages"),
        (("--pp-layers", "a,b"), "--pp-layers must be numbers"),
        (("--model", "nowhere"), "--model nowhere is neither a file nor one of"),
        (("--gpus-per-node", "7"), "parallel.world_size=64 is not a multiple of parallel.ranks_per_node=7"),
        (("--bucket-mb", "0"), "--bucket-mb: must be from 1 to 1048576, not 0"),
        (("--wire", "fp8", "--engine", "tp=8"), "cannot be sent as FP8"),
        (("--train-ranks", "0-31"), "a layout of 64 trainer ranks cannot be placed on 32 ranks"),
        (("--engine-ranks", "0-x"), "--engine-ranks must be ranks such as 0-3,8,9, not '0-x'"),
        (("--engine-ranks", "0-6"), "does not divide the 7 ranks of placement.rollout=0-6"),
    ],
)
def test_invalid_options_print_one_line(
    change: tuple[str, ...], message: str, main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QWEN, *change]) == 2
    out, error = capsys.readouterr()
    assert out == "" and message in error
    assert error.startswith("error: ") and error.count("\n") == 1


def test_formats_bytes() -> None:
    assert [format_bytes(value) for value in (1365.3e9, 44.6e9, 1.95e9, 0.5e9, 12.2e6, 7e3, 3)] == [
        "1,365 GB",
        "44.6 GB",
        "1.95 GB",
        "500 MB",
        "12.2 MB",
        "7.00 kB",
        "3 B",
    ]
