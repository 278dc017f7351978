"""Rewards by functions, in processes beside the ranks and while generation continues, and by HTTP services.

All ranks get the numbers; no texts are sent. Reward models are workers of their own, which add their part to those of
the functions, the environments and the service. `RewardPrefetch` starts a reward as soon as its conversation has ended.
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
from megarl.parallel.ranks import run_on_all, with_timeout
from megarl.processes.process_limits import ProcessLimits
from megarl.rewards import composite
from megarl.rewards.composite import check_weights, combine_episode_rewards
from megarl.rewards.failed_rewards import check_unscored, has_failed, mark_unscored, too_many
from megarl.rewards.functions import check_function, load_functions
from megarl.rewards.reward_pool import MAX_CONCURRENT, PendingVerdicts, RewardPool, Verdicts
from megarl.rewards.reward_process import GRACE_S, score
from megarl.rewards.reward_settings import build_service, check_names
from megarl.types import Reward, RewardFailure, RewardResult, Rollout, Rollouts, Turn
from megarl.workers.context import Context, Worker


class _HasDone(Protocol):
    def done(self) -> bool: ...


Pending = TypeVar("Pending", bound=_HasDone)


class RewardPrefetch(Generic[Pending]):
    """begin: what is to be begun, from the thread in which conversations end.

    A conversation is known again by its last turn, which nobody else has: later it may be of another group, or step.
    """

    def __init__(self, begin: Callable[[Rollout], Pending]) -> None:
        self._start = begin
        self._pending: dict[int, tuple[weakref.ref[Turn], Pending]] = {}

    def on_rollout_finished(self, rollout: Rollout) -> None:
        """Is told of a conversation that has ended."""
        turn, begun = rollout.turns[-1], self._pending
        number = id(turn)
        # Nobody asks for one that is dropped.
        begun[number] = weakref.ref(turn, lambda _: begun.pop(number, None)), self._start(rollout)

    def pop(self, rollout: Rollout) -> tuple[Pending, bool]:
        """What is said of a rollout, begun now where it was not; and whether it was there already."""
        turn = rollout.turns[-1]
        known = self._pending.pop(id(turn), None)
        if known is None or known[0]() is not turn:
            return self._start(rollout), False
        return known[1], known[1].done()


_MAX_TIMEOUT_S = 86400.0
_POLL_S = 1.0
"""How often the ranks see together how many rewards have failed, while some are waited for."""
_MAX_PROCESSES = 64
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
        self.service = build_service(self.config, options)
        self.judged_parts = tuple(
            name for name in (self.model_part, "" if self.service is None else self.service.part) if name
        )
        """Names of the parts that are judged when all conversations have ended."""
        if reward_fn is not None:
            self.functions = {getattr(reward_fn, "__name__", "reward_fn"): check_function(reward_fn, "reward_fn")}
        else:
            self.functions = load_functions(config.functions)
        self._row_exchange = row_exchange.get_row_exchange()
        self._ranks_per_node = min(self.job.world, self.config.parallel.ranks_per_node)
        self._has_env_rewards = composite.has_environment_reward(
            self.config.rollout, bool(self.functions or self.judged_parts)
        )
        if not self.parts:
            raise ConfigError(
                "there is no reward: set reward.functions to a list of module:name, or reward.model, or pass "
                "reward_fn, or name an environment with a `reward` in rollout.environments"
            )
        check_names(self.functions, self.parts[len(self.functions) :])
        self.weights = check_weights(config.weights, self.parts)
        self._prefetched_frac = 1.0
        self.scored: list[tuple[Rollouts, Rollouts]] = []
        """What the step under way was asked to score, and what it answered."""
        self._pool: RewardPool | None = None
        if self.functions and reward_fn is None:
            log = context.run_dir / "logs" / f"rewards_{self.job.rank}.log"
            limits = ProcessLimits(self.config.rollout.pass_env, self.config.rollout.tool_memory_mb)
            homes = self._rollout_ranks()
            beside = max(1, sum(home // self._ranks_per_node == self._node for home in homes))
            size = max(1, self._num_processes() // beside)
            at_once = MAX_CONCURRENT
            if any(getattr(function, "sandboxed", False) for function in self.functions.values()):
                at_once = max(1, self.config.sandbox.processes // (beside * size))  # others would wait for a box
            self._pool = RewardPool(self.functions, config.functions, config.timeout, size, log, limits, at_once)
            self._prefetch = RewardPrefetch(self._pool.submit)
            if self.job.rank in homes:
                self._pool.start()
                context.on_rollout_finished.subscribe(self._prefetch.on_rollout_finished)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts of a reward, each of which may have a weight."""
        own = (composite.PART,) if self._has_env_rewards else ()
        return (*self.functions, *own, *self.judged_parts)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self.scored = []

    def start(self) -> None:
        """Raises ConfigError where the service does not answer."""
        if self.service is not None:
            run_on_all(self.service.client.check_credentials)
            run_on_all(self.service.check_reachable, lead=True)

    def wait_ready(self) -> None:
        """Raises ConfigError where the functions cannot be had in the pool's processes."""
        run_on_all(lambda: None if self._pool is None else self._pool.wait_ready())

    def score(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts with `reward`, `reward_parts` and their turns' rewards.

        Of an episode its last branch is shown, and the verdict is of all. Aborted ones are shown to nobody and stay
        without. What they had before, as those that another run recorded, is not counted. Where a part of it fails, a
        rollout has no reward: it is `unscored`. Raises ConfigError on all ranks where these are more than
        `reward.max_failed`, as soon as they are: the others are not waited for then.
        """
        whole = rollouts.select(rollouts.episodes.is_last & ~rollouts.has_status("aborted"))
        with self.clock.phase("reward", "reward"), with_timeout(self._max_seconds(whole)):
            found: list[dict[str, RewardResult]] = [{} for _ in whole.local]
            if self._pool is not None:
                found = [dict(verdicts) for verdicts in self._score_in_pool(whole)]
            elif self.functions:
                found = self._score_in_process(whole)
            for verdicts, rollout in zip(found, whole.local, strict=True):
                verdicts |= self._env_results(rollout)
                if not verdicts and not self.judged_parts:
                    verdicts[composite.PART] = composite.NO_REWARD
            if self.judged_parts and len(whole):
                run_on_all(lambda: None)  # who judges has a patience of its own, which begins when all are there
                for place, part in enumerate(self.judged_parts):
                    if (self.functions or place) and self._has_too_many_failures(sum(map(has_failed, found)), whole):
                        found = [mark_unscored(verdicts, [*verdicts, *self.judged_parts]) for verdicts in found]
                        break
                    for verdicts, verdict in zip(found, self.score_part(whole, part), strict=True):
                        verdicts[part] = verdict
            scored = rollouts.replace_local(combine_episode_rewards(rollouts, found, self.weights))
        self.scored.append((rollouts, scored))
        check_unscored(scored, self.config.reward)
        return scored

    def _env_results(self, rollout: Rollout) -> dict[str, RewardResult]:
        """What came with it; of a recorded one the figure that it had."""
        if rollout.env_reward is not None:
            return {composite.PART: rollout.env_reward}
        if self.config.rollout.replay and composite.PART in rollout.reward_parts:
            return {composite.PART: Reward(rollout.reward_parts[composite.PART])}
        return {}

    def score_part(self, whole: Rollouts, part: str) -> Sequence[RewardResult]:
        """What a part of `judged_parts` is of each of those that are here, of rollouts none of which was aborted;
        collective."""
        service = self.service
        assert service is not None and part == service.part
        fullest = int(torch.bincount(whole.home).max())
        found: list[RewardResult] = []

        def ask() -> None:
            for said in service.score(whole.local, self.config.reward.max_failed * len(whole)):
                found.append(said if isinstance(said, RewardFailure) else Reward(*said))

        with with_timeout(max(self.config.run.timeout_s, service.max_duration(fullest))):
            run_on_all(ask)
        return found

    def controls(self) -> Mapping[str, Callable[[Any], Any]]:
        return {"reward.weights": lambda given: check_weights(given, self.parts)}

    def set_control(self, key: str, value: Any) -> None:
        self.weights = value

    def metrics(self) -> dict[str, float]:
        """Weights, where there are any; the share of rollouts whose functions had been called when they were asked
        for."""
        weights = {f"reward/{name}_weight": self.weights.get(name, 1.0) for name in self.parts if self.weights}
        return weights | ({} if self._pool is None else {"perf/rewards_ahead_frac": self._prefetched_frac})

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    # --- the pool

    def _rollout_ranks(self) -> set[int]:
        """Ranks that will have rollouts, which share their machine's processes."""
        if self.config.rollout.replay:
            return set(range(self.job.world))
        return {members[0] for members in engine_ranks(self.config)}

    @property
    def _node(self) -> int:
        return self.job.rank // self._ranks_per_node

    def _num_processes(self) -> int:
        """Of a machine."""
        return self.config.reward.processes or min(_MAX_PROCESSES, max(1, len(os.sched_getaffinity(0)) // 2))

    def _score_in_pool(self, whole: Rollouts) -> list[Verdicts]:
        begun: list[tuple[PendingVerdicts, bool]] = [self._prefetch.pop(rollout) for rollout in whole.local]
        done = torch.tensor([sum(there for _, there in begun), len(begun)])
        in_time, count = whole.comm.all_reduce(done).tolist()
        self._prefetched_frac = in_time / max(1, count)
        goes_on = True
        while goes_on:
            waiting = wait([one.future for one, _ in begun], _POLL_S).not_done
            goes_on = bool(whole.comm.all_reduce(torch.tensor([len(waiting)])).item())
            if goes_on and self._has_too_many_failures(sum(has_failed(one.completed) for one, _ in begun), whole):
                return [mark_unscored(one.cancel(), list(self.functions)) for one, _ in begun]
        return [one.result() for one, _ in begun]

    def _has_too_many_failures(self, failed: int, whole: Rollouts) -> bool:
        """Whether `reward.max_failed` cannot be kept any more. failed: rollouts that are here and have no reward.
        Collective."""
        return too_many(int(whole.comm.all_reduce(torch.tensor([failed])).item()), len(whole), self.config.reward)

    # --- in this process

    def _max_seconds(self, whole: Rollouts) -> float:
        """The longest that the slowest rank may take, if each of its calls takes as long as one may."""
        shares = balance_scoring(whole.home.tolist(), self._ranks_per_node)
        if self._pool is not None:
            most = max(Counter(whole.home.tolist()).values(), default=0)
        else:
            most = max((sum(by.get(rank, 0) for by in shares.values()) for rank in range(self.job.world)), default=0)
        limit = min(self.config.reward.timeout, _MAX_TIMEOUT_S) + GRACE_S
        return max(self.config.run.timeout_s, limit * most * len(self.functions))

    def _score_in_process(self, whole: Rollouts) -> list[dict[str, RewardResult]]:
        """Of those that are here, called here or by a rank beside."""
        shares = balance_scoring(whole.home.tolist(), self._ranks_per_node)
        mine = iter(enumerate(whole.local))
        parcels: dict[int, list[tuple[int, Rollout]]] = {}
        for rank, count in shares.get(self.job.rank, {}).items():
            parcels[rank] = [
                (index, replace(rollout, routing=None, sampling_mask=None)) for index, rollout in islice(mine, count)
            ]
        answers: dict[int, list[tuple[int, dict[str, RewardResult]]]] = {}
        for rank, parcel in self._row_exchange.exchange_objects(parcels).items():
            most_failed = self.config.reward.max_failed * len(whole)
            found = score([rollout for _, rollout in parcel], self.functions, self.config.reward.timeout, most_failed)
            answers[rank] = [(index, verdicts) for (index, _), verdicts in zip(parcel, found, strict=True)]
        back = self._row_exchange.exchange_objects(answers)
        by_index = dict(one for some in back.values() for one in some)
        return [by_index[index] for index in range(len(whole.local))]


def balance_scoring(homes: Sequence[int], here: int) -> dict[int, dict[int, int]]:
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
