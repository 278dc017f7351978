"""DAPO goes on sampling until its batch is full of groups that tell something, and no longer than it may."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from played import Played  # noqa: E402

from megarl.config import ConfigError, from_dict  # noqa: E402
from megarl.controllers.controller import make_controller  # noqa: E402
from megarl.types import Prompt  # noqa: E402

pytestmark = pytest.mark.alone

SOME, RIGHT, WRONG = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]


def step(played: list[Any], prompts: int = 2, **options: Any) -> tuple[Any, Played]:
    config = from_dict({"algorithm": "dapo", "rollout": {"samples_per_prompt": 2}, "options": options})
    flow: Any = Played(config, played)
    return make_controller(config).step(flow, [Prompt(str(i), ()) for i in range(prompts)]), flow


def test_a_batch_that_is_full_at_once() -> None:
    result, flow = step([[SOME, SOME]])
    assert flow.asked == [2] and result.batch.group.tolist() == [0, 0, 1, 1]
    figures = {name: result.metrics[f"rollout/{name}"] for name in ("num_gen_batches", "missing_groups")}
    assert figures == {"num_gen_batches": 1, "missing_groups": 0}
    assert result.metrics["rollout/informative_groups_frac"] == 1


def test_what_lacks_is_sampled_from_further_prompts() -> None:
    """Of 4 prompts 1 tells something: the 3 that lack are asked for at that share, of which the first so many count."""
    result, flow = step([[RIGHT, SOME, WRONG, WRONG], [SOME, RIGHT, SOME, SOME]], prompts=4)
    assert flow.asked == [4, 4]
    assert result.batch.group.tolist() == [1, 1, 4, 4, 6, 6, 7, 7]
    assert result.rollouts.group.tolist() == [g for g in range(8) for _ in range(2)]  # all of them are recorded
    assert result.trained_rollouts.local == tuple(r for r in result.rollouts.local if r.group in (1, 4, 6, 7))
    result, flow = step([[SOME, SOME, WRONG, SOME], [SOME]], prompts=4)
    assert flow.asked == [4, 1] and result.batch.group.tolist() == [0, 0, 1, 1, 3, 3, 4, 4]


def test_more_than_are_wanted_are_left_out() -> None:
    result, flow = step([[WRONG, SOME], [SOME, SOME]])
    assert flow.asked == [2, 2] and result.batch.group.tolist() == [1, 1, 2, 2]


def test_it_does_not_sample_for_ever() -> None:
    result, flow = step([[WRONG, WRONG], [SOME, RIGHT], [RIGHT, RIGHT]], max_num_gen_batches=3)
    assert flow.asked == [2, 2, 2] and result.batch.group.tolist() == [2, 2]
    assert result.metrics["rollout/missing_groups"] == 1


def test_where_nothing_tells_anything_nothing_is_learned() -> None:
    result, flow = step([[WRONG, WRONG]], max_num_gen_batches=1)
    assert result.batch.num_sequences == 4 and not result.batch.advantages.any()
    assert result.metrics["rollout/informative_groups_frac"] == 0
    assert not flow.policy.table.detach().any()  # which began as zeros


def test_aborted_ones_tell_nothing() -> None:
    result, _ = step([[[1.0, None], SOME], [SOME, SOME]])
    assert result.batch.group.tolist() == [1, 1, 2, 2]


def test_by_a_part_of_the_reward() -> None:
    """Whole rewards differ by a penalty where both answers are right."""
    result, _ = step([[[1.0, 1.5], [1.0, 0.5]]], prompts=2, filter_metric="right", max_num_gen_batches=1)
    assert result.batch.group.tolist() == [1, 1]
    with pytest.raises(
        ConfigError, match=r"^options.filter_metric=left is not a part of the reward; its parts are right$"
    ):
        step([[SOME, SOME]], filter_metric="left")


def test_what_is_too_long_costs_up_to_1() -> None:
    """Answers of two tokens where one may have 3: half way into a buffer of 2. It tells nobody apart."""
    config = {"algorithm": "dapo", "loss": {"scale_factor": 3}, "rollout": {"samples_per_prompt": 2}}
    for share, reward in ((2 / 3, [0.5, -0.5]), (0.0, [1.0, 0.0])):
        created = from_dict(config | {"options": {"overlong_buffer": share, "max_num_gen_batches": 1}})
        flow: Any = Played(created, [[SOME, RIGHT]])
        result = make_controller(created).step(flow, [Prompt("a", ()), Prompt("b", ())])
        assert result.batch is not None and result.rollouts is not None
        assert result.batch.sequence_reward.tolist() == reward
        assert ("overlong" in result.rollouts.reward_parts) == bool(share)
