"""How many rollouts may be aborted, and what is said of them."""

from __future__ import annotations

import pytest

from megarl.config import Config, ConfigError, from_dict
from megarl.rollout.aborted import check_abort_limit, summarize_aborts
from megarl.types import Prompt, Rollout, Rollouts, Turn, as_branches

WHOLE = Rollout(Prompt("p", ()), (Turn((1,)),))


def aborted(failure: str) -> Rollout:
    return Rollout(Prompt("p", ()), (Turn((1,)),), status="aborted", failure=failure)


def config(share: float) -> Config:
    return from_dict({"run": {"dir": "runs/x"}, "rollout": {"max_aborted_frac": share}})


def test_the_most_frequent_reasons_come_first() -> None:
    assert summarize_aborts(Rollouts.gather([WHOLE])) == ""
    result = [aborted(text) for text in ("late", "odd\nanswer", "late", "d", "", "e")]
    assert summarize_aborts(Rollouts.gather(result)) == "2 x late, 1 x odd answer, 1 x d, and 2 other reasons"


def test_the_share_is_the_last_that_is_allowed() -> None:
    check_abort_limit(Rollouts.gather([]), config(0.0))
    check_abort_limit(Rollouts.gather([WHOLE] * 9 + [aborted("late")]), config(0.1))
    check_abort_limit(Rollouts.gather([aborted("late")] * 3), config(1.0))
    with pytest.raises(ConfigError) as failure:
        check_abort_limit(Rollouts.gather([WHOLE] * 7 + [aborted("late")] * 2), config(0.1))
    text = str(failure.value)
    assert text.startswith("2 of 9 rollouts were aborted, more than rollout.max_aborted_frac=0.1 allows: 2 x late. ")
    assert "runs/x/logs" in text and "raise rollout.request_timeout" in text and "\n" not in text


def test_an_episode_is_one_however_many_its_branches() -> None:
    rollouts = Rollouts.gather([WHOLE] * 8 + [*as_branches([aborted("late")] * 5, 0), *as_branches([WHOLE] * 3, 1)])
    assert summarize_aborts(rollouts) == "1 x late"
    check_abort_limit(rollouts, config(0.1))
    with pytest.raises(ConfigError, match="^1 of 10 rollouts were aborted"):
        check_abort_limit(rollouts, config(0.09))
