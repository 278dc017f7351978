"""DAPO's dynamic sampling: generate until the batch is full of informative groups, up to a limit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scripted_flow import ScriptedFlow  # noqa: E402

from megarl.config import ConfigError, from_dict  # noqa: E402
from megarl.controllers.controller import make_controller  # noqa: E402
from megarl.types import Prompt  # noqa: E402

pytestmark = pytest.mark.alone

MIXED, RIGHT, WRONG = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]


def step(generations: list[Any], prompts: int = 2, **options: Any) -> tuple[Any, ScriptedFlow]:
    config = from_dict({"algorithm": "dapo", "rollout": {"samples_per_prompt": 2}, "options": options})
    flow: Any = ScriptedFlow(config, generations)
    return make_controller(config).step(flow, [Prompt(str(i), ()) for i in range(prompts)]), flow


def test_full_batch_needs_one_generation() -> None:
    result, flow = step([[MIXED, MIXED]])
    assert flow.num_prompts == [2] and result.batch.group.tolist() == [0, 0, 1, 1]
    metrics = {name: result.metrics[f"rollout/{name}"] for name in ("num_gen_batches", "missing_groups")}
    assert metrics == {"num_gen_batches": 1, "missing_groups": 0}
    assert result.metrics["rollout/informative_groups_frac"] == 1


def test_missing_groups_are_sampled_from_further_prompts() -> None:
    """1 of 4 groups is informative, so 3 are missing; the next request scales by that share and keeps the first 3."""
    result, flow = step([[RIGHT, MIXED, WRONG, WRONG], [MIXED, RIGHT, MIXED, MIXED]], prompts=4)
    assert flow.num_prompts == [4, 4]
    assert result.batch.group.tolist() == [1, 1, 4, 4, 6, 6, 7, 7]
    assert result.rollouts.group.tolist() == [g for g in range(8) for _ in range(2)]  # all are recorded
    assert result.trained_rollouts.local == tuple(r for r in result.rollouts.local if r.group in (1, 4, 6, 7))
    result, flow = step([[MIXED, MIXED, WRONG, MIXED], [MIXED]], prompts=4)
    assert flow.num_prompts == [4, 1] and result.batch.group.tolist() == [0, 0, 1, 1, 3, 3, 4, 4]


def test_surplus_groups_are_dropped() -> None:
    result, flow = step([[WRONG, MIXED], [MIXED, MIXED]])
    assert flow.num_prompts == [2, 2] and result.batch.group.tolist() == [1, 1, 2, 2]


def test_stops_at_max_num_gen_batches() -> None:
    result, flow = step([[WRONG, WRONG], [MIXED, RIGHT], [RIGHT, RIGHT]], max_num_gen_batches=3)
    assert flow.num_prompts == [2, 2, 2] and result.batch.group.tolist() == [2, 2]
    assert result.metrics["rollout/missing_groups"] == 1


def test_uninformative_groups_leave_the_policy_unchanged() -> None:
    result, flow = step([[WRONG, WRONG]], max_num_gen_batches=1)
    assert result.batch.num_sequences == 4 and not result.batch.advantages.any()
    assert result.metrics["rollout/informative_groups_frac"] == 0
    assert not flow.policy.table.detach().any()  # the initial zeros


def test_aborted_rollouts_are_not_informative() -> None:
    result, _ = step([[[1.0, None], MIXED], [MIXED, MIXED]])
    assert result.batch.group.tolist() == [1, 1, 2, 2]


def test_filters_groups_by_a_reward_part() -> None:
    """Total rewards differ by a penalty although both responses are right."""
    result, _ = step([[[1.0, 1.5], [1.0, 0.5]]], prompts=2, filter_metric="right", max_num_gen_batches=1)
    assert result.batch.group.tolist() == [1, 1]
    with pytest.raises(
        ConfigError, match=r"^options.filter_metric=left is not a part of the reward; its parts are right$"
    ):
        step([[MIXED, MIXED]], filter_metric="left")


def test_overlong_penalty_lowers_the_reward() -> None:
    """Two of at most 3 tokens is halfway into a buffer of 2. The penalty does not make a group informative."""
    rollout = {"samples_per_prompt": 2, "max_new_tokens": 3, "max_turns": 1}
    config = {"algorithm": "dapo", "loss": {"scale_factor": 100}, "rollout": rollout}
    for buffer_len, factor, reward in ((2, 1.0, [0.5, -0.5]), (2, 0.2, [0.9, -0.1]), (0, 1.0, [1.0, 0.0])):
        options = {"overlong_buffer_len": buffer_len, "overlong_penalty_factor": factor, "max_num_gen_batches": 1}
        config_with_buffer = from_dict(config | {"options": options})
        flow: Any = ScriptedFlow(config_with_buffer, [[MIXED, RIGHT]])
        result = make_controller(config_with_buffer).step(flow, [Prompt("a", ()), Prompt("b", ())])
        assert result.batch is not None and result.rollouts is not None
        assert result.batch.sequence_reward.tolist() == pytest.approx(reward)
        assert ("overlong" in result.rollouts.reward_parts) == bool(buffer_len)


def test_rejects_an_overlong_buffer_beyond_the_response_budget() -> None:
    def options(buffer_len: int | None) -> Any:
        rollout = {"max_new_tokens": 100, "max_turns": 2}
        config = from_dict({"algorithm": "dapo", "rollout": rollout, "options": {"overlong_buffer_len": buffer_len}})
        return make_controller(config).options

    assert options(None).overlong_buffer_len is None and options(200).overlong_buffer_len == 200
    with pytest.raises(ConfigError, match=r"^options.overlong_buffer_len=201 exceeds the response budget of 200"):
        options(201)
