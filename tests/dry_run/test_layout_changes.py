"""Modelled seconds of a configuration's step, and the changes of its layout that would save the most."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_configs import QWEN2

from megarl.config import Config, load_config
from megarl.dry_run import layout_changes
from megarl.dry_run.job_models import JobModels
from megarl.dry_run.layout_changes import best_changes, conversations_of, describe_step, step_seconds
from megarl.dry_run.suggest_layout import USABLE_FRACTION
from megarl.dry_run.validation import Report, validate
from megarl.models.rl_step_time import rl_step_seconds, training_seconds

pytestmark = pytest.mark.alone

MOE: dict[str, Any] = QWEN2 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}
FULL = "model.megatron={recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"
Job = tuple[JobModels, Config, Report]
Plan = Callable[..., Job]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """A function of overrides that plans a small job on four ranks with engines of two."""

    def make(*overrides: str) -> Job:
        (tmp_path / "config.json").write_text(json.dumps(MOE))
        row = {"prompt": "1+1?", "ground_truth": 2, "messages": [{"role": "user", "content": "1+1?"}]}
        row["messages"].append({"role": "assistant", "content": "2"})
        (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
        tree = {
            "algorithm": "grpo",
            "model": {"hf_config": str(tmp_path / "config.json")},
            "parallel": {"world_size": 4, "ranks_per_node": 4, "gpu_gb": 80},
            "rollout": {"tp": 2, "max_context": 256, "max_new_tokens": 64},
            "data": {"train": str(tmp_path / "train.jsonl"), "prompts_per_step": 8},
            "reward": {"functions": ["megarl.rewards.gsm8k:gsm8k"]},
        }
        (tmp_path / "c.yaml").write_text(json.dumps(tree))
        config = load_config(tmp_path / "c.yaml", overrides)
        report = validate(config, dry_run=True)
        assert report.ok, report.errors
        assert report.models is not None
        return report.models, config, report

    return make


def texts(job: Job) -> list[str]:
    return [change.text for change in best_changes(job[0], job[1])]


def test_forward_passes_are_those_of_the_algorithm(plan: Plan) -> None:
    for overrides, passes in (
        (("kl.apply_to=none",), 0),
        (("kl.apply_to=loss",), 1),
        (("kl.apply_to=reward",), 2),
        (("kl.apply_to=loss", "run.num_update=2"), 2),
    ):
        models, config, _ = plan(*overrides)
        conversations = conversations_of(models, config)
        assert (conversations.count, conversations.mean_tokens, conversations.prompt_tokens) == (64, 128, 16)
        assert step_seconds(models, config) == rl_step_seconds(models.hf, config, conversations, passes)


def test_a_critic_adds_to_the_phases_of_training(plan: Plan) -> None:
    models, config, _ = plan("algorithm=ppo", "kl.apply_to=none")
    assert models.critic_hf is not None
    conversations, seconds = conversations_of(models, config), step_seconds(models, config)
    actor = rl_step_seconds(models.hf, config, conversations, 1)
    critic = training_seconds(models.critic_hf, config, conversations, 1, role="critic")
    assert seconds["updates"] == actor["updates"] + critic["updates"]
    assert seconds["log-probs"] == actor["log-probs"] + critic["log-probs"]
    models, config, _ = plan("algorithm=ppo", "kl.apply_to=none", "placement={critic: 0-1, actor: 2-3}")
    apart = step_seconds(models, config)["updates"]
    assert apart == max(
        rl_step_seconds(models.hf, config, conversations, 0)["updates"],
        training_seconds(models.critic_hf or {}, config, conversations, 1, role="critic")["updates"],
    )


def test_changes_save_what_they_say_and_are_valid(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_changes, "MIN_SAVING", 0.0)
    monkeypatch.setattr(layout_changes, "NUM_CHANGES", 100)
    models, config, _ = plan("parallel.tp=2", "parallel.pp=2", "rollout.concurrency=4", FULL)
    changes = best_changes(models, config)
    # A tiny model is fastest with the least communication, on engines of one rank.
    expected = {
        "parallel.tp=1 rather than 2",
        "parallel.pp=1 rather than 2",
        "rollout.tp=1 rather than 2",
        "rollout.concurrency=8 rather than 4",
        "no recomputation rather than full",
    }
    assert {change.text for change in changes} == expected
    assert [change.saving for change in changes] == sorted((change.saving for change in changes), reverse=True)
    total = sum(step_seconds(models, config).values())
    for change in changes:
        assert sum(step_seconds(models, change.config).values()) == pytest.approx(total * (1 - change.saving))
        assert validate(change.config, dry_run=True).ok
        assert str(change) == f"{change.text}: about {change.saving * 100:.0f} % fewer seconds"


def test_changes_fit(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_changes, "MIN_SAVING", 0.0)
    job, less = (FULL, "train.max_tokens_per_gpu=16384"), "no recomputation rather than full"
    roomy = plan(*job)
    assert less in texts(roomy)
    needed = max(stage.peak for stage in roomy[2].memory) / USABLE_FRACTION / 1e9
    assert less not in texts(plan(*job, f"parallel.gpu_gb={1.001 * needed}"))
    # Without a size, the smallest GPU on the market is large enough.
    assert less in texts(plan(*job, "parallel.gpu_gb=null"))


def test_lines_of_a_report(plan: Plan) -> None:
    models, config, _ = plan("rollout.concurrency=1")
    first, *changes = describe_step(models, config)
    assert first.startswith("modelled on H100s, with 128 tokens per conversation on average: ")
    assert all(f"{phase} " in first for phase in step_seconds(models, config))
    assert changes[0].startswith("- ") and changes[0].endswith(" % fewer seconds") and 1 <= len(changes) <= 3


def test_a_fast_layout_has_no_change(plan: Plan) -> None:
    models, config, _ = plan("rollout.tp=1")
    assert describe_step(models, config)[1:] == ["- no change of one size would save 3 % and fit"]


def test_only_steps_with_engines_are_modelled(plan: Plan) -> None:
    models, config, _ = plan("algorithm=sft")
    assert describe_step(models, config) == []
