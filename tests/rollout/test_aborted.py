"""The limit on aborted rollouts, and the summary of why they were aborted."""

from __future__ import annotations

import pytest

from megarl.config import Config, ConfigError, from_dict
from megarl.rollout.aborted import check_abort_limit, summarize_aborts
from megarl.types import Prompt, Rollout, Rollouts, Turn, as_branches

COMPLETE = Rollout(Prompt("p", ()), (Turn((1,)),))


def make_aborted(failure: str) -> Rollout:
    return Rollout(Prompt("p", ()), (Turn((1,)),), status="aborted", failure=failure)


def make_config(share: float) -> Config:
    return from_dict({"run": {"dir": "runs/x"}, "rollout": {"max_aborted_frac": share}})


def test_summary_lists_most_frequent_reasons_first() -> None:
    assert summarize_aborts(Rollouts.gather([COMPLETE])) == ""
    result = [make_aborted(text) for text in ("late", "odd\nanswer", "late", "d", "", "e")]
    assert summarize_aborts(Rollouts.gather(result)) == "2 x late, 1 x odd answer, 1 x d, and 2 other reasons"


def test_exceeding_max_aborted_frac_is_an_error() -> None:
    check_abort_limit(Rollouts.gather([]), make_config(0.0))
    check_abort_limit(Rollouts.gather([COMPLETE] * 9 + [make_aborted("late")]), make_config(0.1))
    check_abort_limit(Rollouts.gather([make_aborted("late")] * 3), make_config(1.0))
    with pytest.raises(ConfigError) as failure:
        check_abort_limit(Rollouts.gather([COMPLETE] * 7 + [make_aborted("late")] * 2), make_config(0.1))
    text = str(failure.value)
    assert text.startswith("2 of 9 rollouts were aborted, more than rollout.max_aborted_frac=0.1 allows: 2 x late. ")
    assert "runs/x/logs" in text and "raise rollout.request_timeout" in text and "\n" not in text


def test_counts_an_episode_once_whatever_its_branches() -> None:
    rollouts = Rollouts.gather(
        [COMPLETE] * 8 + [*as_branches([make_aborted("late")] * 5, 0), *as_branches([COMPLETE] * 3, 1)]
    )
    assert summarize_aborts(rollouts) == "1 x late"
    check_abort_limit(rollouts, make_config(0.1))
    with pytest.raises(ConfigError, match="^1 of 10 rollouts were aborted"):
        check_abort_limit(rollouts, make_config(0.09))
