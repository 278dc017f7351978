"""Rewards from functions, in separate processes during generation, and from HTTP services.

All ranks get the numbers; no text is sent between ranks. Reward models are workers of their own, which add their part
to those of the functions, the environments and the service. `RewardPrefetch` starts a reward as soon as its
conversation has ended.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch

from megarl.config import Config, ConfigError
from megarl.parallel import row_exchange
from megarl.parallel.placement import engine_ranks, split_role
from megarl.parallel.policy_configs import JUDGE, policy_config
from megarl.parallel.ranks import run_on_all, with_timeout
from megarl.processes.children import ProcessLimits
from megarl.rewards import composite
from megarl.rewards.composite import (
    check_unscored,
    combine_episode_rewards,
    has_failed,
    mark_unscored,
    too_many,
)
from megarl.rewards.functions import check_function, load_functions
from megarl.rewards.judge import Judge
from megarl.rewards.reward_pool import PendingVerdicts, RewardPool, Verdicts
from megarl.rewards.reward_process import GRACE_S, MAX_CONCURRENT, score
from megarl.rewards.reward_settings import build_services, check_names, check_weights, has_environment_reward
from megarl.rewards.service import HttpScorer
from megarl.types import Reward, RewardResult, Rollout, Rollouts, Turn
from megarl.workers.context import Context, Worker
from megarl.workers.judge_engines import score_on_engines

if TYPE_CHECKING:
    from megarl.workers.engines import Engines


class _HasDone(Protocol):
    def done(self) -> bool: ...


Pending = TypeVar("Pending", bound=_HasDone)


class RewardPrefetch(Generic[Pending]):
    """Starts rewards ahead of time. begin: starts one, called from the generation thread.

    Rollouts are identified by their last `Turn` object, which is unique, because their group or step may change later.
    """

    def __init__(self, start_scoring: Callable[[Rollout], Pending]) -> None:
        self._start = start_scoring
        self._pending: dict[int, tuple[weakref.ref[Turn], Pending]] = {}

    def on_rollout_finished(self, rollout: Rollout) -> None:
        """Start the reward of a finished conversation."""
        turn, pending = rollout.turns[-1], self._pending
        key = id(turn)
        # Drop the entry with its rollout.
        pending[key] = weakref.ref(turn, lambda _: pending.pop(key, None)), self._start(rollout)

    def pop(self, rollout: Rollout) -> tuple[Pending, bool]:
        """Return the pending reward of a rollout, started now if necessary, and whether it was already done."""
        turn = rollout.turns[-1]
        entry = self._pending.pop(id(turn), None)
        if entry is None or entry[0]() is not turn:
            return self._start(rollout), False
        return entry[1], entry[1].done()


_MAX_TIMEOUT_S = 86400.0
_POLL_S = 1.0
"""Interval at which ranks count failed rewards together while they wait."""
_MAX_PROCESSES = 64
"""Maximum number of processes per machine if `reward.processes` is 0."""


class RewardWorker(Worker):
    """The reward backends without a model: `pool` has functions only; `http` and `judge` add a part from a service,
    which each rank asks about its own rollouts. Options are those of `rewards/service.py` or `rewards/judge.py`; the
    option `services` has further services and judges by name.

    Each generating rank calls `reward.functions` in a process pool, as soon as a conversation has ended. A function
    passed by a script as `reward_fn` runs in the ranks' own processes after all conversations have ended: the ranks of
    a machine share its rollouts evenly, and if the function kills its process, that rank dies.
    """

    model_part = ""
    """Name of the part that a backend computes with a model; empty without a model."""

    def __init__(self, context: Context, reward_fn: Callable[[Rollout], Any] | None = None, **options: Any) -> None:
        super().__init__(context)
        config = self.config.reward
        self.services = build_services(self.config, options)
        self.judged_parts = (*((self.model_part,) if self.model_part else ()), *self.services)
        """Names of the parts computed after all conversations have ended."""
        if reward_fn is not None:
            self.functions = {getattr(reward_fn, "__name__", "reward_fn"): check_function(reward_fn, "reward_fn")}
        else:
            self.functions = load_functions(config.functions)
        self._row_exchange = row_exchange.get_row_exchange()
        self._ranks_per_node = min(self.job.world, self.config.parallel.ranks_per_node)
        self._has_env_rewards = has_environment_reward(self.config.rollout, bool(self.functions or self.judged_parts))
        if not self.parts:
            raise ConfigError(
                "there is no reward: set reward.functions to a list of module:name, or reward.model, or pass "
                "reward_fn, or name an environment with a `reward` in rollout.environments"
            )
        check_names(self.functions, self.parts[len(self.functions) :])
        self.weights = check_weights(config.weights, self.parts)
        self._prefetched_frac = 1.0
        self.scored: list[tuple[Rollouts, Rollouts]] = []
        """(input, scored) of each call of `score` in the current step."""
        self._pool: RewardPool | None = None
        if self.functions and reward_fn is None:
            log = context.run_dir / "logs" / f"rewards_{self.job.rank}.log"
            limits = ProcessLimits(self.config.rollout.pass_env, self.config.rollout.tool_memory_mb)
            rollout_ranks = self._rollout_ranks()
            ranks_on_node = max(1, sum(home // self._ranks_per_node == self._node for home in rollout_ranks))
            size = max(1, self._num_processes() // ranks_on_node)
            max_concurrent = MAX_CONCURRENT
            if any(getattr(function, "sandboxed", False) for function in self.functions.values()):
                # More calls would only wait for a box.
                max_concurrent = max(1, self.config.sandbox.max_boxes // (ranks_on_node * size))
            self._pool = RewardPool(self.functions, config.functions, config.timeout, size, log, limits, max_concurrent)
            self._prefetch = RewardPrefetch(self._pool.submit)
            if self.job.rank in rollout_ranks:
                self._pool.start()
                context.on_rollout_finished.subscribe(self._prefetch.on_rollout_finished)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts of a reward; each may have a weight."""
        env_parts = (composite.PART,) if self._has_env_rewards else ()
        return (*self.functions, *env_parts, *self.judged_parts)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self.scored = []

    def start(self) -> None:
        """Raises ConfigError if a service does not respond."""
        for service in self.services.values():
            if self._judge_engines(service) is None:
                run_on_all(service.check_credentials)
                run_on_all(service.check_reachable, rank_zero_only=True)

    def _judge_engines(self, service: HttpScorer) -> Engines | None:
        """Return the job's engines for this service; None if it is outside of the job."""
        return self.context.engines.get(JUDGE) if isinstance(service, Judge) and service.has_job_engines else None

    def wait_ready(self) -> None:
        """Raises ConfigError if the pool's processes cannot load the functions."""
        run_on_all(lambda: None if self._pool is None else self._pool.wait_ready())

    def score(self, rollouts: Rollouts) -> Rollouts:
        """Return the rollouts with `reward`, `reward_parts` and turn rewards.

        An episode is scored by its last branch, and all branches get the result. Aborted rollouts are not scored.
        Earlier rewards, such as those that another run recorded, are ignored. If a part fails, the rollout has no
        reward: it is `unscored`. Raises ConfigError on all ranks as soon as more than `reward.max_failed_frac` have
        failed, without waiting for the others.
        """
        to_score = rollouts.select(rollouts.episodes.is_last & ~rollouts.has_status("aborted"))
        with self.clock.phase("reward", "reward"), with_timeout(self._max_seconds(to_score)):
            results: list[dict[str, RewardResult]] = [{} for _ in to_score.local]
            if self._pool is not None:
                results = [dict(verdicts) for verdicts in self._score_in_pool(to_score)]
            elif self.functions:
                results = self._score_in_process(to_score)
            for verdicts, rollout in zip(results, to_score.local, strict=True):
                verdicts |= self._env_results(rollout)
                if not verdicts and not self.judged_parts:
                    verdicts[composite.PART] = composite.NO_REWARD
            if self.judged_parts and len(to_score):
                run_on_all(lambda: None)  # barrier: the timeouts of `score_part` start when all ranks have arrived
                for index, part in enumerate(self.judged_parts):
                    if (self.functions or index) and self._has_too_many_failures(
                        sum(map(has_failed, results)), to_score
                    ):
                        results = [mark_unscored(verdicts, [*verdicts, *self.judged_parts]) for verdicts in results]
                        break
                    for verdicts, verdict in zip(results, self.score_part(to_score, part), strict=True):
                        verdicts[part] = verdict
            scored = rollouts.replace_local(combine_episode_rewards(rollouts, results, self.weights))
        self.scored.append((rollouts, scored))
        check_unscored(scored, self.config.reward)
        return scored

    def _env_results(self, rollout: Rollout) -> dict[str, RewardResult]:
        """Return the environment's part of the reward; for a rollout of an early recording, its value alone."""
        if rollout.env_reward is not None:
            return {composite.PART: rollout.env_reward}
        if self.config.rollout.replay and composite.PART in rollout.reward_parts:
            return {composite.PART: Reward(rollout.reward_parts[composite.PART])}
        return {}

    def score_part(self, rollouts: Rollouts, part: str) -> Sequence[RewardResult]:
        """Return one of `judged_parts` for each local rollout. `rollouts` contains no aborted rollouts. Collective."""
        service = self.services[part]
        max_failed = self.config.reward.max_failed_frac * len(rollouts)
        if isinstance(service, Judge) and (engines := self._judge_engines(service)) is not None:
            num_engines = len(engines.engine_ranks)
            with engines.with_timeout(service.max_duration(-(-len(rollouts) // num_engines))):
                return score_on_engines(engines, service, rollouts, max_failed)
        max_local = int(torch.bincount(rollouts.home).max())
        results: list[RewardResult] = []

        def ask_service() -> None:
            results.extend(service.score(rollouts.local, max_failed))

        with with_timeout(max(self.config.run.distributed_timeout_s, service.max_duration(max_local))):
            run_on_all(ask_service)
        return results

    def check_config(self, config: Config) -> None:
        check_weights(config.reward.weights, self.parts)

    def set_config(self, config: Config) -> None:
        super().set_config(config)
        self.weights = check_weights(config.reward.weights, self.parts)

    def metrics(self) -> dict[str, float]:
        """Return the weights, if any, and the share of rollouts whose functions had finished when `score` started."""
        weights = {f"reward/{name}_weight": self.weights.get(name, 1.0) for name in self.parts if self.weights}
        return weights | ({} if self._pool is None else {"perf/reward_overlap_frac": self._prefetched_frac})

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    # --- the pool

    def _rollout_ranks(self) -> set[int]:
        """Return the ranks that will have rollouts; those of a machine share its processes."""
        if self.config.rollout.replay:
            return set(range(self.job.world))
        policies = [role for role in self.context.num_updates if split_role(role)[0] == "rollout"] or ["rollout"]
        return {members[0] for role in policies for members in engine_ranks(policy_config(self.config, role))}

    @property
    def _node(self) -> int:
        return self.job.rank // self._ranks_per_node

    def _num_processes(self) -> int:
        """Return the number of processes per machine."""
        return self.config.reward.processes or min(_MAX_PROCESSES, max(1, len(os.sched_getaffinity(0)) // 2))

    def _score_in_pool(self, rollouts: Rollouts) -> list[Verdicts]:
        pending: list[tuple[PendingVerdicts, bool]] = [self._prefetch.pop(rollout) for rollout in rollouts.local]
        done = torch.tensor([sum(is_done for _, is_done in pending), len(pending)])
        in_time, count = rollouts.comm.all_reduce(done).tolist()
        self._prefetched_frac = in_time / max(1, count)
        has_pending = True
        while has_pending:
            waiting = wait([verdicts.future for verdicts, _ in pending], _POLL_S).not_done
            has_pending = bool(rollouts.comm.all_reduce(torch.tensor([len(waiting)])).item())
            if has_pending and self._has_too_many_failures(
                sum(has_failed(verdicts.completed) for verdicts, _ in pending), rollouts
            ):
                return [mark_unscored(verdicts.cancel(), list(self.functions)) for verdicts, _ in pending]
        return [verdicts.result() for verdicts, _ in pending]

    def _has_too_many_failures(self, failed: int, rollouts: Rollouts) -> bool:
        """True if `reward.max_failed_frac` is exceeded. failed: local rollouts without a reward. Collective."""
        return too_many(int(rollouts.comm.all_reduce(torch.tensor([failed])).item()), len(rollouts), self.config.reward)

    # --- in this process

    def _max_seconds(self, rollouts: Rollouts) -> float:
        """Return the longest time of the slowest rank, if each of its calls takes up to its timeout."""
        shares = balance_scoring(rollouts.home.tolist(), self._ranks_per_node)
        if self._pool is not None:
            max_calls = max(Counter(rollouts.home.tolist()).values(), default=0)
        else:
            max_calls = max(
                (sum(counts.get(rank, 0) for counts in shares.values()) for rank in range(self.job.world)), default=0
            )
        limit = min(self.config.reward.timeout, _MAX_TIMEOUT_S) + GRACE_S
        return max(self.config.run.distributed_timeout_s, limit * max_calls * len(self.functions))

    def _score_in_process(self, rollouts: Rollouts) -> list[dict[str, RewardResult]]:
        """Score the local rollouts, on this rank or another rank of the machine."""
        shares = balance_scoring(rollouts.home.tolist(), self._ranks_per_node)
        local = iter(enumerate(rollouts.local))
        outgoing: dict[int, list[tuple[int, Rollout]]] = {}
        for rank, count in shares.get(self.job.rank, {}).items():
            outgoing[rank] = [
                (index, replace(rollout, routing=None, sparse_indices=None, sampling_mask=None))
                for index, rollout in islice(local, count)
            ]
        replies: dict[int, list[tuple[int, dict[str, RewardResult]]]] = {}
        for rank, batch in self._row_exchange.exchange_objects(outgoing).items():
            max_failed = self.config.reward.max_failed_frac * len(rollouts)
            results = score([rollout for _, rollout in batch], self.functions, self.config.reward.timeout, max_failed)
            replies[rank] = [(index, verdicts) for (index, _), verdicts in zip(batch, results, strict=True)]
        returned = self._row_exchange.exchange_objects(replies)
        by_index = dict(pair for pairs in returned.values() for pair in pairs)
        return [by_index[index] for index in range(len(rollouts.local))]


def balance_scoring(homes: Sequence[int], ranks_per_node: int) -> dict[int, dict[int, int]]:
    """Return how many of its rollouts each rank lets each rank score, itself included: [home][rank]. Pure.

    homes: rank of each rollout. The ranks of a node share its rollouts evenly; only the surplus of a rank moves to
    others.
    """
    counts = Counter(homes)
    shares: dict[int, dict[int, int]] = {}
    for node in sorted({home // ranks_per_node for home in counts}):
        members = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        quota, remainder = divmod(sum(counts[rank] for rank in members), ranks_per_node)
        by_count = sorted(members, key=lambda rank: (-counts[rank], rank))
        quotas = {rank: quota + (position < remainder) for position, rank in enumerate(by_count)}
        capacity = {rank: max(0, quotas[rank] - counts[rank]) for rank in members}
        for home in members:
            if not counts[home]:
                continue
            shares[home] = {home: min(counts[home], quotas[home])}
            surplus = counts[home] - shares[home][home]
            for rank in members:
                if moved := min(surplus, capacity[rank]):
                    shares[home][rank] = moved
                    capacity[rank] -= moved
                    surplus -= moved
    return shares
