"""The answers of an evaluation as plain JSON, one a line, for whoever reads it without this package."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megarl.evaluation.figures import UNNAMED
from megarl.types import Rollout


def as_lines(rollouts: Iterable[Rollout], right: float, unnamed: str = UNNAMED) -> Iterator[dict[str, Any]]:
    """`right`: from which reward on an answer is right; unnamed: as of `Answer.of`. `reward` and `right` are null where
    it was aborted or a part of its reward failed; `messages` are in OpenAI's format, the prompt's first."""
    for one in rollouts:
        has_reward = one.status != "aborted" and not one.unscored
        yield {
            "id": one.prompt.id,
            "data_source": one.prompt.data_source or unnamed,
            "group": one.group,
            "reward": one.reward if has_reward else None,
            "right": one.reward >= right if has_reward else None,
            "status": one.status,
            "turns": sum(turn.is_action for turn in one.turns),
            "tokens": one.num_actions,
            "ground_truth": one.prompt.ground_truth,
            "messages": list(one.messages or one.prompt.messages),
        }
