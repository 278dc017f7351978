"""A flow with scripted rewards: one list of groups per generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from test_learning import TableFlow

from megarl.config import Config
from megarl.types import Prompt, Rollout, Rollouts, Status, Turn


class ScriptedFlow(TableFlow):
    """Each generation takes the next entry of `sampled` or `greedy`: rewards per prompt, None for an aborted rollout.

    num_prompts: how many prompts each generation got.
    """

    def __init__(
        self, config: Config, sampled: Sequence[Sequence[Sequence[float | None]]], greedy: Sequence[Any] = ()
    ) -> None:
        super().__init__(config)
        self.sampled, self.greedy = list(sampled), list(greedy)
        self.num_prompts: list[int] = []

    def next_items(self, count: int) -> list[Prompt]:
        return [Prompt(f"further {i}", ()) for i in range(count)]

    def generate(self, items: Any, samples: int, greedy: bool = False, held_out: bool = False) -> Rollouts:
        self.num_prompts.append(len(items))
        groups = (self.greedy if greedy else self.sampled).pop(0)
        assert len(groups) == len(items)
        first = 0 if greedy else self.groups
        self.groups += 0 if greedy else len(groups)
        return Rollouts.gather(
            [scripted_rollout(first + i, reward) for i, group in enumerate(groups) for reward in group]
        )

    def score(self, rollouts: Rollouts) -> Rollouts:
        return rollouts


def scripted_rollout(group: int, reward: float | None, version: int = 0) -> Rollout:
    status: Status = "aborted" if reward is None else "stop"
    turns = (Turn((9,)), Turn((1, 4), (-1.8, -1.8), True, version))
    parts = {"right": float((reward or 0.0) >= 1)}
    return Rollout(Prompt(str(group), ()), turns, status, reward or 0.0, reward_parts=parts, group=group)
