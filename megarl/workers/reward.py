"""Rewards by functions, in a pool of processes: those of the ranks that have the rollouts, and of the idle ones beside.

The numbers go everywhere, the texts at most to another rank of the machine. What else judges rollouts, a model or a
service, is a backend of its own, which adds to what the functions say.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice

from megarl.config import ConfigError
from megarl.parallel import everyone
from megarl.parallel.ranks import all_gather_objects, patient
from megarl.rewards.deadline import GRACE_S
from megarl.rewards.functions import Parts, checked, load_functions, score
from megarl.types import Rollout, Rollouts
from megarl.workers.context import Context, Worker

_A_DAY_S = 86400.0


class RewardWorker(Worker):
    """The backend `pool` of the role: functions alone.

    A machine's ranks share its rollouts evenly, each calls the functions in its own process, one rollout after another,
    under `reward.timeout`. What a function does to its process, ending it included, is that rank's.
    """

    judges = ""
    """Name of the part that a backend adds to those of the functions; empty where it adds none."""

    def __init__(self, context: Context, reward_fn: Callable[[Rollout], float] | None = None) -> None:
        super().__init__(context)
        if reward_fn is not None:
            self.functions = {getattr(reward_fn, "__name__", "reward_fn"): checked(reward_fn, "reward_fn")}
        else:
            self.functions = load_functions(self.config.reward.functions)
        self._post = everyone.post()
        self._here = min(self.job.world, self.config.parallel.ranks_per_node)
        if not self.functions and not self.judges:
            raise ConfigError(
                "there is no reward: set reward.functions to a list of module:name, or reward.model, or pass reward_fn"
            )
        if self.judges in self.functions:
            raise ConfigError(f"a reward function may not be called {self.judges!r}, which is another part; rename it")

    def score(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts with `reward` and `reward_parts`; an error of a function on one rank is raised on all.

        Aborted ones are shown to nobody and stay without. What they had before, as those that another run recorded,
        is not counted.
        """
        with self.clock.phase("reward", "reward"):
            if self.functions:
                here = self._by_functions(rollouts)
            else:
                here = [dataclasses.replace(rollout, reward=0.0, reward_parts={}) for rollout in rollouts.here]
            scored = rollouts.with_(here)
            whole = scored.select(~scored.are("aborted"))
            if not self.judges or not len(whole):
                return scored
            return scored.with_(_added(scored.here, self.judged(whole)))

    def judged(self, whole: Rollouts) -> Sequence[Parts]:
        """What the backend says of each of those that are here, of rollouts none of which was aborted; collective."""
        raise NotImplementedError

    def _by_functions(self, rollouts: Rollouts) -> list[Rollout]:
        """Those that are here, scored here or by a rank beside."""
        shares = spread_out(rollouts.home[~rollouts.are("aborted")].tolist(), self._here)
        whole = [index for index, rollout in enumerate(rollouts.here) if rollout.status != "aborted"]
        mine = iter(whole)
        parcels: dict[int, list[tuple[int, Rollout]]] = {}
        for rank, count in shares.get(self.job.rank, {}).items():
            parcels[rank] = [
                (index, dataclasses.replace(rollouts.here[index], routing=None, support=None))
                for index in islice(mine, count)
            ]
        # The longest that the slowest rank may take, if each of its calls takes as long as one may.
        limit = self.config.reward.timeout
        most = max((sum(by.get(rank, 0) for by in shares.values()) for rank in range(self.job.world)), default=0)
        longest = max(self.config.run.timeout_s, (min(limit, _A_DAY_S) + GRACE_S) * most * len(self.functions))
        with patient(longest):
            arrived = self._post.exchange_objects(parcels)
            error = None
            answers: dict[int, list[tuple[int, float, dict[str, float]]]] = {}
            try:
                for rank, parcel in arrived.items():
                    found = score([rollout for _, rollout in parcel], self.functions, limit)
                    answers[rank] = [
                        (index, rollout.reward, rollout.reward_parts)
                        for (index, _), rollout in zip(parcel, found, strict=True)
                    ]
            except ValueError as failure:
                error = str(failure)
            if errors := [text for text in all_gather_objects(error) if text]:
                raise ConfigError(errors[0])
            back = self._post.exchange_objects(answers)
        scored = list(rollouts.here)
        for index, reward, parts in (answer for answers_of in back.values() for answer in answers_of):
            scored[index] = dataclasses.replace(scored[index], reward=reward, reward_parts=parts)
        return scored


def spread_out(homes: Sequence[int], here: int) -> dict[int, dict[int, int]]:
    """How many of its rollouts each rank lets another one score, itself included: [home][rank]. Pure.

    homes: rank of each rollout. A machine has `here` ranks, which share its rollouts evenly; only what is too many for
    their home goes to another.
    """
    counts = Counter(homes)
    shares: dict[int, dict[int, int]] = {}
    for machine in sorted({home // here for home in counts}):
        members = range(machine * here, (machine + 1) * here)
        quota, rest = divmod(sum(counts[rank] for rank in members), here)
        fullest = sorted(members, key=lambda rank: (-counts[rank], rank))
        quotas = {rank: quota + (place < rest) for place, rank in enumerate(fullest)}
        room = {rank: max(0, quotas[rank] - counts[rank]) for rank in members}
        for home in members:
            if not counts[home]:
                continue
            shares[home] = {home: min(counts[home], quotas[home])}
            left = counts[home] - shares[home][home]
            for rank in members:
                if moved := min(left, room[rank]):
                    shares[home][rank] = moved
                    room[rank] -= moved
                    left -= moved
    return shares


def _added(here: Sequence[Rollout], judged: Sequence[Parts]) -> list[Rollout]:
    """Those that are here, with what was said of those of them that were not aborted."""
    said = iter(judged)
    found = []
    for rollout in here:
        if rollout.status != "aborted":
            reward, parts = next(said)
            whole = math.fsum((rollout.reward, reward))
            rollout = dataclasses.replace(rollout, reward=whole, reward_parts={**rollout.reward_parts, **parts})
        found.append(rollout)
    return found
