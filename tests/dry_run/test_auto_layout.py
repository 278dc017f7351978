"""`parallel.auto`: what it chooses, what it leaves as it is, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config, ConfigError, ParallelConfig, from_dict, load_config
from megarl.dry_run import auto_layout
from megarl.dry_run.suggest_layout import SIZES, USABLE_FRACTION
from megarl.dry_run.validation import Report, render, validate
from megarl.parallel import device

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
TIGHT = ("parallel.gpu_gb=0.011", "train.max_tokens_per_gpu=256", "rollout.concurrency=16")
"""Memory in which data parallelism alone does not fit."""
Choose = Callable[..., Report]


@pytest.fixture
def choose(tmp_path: Path) -> Choose:
    """A function of overrides that returns the report on a small configuration of four ranks with `auto: true`."""

    def make(*overrides: str, **options: Any) -> Report:
        (tmp_path / "config.json").write_text(json.dumps(MOE))
        row = {"prompt": "1+1?", "ground_truth": 2, "chosen": "2", "rejected": "3"}
        row["messages"] = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
        (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
        tree = {
            "model": {"hf_config": str(tmp_path / "config.json")},
            "parallel": {"world_size": 4, "ranks_per_node": 4, "auto": True},
            "rollout": {"max_context": 256, "max_new_tokens": 64},
            "data": {"train": str(tmp_path / "train.jsonl"), "prompts_per_step": 8},
            "reward": {"functions": ["megarl.rewards.gsm8k:gsm8k"]},
        }
        (tmp_path / "c.yaml").write_text(json.dumps(tree))
        return validate(load_config(tmp_path / "c.yaml", overrides), **{"dry_run": True, **options})

    return make


def chosen(report: Report) -> Config:
    assert report.ok, report.errors
    assert report.choice is not None
    return report.choice.config


def sizes(config: Config) -> dict[str, int]:
    """Return the sizes above 1."""
    return {name: size for name in SIZES if (size := getattr(config.parallel, name)) > 1}


def peak(report: Report) -> int:
    plans = [report.memory, *report.other_memory.values()]
    return max(stage.peak for stages in plans for stage in stages)


def test_shards_no_more_than_memory_requires(choose: Choose) -> None:
    roomy, tight = choose("parallel.gpu_gb=80"), choose(*TIGHT)
    assert sizes(chosen(roomy)) == {} and chosen(roomy).rollout.tp == 1 and chosen(roomy).model.megatron == {}
    assert sizes(chosen(tight)) != {}
    assert peak(tight) <= USABLE_FRACTION * 0.011e9 < peak(choose(*TIGHT, "parallel.auto=false"))
    # What is planned for the choice is what the dry run plans for the same layout as fixed keys.
    assert tight.choice is not None and tight.choice.chosen.peak == peak(tight)
    fixed = validate(chosen(tight), dry_run=True)
    assert fixed.choice is None and fixed.memory == tight.memory
    # Equal input, equal choice: a resumed run and all ranks choose the same.
    assert chosen(choose(*TIGHT)) == chosen(tight)
    lines = dict(tight.facts["parallel.auto"])
    assert "of 0.011 GB, modelled" in lines["chosen"] and "on 4 ranks" in lines["runner-up"]
    assert "runner-up" in render(tight)


def test_leaves_what_is_set(choose: Choose) -> None:
    config = chosen(choose("parallel.gpu_gb=80", "parallel.tp=2", "rollout.tp=2"))
    assert sizes(config) == {"tp": 2} and (config.rollout.tp, config.rollout.ep) == (2, 1)
    assert sizes(chosen(choose("parallel.gpu_gb=80", "parallel.pp=2"))) == {"pp": 2}
    full = "model.megatron={recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"
    assert chosen(choose("parallel.gpu_gb=80", full)).model.megatron["recompute_granularity"] == "full"
    # A list leaves only these to the program, also where they are set.
    free = chosen(choose("parallel.gpu_gb=80", "parallel.auto=[tp]", "parallel.tp=4", "parallel.ep=2"))
    assert sizes(free) == {"ep": 2}


def test_engines_are_the_smallest_that_fit(choose: Choose) -> None:
    memory = ("algorithm=generate", "parallel.gpu_gb=0.002", "rollout.concurrency=4")
    config = chosen(choose(*memory))
    assert (config.rollout.tp, config.rollout.ep, sizes(config)) == (2, 2, {})
    assert chosen(choose(*memory, "rollout.ep=1")).rollout.ep == 1
    with_experts = chosen(choose("parallel.gpu_gb=80", "rollout.ep=2")).rollout
    assert (with_experts.tp, with_experts.ep) == (2, 2)
    freed = chosen(choose("parallel.gpu_gb=80", "parallel.auto=[rollout.tp]", "rollout.tp=4", "rollout.ep=2"))
    assert (freed.rollout.tp, freed.rollout.ep) == (2, 2)
    assert choose(*memory, "rollout.tp=1").errors[0].startswith("parallel.auto: no layout of 4 ranks with 0.002 GB")


def test_drops_the_stages_of_another_pp(choose: Choose) -> None:
    first = "model.megatron.num_layers_in_first_pipeline_stage=3"
    assert chosen(choose("parallel.gpu_gb=80", first)).model.megatron == {}
    stages = ("parallel.pp=2", first, "model.megatron.num_layers_in_last_pipeline_stage=1")
    assert chosen(choose("parallel.gpu_gb=80", *stages)).model.megatron["num_layers_in_first_pipeline_stage"] == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.megatron.num_layers_in_first_pipeline_stage=six", "num_layers_in_first_pipeline_stage"),
        ("rollout.sglang.max_total_tokens=abc", "rollout.sglang.max_total_tokens"),
    ],
)
def test_settings_that_plans_cannot_read_are_refused(choose: Choose, override: str, message: str) -> None:
    (error,) = choose("parallel.gpu_gb=80", override).errors
    assert message in error


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm=ppo", "critic.parallel={tp: 2}"),
        ("algorithm=ppo", "placement={actor: 0-1, critic: 2-3}"),
        ("algorithm=grpo", "placement={actor: 0-2, rollout: 3}"),
        ("algorithm=grpo", "placement={actor: 0-1, rollout: 2-3}", "rollout.asynchronous=true"),
        ("algorithm=grpo", "roles={reference: {parallel: {tp: 2}}}"),
        ("algorithm=grpo", "lora.rank=4"),
        ("algorithm=grpo", "guards.ppo_kl=0.1", "train.offload=true"),
        ("algorithm=sft",),
        ("algorithm=dpo",),
        ("algorithm=reward_model",),
        ("algorithm=generate",),
        ("algorithm=megarl.controllers.policies:PPOAndReMaxController",),
        ("algorithm=megarl.controllers.policies:PPOAndReMaxController", "roles={actor_b: {parallel: {tp: 2}}}"),
        ("algorithm=ppo", "stages={3: {rollout: {max_context: 384}}}"),
    ],
    ids=" ".join,
)
def test_combines(choose: Choose, overrides: tuple[str, ...]) -> None:
    """The choice is valid and fits in all of its sets of ranks, and is the same configuration otherwise."""
    report = choose(*overrides, "parallel.gpu_gb=0.06")
    config = chosen(report)
    assert peak(report) <= USABLE_FRACTION * 0.06e9
    assert config.parallel.auto == () and config.parallel.world_size == 4
    given = choose(*overrides, "parallel.gpu_gb=80")
    assert replace(chosen(given), parallel=config.parallel, rollout=config.rollout, model=config.model) == config


def test_placement_divides_the_roles_ranks(choose: Choose) -> None:
    """Three ranks of an actor have no layout of two, and the memory is that of a rank with all its models."""
    config = chosen(choose("algorithm=grpo", "placement={actor: 0-2, rollout: 3}", "parallel.gpu_gb=0.05"))
    assert all(3 % size == 0 for size in sizes(config).values())
    report = choose("algorithm=ppo", "placement={critic: 0-1}", "parallel.gpu_gb=0.06")
    assert peak(report) <= USABLE_FRACTION * 0.06e9 and len(report.other_memory) == 1


def test_stages_are_planned_for_the_longest_context(choose: Choose) -> None:
    longer = choose("parallel.gpu_gb=1", "stages={3: {rollout: {max_context: 512}}}")
    assert longer.choice is not None and longer.choice.chosen.peak == peak(
        choose("parallel.gpu_gb=1", "rollout.max_context=512")
    )
    assert chosen(longer).rollout.max_context == 256 and chosen(longer).stages


def test_says_what_would_fit(choose: Choose) -> None:
    """The number of ranks in the error is enough, and half as many are not."""
    (error,) = choose("parallel.gpu_gb=0.02").errors
    assert error.startswith(
        "parallel.auto: no layout of 4 ranks with 0.02 GB each (parallel.gpu_gb) fits config.json: "
    )
    assert (
        "needs 0.0235 GB, in generation; 32 such ranks are enough (parallel.world_size); or lower rollout.conc" in error
    )
    assert choose("parallel.gpu_gb=0.02", "parallel.world_size=32").ok
    assert not choose("parallel.gpu_gb=0.02", "parallel.world_size=16").ok
    (error,) = choose("parallel.gpu_gb=0.0001").errors
    assert error.endswith("in training; lower train.max_tokens_per_gpu")
    (error,) = choose("parallel.gpu_gb=0.02", "placement={actor: 0-1, rollout: all}").errors
    assert "ranks are enough" not in error


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["parallel.tp=3"], "parallel.world_size=4 is not a multiple of tp x pp = 3 x 1 = 3"),
        (["parallel.ep=3"], "parallel.ep=3 does not divide the 4 ranks of a pipeline stage"),
        (["parallel.tp=4"], "num_key_value_heads=2 does not divide by tensor parallel size 4"),
        (["rollout.tp=3"], "rollout.tp=3 does not divide parallel.world_size=4"),
        (["placement={actor: 0-7}"], "names rank 7"),
        (["critic.parallel={auto: true}"], "critic.parallel.auto: the program chooses `parallel`, which the critic"),
        (["roles={reference: {parallel: {auto: [tp]}}}"], "roles.reference.parallel.auto: the program chooses"),
        (["model.hf_config=", "model.path="], "model.path is not set"),
    ],
)
def test_mistakes_are_named(choose: Choose, overrides: list[str], message: str) -> None:
    report = choose("parallel.gpu_gb=80", *overrides)
    assert message in report.errors[0], report.errors
    with pytest.raises(ConfigError):
        report.resolve(Config())


def test_memory_of_this_machine(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `parallel.gpu_gb` that of the ranks, or else of this machine, counts."""
    monkeypatch.setattr(device, "memory_bytes", lambda num_ranks, ranks_per_gpu: 11_000_000 * 4 // num_ranks)
    tight = [text for text in TIGHT if "gpu_gb" not in text]
    assert chosen(choose(*tight)).parallel == replace(chosen(choose(*TIGHT)).parallel, gpu_gb=None)
    assert sizes(chosen(choose(*tight, gpu_bytes=10**12))) == {}
    assert sizes(chosen(choose(*TIGHT, gpu_bytes=10**12))) == sizes(chosen(choose(*TIGHT)))  # the key takes precedence


def test_ranks_divide_the_memory_of_a_gpu(choose: Choose) -> None:
    alone, shared = choose(*TIGHT), choose("parallel.gpu_gb=0.022", "parallel.ranks_per_gpu=2", *TIGHT[1:])
    assert alone.choice is not None and shared.choice is not None
    assert alone.choice.gpu_bytes == shared.choice.gpu_bytes == 11e6
    assert sizes(chosen(alone)) == sizes(chosen(shared))


def test_host_memory_is_divided_by_the_ranks() -> None:
    if device.has_cuda():
        pytest.skip("on a machine without GPUs")
    assert 0 < device.memory_bytes(4) == device.memory_bytes(1) // 4


def test_size_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "count", lambda: 0)
    config = from_dict({"parallel": "auto"})

    def size(config: Config, nodes: int | None = None) -> tuple[int, int]:
        parallel = auto_layout.with_job_size(config, nodes).parallel
        assert not {"world_size", "ranks_per_node"} & set(parallel.auto)
        return parallel.world_size, parallel.ranks_per_node

    assert size(config) == (1, 1) and size(config, 2) == (2, 1)
    monkeypatch.setattr(device, "count", lambda: 4)
    assert size(config) == (4, 4) and size(config, 2) == (8, 4)
    assert size(from_dict({"parallel": {"auto": True, "world_size": 16}})) == (16, 8)
    assert size(from_dict({"parallel": {"auto": True, "world_size": 12}}), 3) == (12, 4)
    assert size(from_dict({"parallel": {"auto": True, "ranks_per_node": 2}}), 3) == (6, 2)
    assert size(from_dict({"parallel": {"auto": True, "ranks_per_gpu": 2}})) == (8, 8)
    for name, value in {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert size(config) == (16, 8)
    assert size(config, 3) == (12, 4)  # a process that starts ranks ignores it
    assert size(from_dict({"parallel": {"auto": True, "world_size": 4}})) == (4, 8)  # `ranks.join` refuses it
    assert auto_layout.with_job_size(Config()).parallel == ParallelConfig()


def test_agrees_with_the_tool(tmp_path: Path) -> None:
    """The tool, which plans for a model without a configuration, suggests what a configuration of its values gets."""
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    limits = {"--gpus": 4, "--gpus-per-node": 4, "--gpu-gb": 0.008, "--tokens": 256, "--kv-tokens": 4096}
    limits |= {"--batch-tokens": 8192, "--bucket-mb": 64}
    arguments = [str(text) for option in limits.items() for text in option]
    command = [sys.executable, "-m", "megarl", "plan", "--model", str(tmp_path), *arguments, "--json"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr + process.stdout[-1000:]
    result = json.loads(process.stdout)
    suggested = next(row for row in result["layouts"] if row["layout"] == result["suggested"])
    tree = {
        "algorithm": "grpo",
        "model": {"hf_config": str(tmp_path / "config.json")},
        "parallel": {"auto": True, "world_size": 4, "ranks_per_node": 4, "gpu_gb": 0.008},
        "rollout": {
            **{"max_context": 256, "max_new_tokens": 64, "samples_per_prompt": 8, "weight_sync_bucket_mb": 64},
            "sglang": {"max_total_tokens": 4096},
        },
        "train": {"max_tokens_per_gpu": 256},
        "data": {"train": "nowhere.jsonl", "prompts_per_step": 8},  # 64 sequences of 128 tokens
        "reward": {"functions": ["megarl.rewards.gsm8k:gsm8k"]},
    }
    report = validate(from_dict(tree), dry_run=True)
    config = chosen(report)
    assert report.choice is not None
    assert (
        sizes(config)
        and {"world": 4, **{name: getattr(config.parallel, name) for name in SIZES}} == suggested["layout"]
    )
    assert {"tp": config.rollout.tp, "ep": config.rollout.ep} == suggested["rollout"]
    assert config.model.megatron == suggested["megatron"]
    assert (report.choice.chosen.peak, report.choice.chosen.seconds) == (
        suggested["peak_bytes"],
        suggested["modelled_seconds"],
    )
