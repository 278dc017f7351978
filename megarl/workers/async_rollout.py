"""Generation beside training: which steps' prompts are admitted, and its metrics.

All ranks keep the same counts. The lead rank of each engine runs a stream of conversations (`rollout/background.py`).
`Generation` is one generation that no step waits for, such as an evaluation: it continues through training and weight
syncs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager

import torch

from megarl.config import Config, ConfigError
from megarl.rollout.background import AtWork
from megarl.rollout.group_queue import ENDLESS, Board, Tickets
from megarl.rollout.rollout_context import Conversations
from megarl.rollout.scheduler import Gathered
from megarl.types import Everyone, Prompt, Rollout, Rollouts
from megarl.workers.staleness import lag_figures


class Generation:
    """Of all ranks together; those that lead no engine have no `mine`. begun: by which version of the weights.
    now: the version that the engines have. waiting: what is on while some ranks wait for theirs."""

    def __init__(
        self,
        mine: Future[Gathered] | None,
        tickets: Tickets,
        everyone: Everyone,
        *,
        begun: int,
        now: Callable[[], int],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._mine, self._tickets, self._everyone, self._now, self._waiting = mine, tickets, everyone, now, waiting
        self.begun = begun

    def is_over(self) -> bool:
        """Whether nobody has anything under way. Collective."""
        return all(self._everyone.objects(self._mine is None or self._mine.done()))

    def result(self) -> Rollouts:
        """What has come of it, when all of it is over; call it once. Raises ConfigError on all ranks where it failed,
        or an engine was lost with answers that no other has generated. Collective."""
        mine: list[Rollout] = []
        error = ""
        with self._waiting():
            try:
                mine = [] if self._mine is None else self._mine.result().rollouts
            except RuntimeError as failure:
                error = str(failure)
            errors = [text for text in self._everyone.objects(error) if text]
        if errors:
            raise ConfigError(errors[0])
        if left := max(self._everyone.objects(0 if self._mine is None else self._tickets.left())):
            raise ConfigError(f"an engine was lost, and with it the answers to {left} prompts")
        return Rollouts.of(mine, [one.group for one in mine], self._everyone, self._now())


def newest_version(rollouts: Rollouts) -> int:
    """Of the weights that chose any of their tokens; -1 where none did. Collective."""
    mine = max((version for one in rollouts.here for version, _ in one.runs), default=-1)
    return max(rollouts.everyone.objects(mine))


NAME = "megarl/generation/stream"

Upcoming = Callable[[int], Sequence[Sequence[Prompt]]]
"""The prompts of so many further steps, as far as there are any."""


class Streaming:
    """talks: of this rank's engine, where it leads one. board: that all leads see. seed_of: a step's."""

    def __init__(
        self,
        config: Config,
        upcoming: Upcoming,
        everyone: Everyone,
        talks: Conversations | None,
        engines: int,
        board: Board,
        seed_of: Callable[[int], int],
        at_work: AtWork,
    ) -> None:
        self._config, self._upcoming, self._everyone, self._talks = config, upcoming, everyone, talks
        self._engines, self._board, self._seed_of, self._at_work = engines, board, seed_of, at_work
        self._samples = 0
        self._admitted = 0
        """The last step whose prompts may be begun; 0 before it all begins."""
        self._taken = 0
        """The last step that took its groups."""
        self.figures: dict[str, float] = {}
        self.lost = 0, 0
        """Conversations that were lost with their engines, and those begun anew, of the last step."""

    def open(self, prompts: Sequence[Prompt], samples: int, step: int) -> None:
        """A step asks for its groups: the first one begins the stream."""
        lag = self._config.rollout.max_lag
        if self._samples not in (0, samples):
            raise ConfigError(
                f"step {step} wants {samples} samples of each prompt, of which {self._samples} were begun before it; "
                "with rollout.asynchronous an algorithm has to ask for as many in each step"
            )
        if self._samples and step != self._taken + 1:
            raise ConfigError(
                f"step {step} takes the answers that were begun for it, but step {self._taken + 1} took none: with "
                "rollout.asynchronous an algorithm has to begin each step by generating for the prompts it is given"
            )
        self._taken = step
        if not self._samples:
            self._samples, self._admitted = samples, step - 1
            if self._talks is not None:
                groups = -(-(1 + lag) * len(prompts) // self._engines)
                tickets = Tickets(ENDLESS, self._engines, self._board, NAME)
                self._talks.start_stream(tickets, samples=samples, groups=groups, at_work=self._at_work)
            self._admit(step, prompts)
        self._admit_up_to(step, step + lag)

    def go_on(self, step: int) -> None:
        """The engines have the weights that the step has made."""
        if self._talks is not None:
            self._talks.resume()
        if self._samples:
            self._admit_up_to(step, step + 1 + self._config.rollout.max_lag)

    def _admit_up_to(self, now: int, last: int) -> None:
        """now: the last step whose prompts were handed out."""
        for step, prompts in enumerate(self._upcoming(last - now), now + 1):
            if step > self._admitted:
                self._admit(step, prompts)

    def _admit(self, step: int, prompts: Sequence[Prompt]) -> None:
        self._admitted = step
        if self._talks is not None:
            self._talks.admit(prompts, self._seed_of(step))

    def note(self, mine: Gathered | None, rollouts: Rollouts) -> None:
        """What is said of a step's generation. mine: of this engine, None without one. Collective."""
        numbers: list[list[float]] = []
        if mine is not None:
            ages = mine.ages
            of_ages = [sum(ages), max(ages, default=0.0), len(ages)]
            numbers.append([mine.slots * mine.seconds, mine.busy, *of_ages, mine.gone, mine.again])
        table = self._everyone.rows(torch.tensor(numbers, dtype=torch.float64).reshape(-1, 7))
        offered, busy, summed, oldest, groups, gone, again = table.T
        self.lost = int(gone.sum()), int(again.sum())
        self.figures = lag_figures(rollouts) | {
            "rollout/age_mean": float(summed.sum()) / max(1.0, float(groups.sum())),
            "rollout/age_max": max(oldest.tolist(), default=0.0),
        }
        if total := float(offered.sum()):
            self.figures["rollout/idle_frac"] = 1 - float(busy.sum()) / total
