"""The push on paper: figures for a program, a table and a picture for a person, mistakes in one line."""

from __future__ import annotations

import importlib.util
import json
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
def figures(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The metrics of 64 GPUs, and the page."""
    page = tmp_path_factory.mktemp("page") / "plan.html"
    command = [sys.executable, str(ROOT / "tools/plan_reshard.py"), *QWEN, "--json", "--html", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), page.read_text()


def test_figures(figures: tuple[dict[str, Any], str]) -> None:
    result, _ = figures
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


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.cells += tag == "rect"
        assert not {"src", "href", "xlink:href"} & {name for name, _ in attrs}, "something from outside"

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open[-1] != tag:
            assert self.open.pop() in ("meta", "html")
        self.open.pop()


def test_page(figures: tuple[dict[str, Any], str]) -> None:
    _, text = figures
    page = Page()
    page.feed(text)
    assert page.cells == 8 * 8  # a node to a node
    assert "node 0 to node 7: " in text and "inside of node 3: " in text
    assert "sends most over the network" in text and "A model, not a measurement" in text
    assert "stage 3" in text and "http" not in text


def test_a_push_of_512_is_as_long_as_its_busiest_network_card(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    """In rounds that no rank leaves before the others, as they are modelled; staging stays at two buckets."""
    layout = ("--train", "world=512,tp=8,pp=16,ep=32", "--engine", "tp=32,ep=32", "--json")
    assert main(["--model", "deepseek-v3", *layout]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["modelled_over_busiest_nic"] <= 1.10
    assert result["staging_peak_bytes"] <= 2 * result["bucket_bytes"]
    # A round lasts as long as handing over the one before, at least.
    assert main(["--model", "deepseek-v3", *layout, "--hand-over-ms", "20", "--round-us", "0"]) == 0
    slow = json.loads(capsys.readouterr().out)
    assert slow["modelled_seconds"] == pytest.approx(slow["rounds"] * 0.02, rel=1e-3)


def test_table_and_advice(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QWEN, "--pp-layers", "30,20,20,24", "--bucket-mb", "256", "--nic-gbs", "25"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "qwen3-235b, 64 GPUs: TP4 PP4 EP8 -> TP8 EP8, bf16 on the wire" in text
    assert "sent over the network, busiest GPU" in text
    assert "--pp-layers 23,24,24,23" in text
    assert "25 GB/s of network" in text


def test_ranks_of_their_own(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The engines are where the trainer is not: they need a model an engine, and have nothing of it."""
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


def test_gemma_2_on_two_ranks_by_hand(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A stage each on the trainer's side, halves on the engine's. Each lacks half of the other's layer and its four
    norms; besides, one lacks half of the embedding, which is the head, too, and the other the last norm."""
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


REFUSED: list[tuple[tuple[str, ...], dict[str, dict[str, Any]]]] = [
    # an engine over the edge of a node, and one that does not divide the heads
    (("--train", "tp=4,pp=2,ep=8,world=96", "--engine", "tp=6"), {"parallel": {"world_size": 96, "pp": 2}}),
    (("--train", "tp=4,pp=2,ep=8,world=96", "--engine", "tp=24"), {"parallel": {"world_size": 96, "pp": 2}}),
    # layers that do not divide over the stages, or their parts
    (("--pp-layers", "24,24,23,23"), {"model": {"megatron": {FIRST: 24, LAST: 23}}}),
    (("--train", "tp=4,pp=4,vpp=3,ep=8,world=64"), {"parallel": {"vpp": 3}}),
    (("--train", "tp=4,pp=2,vpp=47,ep=8,world=64"), {"parallel": {"pp": 2, "vpp": 47}}),
    # what SGLang has no switch for
    (("--engine", "tp=8,ep=8,mlp_tp=2"), {"rollout": {"sglang": {"moe_dense_tp_size": 2}}}),
    (("--engine", "tp=8,ep=4,shared_tp=1"), {"rollout": {"ep": 4, "sglang": {"moe_a2a_backend": "deepep"}}}),
    # a role on some of another's ranks
    (("--engine-ranks", "0-7"), {"placement": {"rollout": "0-7"}}),
]


@pytest.mark.parametrize(("change", "keys"), REFUSED)
def test_refused_as_a_run_is(
    change: tuple[str, ...],
    keys: dict[str, dict[str, Any]],
    main: Callable[[list[str]], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the same words, as a dry run of such a configuration shows."""
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


def test_stages_in_parts(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    """With vpp a stage has other layers: of DeepSeek-V3's three without experts the first stage has one only."""
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


def test_more_than_the_least_is_said() -> None:
    """Engines of TP24 on nodes of 12: what is sent inside nodes is not levelled as well."""
    hf = load_hf_config(ROOT / "configs/models/qwen3_30b_a3b.json") | {"num_attention_heads": 96}
    train = TrainLayout(96, 4, 8, even_stages(48, 3))
    for tp, ep, said in ((24, 4, True), (4, 4, False)):
        engine = EngineLayout(tp, ep)
        least = compute_bound(hf, train, engine, 12)
        paper = build_report(partial(ReshardPlan, hf, train, engine, 12))
        ratio = (paper.network + paper.inside)[0].sum(0).max() / least.send_capped
        assert (ratio > NETWORK_SLACK) == said
        line = f"The busiest GPU sends {ratio:.2f} of what some GPU has to send"
        assert any(line in sentence for sentence in summarize(paper, least, LinkSpeeds())) == said


def test_better_split(tool: Any) -> None:
    train, engine = TrainLayout(512, 8, 32, even_stages(61, 16)), EngineLayout(32, 32, draft=True)
    advice = tool.advise_split(DEEPSEEK, train, engine, 8)
    # The three dense layers weigh next to nothing, and the last stage has the layer of MTP and the head besides.
    assert sum(advice.recommended) == 61 and advice.recommended[-1] == 2 and max(advice.recommended) == 4
    before, after = (
        compute_bound(DEEPSEEK, layout, engine, 8) for layout in (train, resplit(train, advice.recommended))
    )
    assert before.nic_send == pytest.approx(advice.current_bytes)
    assert after.nic_send == pytest.approx(advice.recommended_bytes)
    assert advice.gain == pytest.approx(0.028, abs=1e-3)
    again = tool.advise_split(DEEPSEEK, resplit(train, advice.recommended), engine, 8)
    assert again.recommended == advice.recommended and again.gain == 0


def test_better_split_against_all_splits(tool: Any) -> None:
    hf = DEEPSEEK | {"num_hidden_layers": 7, "n_routed_experts": 8, "first_k_dense_replace": 2}
    hf |= {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
    engine = EngineLayout(2, 2, draft=True)
    train = TrainLayout(12, 2, 2, even_stages(7, 3))
    advice = tool.advise_split(hf, train, engine, 2)
    splits = [(a, b, 7 - a - b) for a in range(1, 6) for b in range(1, 7 - a)]
    least = min(compute_bound(hf, resplit(train, split), engine, 2).nic_send for split in splits)
    assert advice.recommended_bytes == pytest.approx(least, rel=0.01)


def resplit(train: TrainLayout, counts: tuple[int, ...]) -> TrainLayout:
    """The same with so many layers on each stage."""
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
        (("--engine-ranks", "0-6"), "which overlap"),
    ],
)
def test_mistakes(
    change: tuple[str, ...], message: str, main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QWEN, *change]) == 2
    out, error = capsys.readouterr()
    assert out == "" and message in error
    assert error.startswith("error: ") and error.count("\n") == 1


def test_gigabytes() -> None:
    assert [format_bytes(value) for value in (1365.3e9, 44.6e9, 1.95e9, 0.5e9, 12.2e6, 7e3, 3)] == [
        "1,365 GB",
        "44.6 GB",
        "1.95 GB",
        "500 MB",
        "12.2 MB",
        "7.00 kB",
        "3 B",
    ]
