"""Rewards by functions, in processes beside the ranks and while generation continues, and by HTTP services.

All ranks get the numbers; no texts are sent. Reward models are workers of their own, which add their part to those of
the functions, the environments and the service. `Ahead` starts a reward as soon as its conversation has ended.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import torch

from megarl.config import ConfigError
from megarl.parallel import row_exchange
from megarl.parallel.placement import engine_ranks
from megarl.parallel.ranks import patient, together
from megarl.processes.process_limits import Limits
from megarl.rewards import composite
from megarl.rewards.composite import checked_weights, fused_episodes
from megarl.rewards.failed_rewards import check_unscored, given_up, has_failed, too_many
from megarl.rewards.functions import checked, load_functions
from megarl.rewards.reward_pool import AT_ONCE, Judging, Pool, Verdicts
from megarl.rewards.reward_process import GRACE_S, score
from megarl.rewards.reward_settings import check_names, service_of
from megarl.types import Failed, Reward, Rollout, Rollouts, Turn, Verdict
from megarl.workers.context import Context, Worker


class _Begun(Protocol):
    def done(self) -> bool: ...


Begun = TypeVar("Begun", bound=_Begun)


class Ahead(Generic[Begun]):
    """begin: what is to be begun, from the thread in which conversations end.

    A conversation is known again by its last turn, which nobody else has: later it may be of another group, or step.
    """

    def __init__(self, begin: Callable[[Rollout], Begun]) -> None:
        self._begin = begin
        self._begun: dict[int, tuple[weakref.ref[Turn], Begun]] = {}

    def ended(self, rollout: Rollout) -> None:
        """Is told of a conversation that has ended."""
        turn, begun = rollout.turns[-1], self._begun
        number = id(turn)
        # Nobody asks for one that is dropped.
        begun[number] = weakref.ref(turn, lambda _: begun.pop(number, None)), self._begin(rollout)

    def take(self, rollout: Rollout) -> tuple[Begun, bool]:
        """What is said of a rollout, begun now where it was not; and whether it was there already."""
        turn = rollout.turns[-1]
        known = self._begun.pop(id(turn), None)
        if known is None or known[0]() is not turn:
            return self._begin(rollout), False
        return known[1], known[1].done()


_A_DAY_S = 86400.0
_LOOK_S = 1.0
"""How often the ranks see together how many rewards have failed, while some are waited for."""
_MOST = 64
"""Processes of a machine, where `reward.processes` does not say how many."""


class RewardWorker(Worker):
    """The backends of the role that have no model: `pool`, functions alone; `http` and `judge`, which add a part, for
    which each rank asks about its own rollouts. Options are those of `rewards/service.py` or `rewards/judge.py`.

    Those of `reward.functions` are called in a pool of processes by each rank that generates, for each conversation as
    soon as it has ended. One that a script hands over is called in the ranks' own processes when all have ended: a
    machine's ranks share its rollouts evenly, and what it does to its process, ending it included, is that rank's.
    """

    model_part = ""
    """Name of the part that a backend computes by a model; empty where there is none."""

    def __init__(self, context: Context, reward_fn: Callable[[Rollout], Any] | None = None, **options: Any) -> None:
        super().__init__(context)
        config = self.config.reward
        self.service = service_of(self.config, options)
        self.judges = tuple(
            name for name in (self.model_part, "" if self.service is None else self.service.part) if name
        )
        """Names of the parts that are judged when all conversations have ended."""
        if reward_fn is not None:
            self.functions = {getattr(reward_fn, "__name__", "reward_fn"): checked(reward_fn, "reward_fn")}
        else:
            self.functions = load_functions(config.functions)
        self._post = row_exchange.post()
        self._here = min(self.job.world, self.config.parallel.ranks_per_node)
        self._by_environments = composite.is_part(self.config.rollout, bool(self.functions or self.judges))
        if not self.parts:
            raise ConfigError(
                "there is no reward: set reward.functions to a list of module:name, or reward.model, or pass "
                "reward_fn, or name an environment with a `reward` in rollout.environments"
            )
        check_names(self.functions, self.parts[len(self.functions) :])
        self.weights = checked_weights(config.weights, self.parts)
        self._in_time = 1.0
        self.scored: list[tuple[Rollouts, Rollouts]] = []
        """What the step under way was asked to score, and what it answered."""
        self._pool: Pool | None = None
        if self.functions and reward_fn is None:
            log = context.run_dir / "logs" / f"rewards_{self.job.rank}.log"
            limits = Limits(self.config.rollout.pass_env, self.config.rollout.tool_memory_mb)
            homes = self._homes()
            beside = max(1, sum(home // self._here == self._machine for home in homes))
            size = max(1, self._processes() // beside)
            at_once = AT_ONCE
            if any(getattr(function, "sandboxed", False) for function in self.functions.values()):
                at_once = max(1, self.config.sandbox.processes // (beside * size))  # others would wait for a box
            self._pool = Pool(self.functions, config.functions, config.timeout, size, log, limits, at_once)
            self._ahead = Ahead(self._pool.begin)
            if self.job.rank in homes:
                self._pool.start()
                context.ended.tell(self._ahead.ended)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts of a reward, each of which may have a weight."""
        own = (composite.PART,) if self._by_environments else ()
        return (*self.functions, *own, *self.judges)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self.scored = []

    def start(self) -> None:
        """Raises ConfigError where the service does not answer."""
        if self.service is not None:
            together(self.service.asker.check_here)
            together(self.service.look, lead=True)

    def ready(self) -> None:
        """Raises ConfigError where the functions cannot be had in the pool's processes."""
        together(lambda: None if self._pool is None else self._pool.ready())

    def score(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts with `reward`, `reward_parts` and their turns' rewards.

        Of an episode its last branch is shown, and the verdict is of all. Aborted ones are shown to nobody and stay
        without. What they had before, as those that another run recorded, is not counted. Where a part of it fails, a
        rollout has no reward: it is `unscored`. Raises ConfigError on all ranks where these are more than
        `reward.max_failed`, as soon as they are: the others are not waited for then.
        """
        whole = rollouts.select(rollouts.episodes.is_last & ~rollouts.are("aborted"))
        with self.clock.phase("reward", "reward"), patient(self._longest(whole)):
            found: list[dict[str, Verdict]] = [{} for _ in whole.here]
            if self._pool is not None:
                found = [dict(verdicts) for verdicts in self._by_pool(whole)]
            elif self.functions:
                found = self._in_process(whole)
            for verdicts, rollout in zip(found, whole.here, strict=True):
                verdicts |= self._by_environment(rollout)
                if not verdicts and not self.judges:
                    verdicts[composite.PART] = composite.NOBODY
            if self.judges and len(whole):
                together(lambda: None)  # who judges has a patience of its own, which begins when all are there
                for place, part in enumerate(self.judges):
                    if (self.functions or place) and self._too_many(sum(map(has_failed, found)), whole):
                        found = [given_up(verdicts, [*verdicts, *self.judges]) for verdicts in found]
                        break
                    for verdicts, verdict in zip(found, self.judged(whole, part), strict=True):
                        verdicts[part] = verdict
            scored = rollouts.with_(fused_episodes(rollouts, found, self.weights))
        self.scored.append((rollouts, scored))
        check_unscored(scored, self.config.reward)
        return scored

    def _by_environment(self, rollout: Rollout) -> dict[str, Verdict]:
        """What came with it; of a recorded one the figure that it had."""
        if rollout.verdict is not None:
            return {composite.PART: rollout.verdict}
        if self.config.rollout.replay and composite.PART in rollout.reward_parts:
            return {composite.PART: Reward(rollout.reward_parts[composite.PART])}
        return {}

    def judged(self, whole: Rollouts, part: str) -> Sequence[Verdict]:
        """What a part of `judges` is of each of those that are here, of rollouts none of which was aborted;
        collective."""
        service = self.service
        assert service is not None and part == service.part
        fullest = int(torch.bincount(whole.home).max())
        found: list[Verdict] = []

        def ask() -> None:
            for said in service.scores(whole.here, self.config.reward.max_failed * len(whole)):
                found.append(said if isinstance(said, Failed) else Reward(*said))

        with patient(max(self.config.run.timeout_s, service.longest(fullest))):
            together(ask)
        return found

    def controls(self) -> Mapping[str, Callable[[Any], Any]]:
        return {"reward.weights": lambda given: checked_weights(given, self.parts)}

    def control(self, key: str, value: Any) -> None:
        self.weights = value

    def figures(self) -> dict[str, float]:
        """Weights, where there are any; the share of rollouts whose functions had been called when they were asked
        for."""
        weights = {f"reward/{name}_weight": self.weights.get(name, 1.0) for name in self.parts if self.weights}
        return weights | ({} if self._pool is None else {"perf/rewards_ahead_frac": self._in_time})

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    # --- the pool

    def _homes(self) -> set[int]:
        """Ranks that will have rollouts, which share their machine's processes."""
        if self.config.rollout.replay:
            return set(range(self.job.world))
        return {members[0] for members in engine_ranks(self.config)}

    @property
    def _machine(self) -> int:
        return self.job.rank // self._here

    def _processes(self) -> int:
        """Of a machine."""
        return self.config.reward.processes or min(_MOST, max(1, len(os.sched_getaffinity(0)) // 2))

    def _by_pool(self, whole: Rollouts) -> list[Verdicts]:
        begun: list[tuple[Judging, bool]] = [self._ahead.take(rollout) for rollout in whole.here]
        done = torch.tensor([sum(there for _, there in begun), len(begun)])
        in_time, count = whole.everyone.total(done).tolist()
        self._in_time = in_time / max(1, count)
        goes_on = True
        while goes_on:
            waiting = wait([one.future for one, _ in begun], _LOOK_S).not_done
            goes_on = bool(whole.everyone.total(torch.tensor([len(waiting)])).item())
            if goes_on and self._too_many(sum(has_failed(one.known) for one, _ in begun), whole):
                return [given_up(one.give_up(), list(self.functions)) for one, _ in begun]
        return [one.result() for one, _ in begun]

    def _too_many(self, failed: int, whole: Rollouts) -> bool:
        """Whether `reward.max_failed` cannot be kept any more. failed: rollouts that are here and have no reward.
        Collective."""
        return too_many(int(whole.everyone.total(torch.tensor([failed])).item()), len(whole), self.config.reward)

    # --- in this process

    def _longest(self, whole: Rollouts) -> float:
        """The longest that the slowest rank may take, if each of its calls takes as long as one may."""
        shares = spread_out(whole.home.tolist(), self._here)
        if self._pool is not None:
            most = max(Counter(whole.home.tolist()).values(), default=0)
        else:
            most = max((sum(by.get(rank, 0) for by in shares.values()) for rank in range(self.job.world)), default=0)
        limit = min(self.config.reward.timeout, _A_DAY_S) + GRACE_S
        return max(self.config.run.timeout_s, limit * most * len(self.functions))

    def _in_process(self, whole: Rollouts) -> list[dict[str, Verdict]]:
        """Of those that are here, called here or by a rank beside."""
        shares = spread_out(whole.home.tolist(), self._here)
        mine = iter(enumerate(whole.here))
        parcels: dict[int, list[tuple[int, Rollout]]] = {}
        for rank, count in shares.get(self.job.rank, {}).items():
            parcels[rank] = [
                (index, replace(rollout, routing=None, support=None)) for index, rollout in islice(mine, count)
            ]
        answers: dict[int, list[tuple[int, dict[str, Verdict]]]] = {}
        for rank, parcel in self._post.exchange_objects(parcels).items():
            most_failed = self.config.reward.max_failed * len(whole)
            found = score([rollout for _, rollout in parcel], self.functions, self.config.reward.timeout, most_failed)
            answers[rank] = [(index, verdicts) for (index, _), verdicts in zip(parcel, found, strict=True)]
        back = self._post.exchange_objects(answers)
        by_index = dict(one for some in back.values() for one in some)
        return [by_index[index] for index in range(len(whole.here))]


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
