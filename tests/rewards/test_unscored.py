"""Limit and summarize rollouts that have no reward."""

from __future__ import annotations

import pytest

from megarl.config import ConfigError, RewardConfig
from megarl.rewards.composite import check_unscored, summarize_unscored
from megarl.types import Prompt, Rollout, Rollouts, Turn, as_branches

pytestmark = pytest.mark.alone


def rollout(number: int, unscored: dict[str, str], aborted: bool = False) -> Rollout:
    status = "aborted" if aborted else "stop"
    return Rollout(Prompt(f"p{number}", ()), (Turn((1,)),), status, unscored=unscored)  # type: ignore[arg-type]


def test_ends_the_run_above_max_failed_frac() -> None:
    timed_out, raised = {"a": "it took\nlonger"}, {"b": "it raised"}
    reasons_by_rollout = [raised, timed_out, {}, timed_out, {}, {}, {}, {}]
    rollouts = Rollouts.gather(
        [rollout(i, item) for i, item in enumerate(reasons_by_rollout)] + [rollout(9, {}, aborted=True)] * 4
    )
    assert rollouts.unscored.tolist() == [1, 1, 0, 1] + [0] * 8
    reasons = "2 x a: it took longer (on the sample 'p1'), 1 x b: it raised (on the sample 'p0')"
    assert summarize_unscored(rollouts) == reasons
    check_unscored(rollouts, RewardConfig(max_failed_frac=3 / 8))
    with pytest.raises(ConfigError) as error:
        check_unscored(rollouts, RewardConfig(max_failed_frac=0.37))
    expected = f"3 of 8 rollouts have no reward, more than reward.max_failed_frac=0.37 allows: {reasons}"
    assert str(error.value) == expected
    many_reasons = Rollouts.gather([rollout(i, {"a": f"reason {i % 5}"}) for i in range(8)])
    assert summarize_unscored(many_reasons).endswith("2 x a: reason 2 (on the sample 'p2'), and 2 other reasons")


def test_accepts_no_rollouts_and_only_aborted_ones() -> None:
    for rollouts in (Rollouts.gather([]), Rollouts.gather([rollout(0, {}, aborted=True)])):
        check_unscored(rollouts, RewardConfig(max_failed_frac=0.0))
        assert summarize_unscored(rollouts) == ""


def test_counts_the_branches_of_an_episode_once() -> None:
    failed = as_branches([rollout(0, {"a": "it raised"})] * 5, 0)
    rollouts = Rollouts.gather([*failed, rollout(1, {}), *as_branches([rollout(2, {})] * 4, 1)])
    check_unscored(rollouts, RewardConfig(max_failed_frac=1 / 3))
    with pytest.raises(ConfigError, match="^1 of 3 rollouts have no reward.* allows: 1 x a: it raised"):
        check_unscored(rollouts, RewardConfig(max_failed_frac=0.33))
