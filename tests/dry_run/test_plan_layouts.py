"""`megarl plan`: which layouts fit, the suggestion, option errors, and predictions against built models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import from_dict
from megarl.dry_run import plan_command
from megarl.dry_run.validation import validate

ROOT = Path(__file__).resolve().parents[2]
PLAN = ("-m", "megarl", "plan")
TINY = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "rope_theta": 10000.0,
}
Tool = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    """A function of arguments that returns exit code, parsed JSON output and stderr."""

    def run(*arguments: str) -> tuple[int, dict[str, Any], str]:
        code = plan_command.main([*arguments, "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else {}, err

    return run


def test_frozen_models_count(tool: Tool) -> None:
    """A teacher of 30 billion parameters in bf16 takes 2 bytes of each, over 8 ranks, and may leave no layout."""
    name, eight = "qwen3-30b-a3b", ["--layout", "world=8,tp=4,ep=8", "--gpu-gb", "500"]
    given = ["--model", name, "--algorithm", "distill", "--frozen", f"teacher={name}"]
    _, result, _ = tool(*given, *eight)
    _, without, _ = tool("--model", name, *eight)
    states, alone = (case["layouts"][0]["stages"][0]["states"] for case in (result, without))
    assert states.keys() - alone.keys() == {"teacher weights"}
    assert states["teacher weights"] == alone["actor weights"]
    code, result, err = tool("--model", name, *eight, "--frozen", f"teacher={name}")
    assert code == 2 and "--frozen teacher: --algorithm grpo has no such role" in err
    code, _, err = tool("--model", name, "--algorithm", "distill", *eight)
    assert code == 2 and "has a teacher; give its model by --frozen teacher=MODEL" in err
    code, _, err = tool("--model", name, *eight, "--frozen", "actor")
    assert code == 2 and "write ROLE=MODEL, with one of the roles reference, reward, teacher" in err


def test_decides_which_layouts_fit(tool: Tool) -> None:
    layouts = ("world=16,tp=4,ep=8", "world=16,tp=4,pp=2,ep=8", "world=8,tp=4,ep=8", "world=32,tp=1,ep=2")
    code, result, _ = tool("--model", "qwen3-30b-a3b", "--gpus", "16", "--gpu-gb", "74", "--layout", *layouts)
    assert code == 0
    # 8 GPUs hold twice the optimizer state each; 32 exceed the 16 available.
    assert [row["fits"] for row in result["layouts"]] == [True, True, False, False]
    first, second, third, _ = result["layouts"]
    assert first["recompute"] == "selective" and second["recompute"] == "none" and third["recompute"] == "full"
    assert [stage["layers"] for stage in second["stages"]] == [list(range(24)), list(range(24, 48))]
    for row in result["layouts"]:
        peaks = []
        for stage in row["stages"]:
            parts = (sum(stage[name].values()) for name in ("states", "training", "generation", "weight_sync"))
            states, training, generation, sync = parts
            peaks.append(states + max(training, generation, sync))
        assert max(peaks) == row["peak_bytes"]
        assert row["fits"] == (row["peak_bytes"] <= 0.93 * 74e9 and row["layout"]["world"] <= 16)
    assert result["suggested"] == first["layout"]  # fewer model parallel ranks, hardly slower
    assert "selective recomputation: of 2 layouts that fit" in result["reason"] and "Rule:" in result["reason"]


def test_agrees_with_the_dry_run(tool: Tool) -> None:
    _, result, _ = tool(
        "--model",
        "deepseek-v3",
        "--gpus",
        "512",
        "--gpu-gb",
        "141",
        "--layout",
        "tp=8,pp=16,ep=32",
        "--algorithm",
        "ppo",
        "--rollout",
        "tp=32,ep=32",
        "--recompute",
        "full",
        "--offload-fraction",
        "0.25",
    )
    (row,) = result["layouts"]
    assert row["modelled_seconds"]["host"] > 0
    assert row["megatron"]["num_layers_in_first_pipeline_stage"] == 3
    layout = row["layout"]
    tree = {
        "algorithm": "ppo",
        "model": {"hf_config": str(ROOT / "configs/models/deepseek_v3.json"), "megatron": row["megatron"]},
        "parallel": {"world_size": layout.pop("world"), **layout},
        "rollout": {**row["rollout"], "max_context": 16384, "sglang": {"max_total_tokens": 131072}},
        "actor_optimizer": {"offload_fraction": 0.25},
        "critic": {"optimizer": {"offload_fraction": 0.25}},
        "train": {"max_tokens_per_gpu": 16384},
        "data": {"train": "nowhere.jsonl"},
        "reward": {"functions": ["megarl.rewards.gsm8k:gsm8k"]},
    }
    report = validate(from_dict(tree), dry_run=True)
    assert report.ok, report.errors
    for stage, stage_plan in zip(row["stages"], report.memory, strict=True):
        for name in ("states", "training", "generation", "weight_sync", "host"):
            assert stage[name] == getattr(stage_plan, name)


def test_searches_layouts(tool: Tool) -> None:
    code, result, _ = tool("--model", "qwen2.5-7b", "--gpus", "8", "--gpu-gb", "80")
    assert code == 0 and len(result["layouts"]) > 5
    assert all(row["fits"] for row in result["layouts"])
    seconds = [sum(row["modelled_seconds"].values()) for row in result["layouts"]]
    assert seconds == sorted(seconds)
    assert all(row["layout"]["tp"] in (1, 2, 4) for row in result["layouts"])  # four key-value heads
    # The suggestion is among the listed layouts; no layout as fast has fewer model parallel ranks.
    chosen = next(row for row in result["layouts"] if row["layout"] == result["suggested"])
    min_gpus = chosen["layout"]["tp"] * chosen["layout"]["pp"]
    for row, elapsed in zip(result["layouts"], seconds, strict=True):
        assert row["layout"]["tp"] * row["layout"]["pp"] >= min_gpus or elapsed > 1.1 * seconds[0]
    # More memory needs less sharding; a longer context brings in context parallelism.
    _, large_gpu, _ = tool("--model", "qwen2.5-7b", "--gpus", "8", "--gpu-gb", "288")
    assert large_gpu["suggested"]["tp"] * large_gpu["suggested"]["pp"] < min_gpus
    _, long, _ = tool("--model", "qwen2.5-7b", "--gpus", "16", "--tokens", "8192", "--context", "32768")
    assert {row["layout"]["cp"] for row in long["layouts"]} == {1, 2, 4}


def test_chooses_the_smallest_engine_that_fits(tool: Tool) -> None:
    _, result, _ = tool("--model", "qwen3-30b-a3b", "--gpus", "16", "--layout", "tp=4,ep=8")
    engine = result["layouts"][0]["rollout"]
    assert engine == {"tp": 4, "ep": 4}
    code, smaller, _ = tool(
        "--model", "qwen3-30b-a3b", "--gpus", "16", "--layout", "tp=4,ep=8", "--rollout", "tp=2,ep=2"
    )
    assert code == 1 and not smaller["layouts"][0]["fits"] and smaller["suggested"] is None
    _, sft, _ = tool("--model", "qwen3-30b-a3b", "--gpus", "16", "--algorithm", "sft", "--layout", "tp=4,ep=8")
    assert sft["layouts"][0]["rollout"] is None and sft["layouts"][0]["stages"][0]["generation"] == {}


def test_reports_that_nothing_fits(tool: Tool) -> None:
    code, result, _ = tool("--model", "deepseek-v3", "--gpus", "8", "--recompute", "full")
    assert code == 1 and result["layouts"] == [] and result["suggested"] is None
    assert result["reason"] == "No layout of 8 GPUs of 80 GB was found that fits."


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--layout", "world=24,tp=4,pp=4"], "tp x pp = 4 x 4 = 16; the nearest valid sizes: 16 and 32"),
        (
            ["--layout", "world=64,tp=8"],
            "num_key_value_heads=4 does not divide by tensor parallel size 8; sizes that do",
        ),
        (["--layout", "world=64,tp=4,ep=3"], "parallel.ep=3 does not divide the 64 ranks of a pipeline stage"),
        (
            ["--layout", "world=24,ep=3"],
            "parallel.ep=3 does not divide the model's 128 experts; sizes that do: 1, 2, 4, 8",
        ),
        (
            ["--layout", "world=8,pp=4,vpp=5"],
            "the nearest valid settings: vpp to 4 or 6",
        ),
        (["--layout", "world=32,pp=32,vpp=2"], "the nearest valid settings: pp to 24, or vpp to 1"),
        (["--layout", "world=8,tp=2,etp=5"], "parallel.etp=5 does not divide the 8 ranks of a pipeline stage"),
        (["--layout", "tp=2"], "--layout tp=2 has no world=..., and --gpus is not given"),
        (["--layout", "world=8,xp=2"], "--layout has no 'xp'; it is made of tp, pp, vpp, cp, ep, etp, world"),
        (["--layout", "world=8,tp=two"], "--layout tp must be a positive number of at most 1048576, not 'two'"),
        (["--gpus", "16", "--rollout", "tp=3"], "rollout.tp=3 does not divide parallel.world_size=16"),
        ([], "--gpus is not given"),
        (["--gpus", "8", "--tokens", "0"], "--tokens: must be from 1 to"),
        (["--gpus", "8", "--offload-fraction", "2"], "actor_optimizer.offload_fraction must be"),
        (["--measure"], "--measure would build"),
        (["--measure", "--layout", "world=1", "world=2"], "--measure builds one layout"),
        (["--measure", "--frozen", "reference=qwen3-30b-a3b"], "--measure builds trained models only; remove --frozen"),
        (["--measure", "--algorithm", "distill"], "--measure builds trained models only; remove --frozen and --algor"),
    ],
)
def test_invalid_options_print_one_line(tool: Tool, arguments: list[str], message: str) -> None:
    code, _, error = tool("--model", "qwen3-30b-a3b", *arguments)
    assert code == 2 and message in error and error.count("\n") == 1, error


def test_prints_complete_tables() -> None:
    command = [sys.executable, *PLAN, "--model", "qwen3-235b", "--gpus", "128", "--recompute", "full"]
    narrow = {**os.environ, "COLUMNS": "80"}  # as rich assumes for a pipe
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, env=narrow, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    # No cell is truncated or wrapped, however narrow the terminal.
    assert "…" not in process.stdout
    (header,) = [line for line in process.stdout.splitlines() if "recompute" in line and "weight sync" in line]
    rows = [line.split() for line in process.stdout.splitlines() if line.rstrip().endswith(" s") and " yes " in line]
    assert len(header) > 80 and len(rows) >= 8 and all(row[-1] == "s" and row[-3] == "yes" for row in rows)
    for words in ("qwen3-235b, grpo, bfloat16: 128 GPUs of 80 GB", "Suggested: TP4", "Rule:", "memory per rank"):
        assert words in process.stdout, process.stdout
    for part in ("actor optimizer", "activations", "engine KV cache", "reshard staging", "reference weights (host)"):
        assert part in process.stdout, part
    assert "model.megatron: {" in process.stdout and "GPUs of 80 GB or more" in process.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("fraction, states", [("0", "optimizer"), ("1", "optimizer, offloaded")])
def test_predictions_match_built_models(tmp_path: Path, fraction: str, states: str) -> None:
    """bf16 models built by Megatron on two ranks: actor and critic on the device, reference on the host."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    command = [sys.executable, *PLAN, "--model", str(tmp_path), "--algorithm", "ppo", "--measure", "--json"]
    command += ["--offload-fraction", fraction, "--layout", "world=2,tp=2,ep=2"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert process.returncode == 0, process.stderr[-3000:]
    result = json.loads(process.stdout)
    parts = [f"{role} {part}" for role in ("actor", "critic") for part in ("weights", "gradients", states)]
    assert {(row["rank"], row["part"]) for row in result["rows"]} == {
        (rank, part) for rank in (0, 1) for part in (*parts, "reference weights")
    }
    for row in result["rows"]:
        padding = 0.01 if row["part"].endswith(("gradients", "actor weights", "critic weights")) else 0.0
        assert row["predicted"] <= row["measured"] <= row["predicted"] * (1 + padding), row
