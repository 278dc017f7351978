"""Rewards of a judge that runs on engines of the job: the role `judge`, see `rewards/judge.py`.

    roles:
      reward: {backend: judge, options: {max_score: 10}}
      judge: {backend: sglang, model: /models/judge, rollout: {tp: 4}}
    placement: {actor: 0-3, rollout: 0-3, judge: 4-7}

On ranks that other roles need, the judge sleeps except while it scores, with its weights on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megarl.engine.engine_protocol import Engine, EngineLost
from megarl.engine.engine_restart import watch
from megarl.parallel import row_exchange
from megarl.parallel.ranks import run_on_all
from megarl.rewards.composite import NOT_SCORED
from megarl.rewards.judge import Judge
from megarl.types import Rollout, Rollouts
from megarl.types.reward_values import RewardResult

if TYPE_CHECKING:
    from megarl.workers.engines import Engines


def score_on_engines(engines: Engines, judge: Judge, rollouts: Rollouts, max_failed: float) -> Sequence[RewardResult]:
    """Return the judge's reward of each local rollout. Collective.

    The rollouts of all ranks are dealt out evenly to the engines, whose lead ranks ask their own engine, so no engine
    listens beyond its machine. If an engine is lost, others score its rollouts again, or itself once it has restarted.
    """
    recovery, exchange = engines.recovery, row_exchange.get_row_exchange()
    results: list[RewardResult] = [NOT_SCORED] * len(rollouts.local)
    pending = list(range(len(rollouts.local)))
    recovery.exchange_losses(should_check=True)
    if engines.engine_index is not None:
        engines.offload_models()
    engines.wake()
    while True:
        if recovery.restarting or recovery.unsynced:
            engines.rejoin()
        leads = [ranks[0] for index, ranks in enumerate(engines.engine_ranks) if recovery.is_available(index)]
        first = int(rollouts.comm.all_gather_rows(torch.tensor([[len(pending)]]))[: engines.job.rank].sum())
        outgoing: dict[int, list[tuple[int, Rollout]]] = {}
        for number, index in enumerate(pending):
            stripped = replace(rollouts.local[index], routing=None, sparse_indices=None, sampling_mask=None)
            outgoing.setdefault(leads[(first + number) % len(leads)], []).append((index, stripped))
        received = exchange.exchange_objects(outgoing)
        scores: list[RewardResult] | None = []

        def score(engine: Engine) -> None:
            nonlocal scores
            batch = [rollout for sent in received.values() for _, rollout in sent]  # noqa: B023  called immediately
            try:
                scores = _score_on_engine(engine, judge, batch, max_failed) if batch else []
            except EngineLost as lost:
                assert engines.engine_restart is not None
                engines.engine_restart.report_lost(lost)
                scores = None

        run_on_all(lambda: None if engines.lead_engine is None else score(engines.lead_engine))
        replies: dict[int, list[tuple[int, RewardResult]]] = {}
        if scores is not None:
            remaining = iter(scores)
            replies = {rank: [(index, next(remaining)) for index, _ in sent] for rank, sent in received.items()}
        for answers in exchange.exchange_objects(replies).values():
            for index, result in answers:
                results[index] = result
                pending.remove(index)
        if not recovery.exchange_losses():
            break
    if engines.takes_turns:
        engines.sleep()
    return results


def _score_on_engine(
    engine: Engine, judge: Judge, rollouts: Sequence[Rollout], max_failed: float
) -> list[RewardResult]:
    """Score rollouts on this rank's engine. Raises EngineLost if it dies, or hangs."""
    hang_timeout = engine.config.rollout.hang_timeout

    async def watch_engine() -> None:
        async with engine.connect(hang_timeout) as client:
            client.num_pending = 1  # so that silence counts
            await watch(engine, client, hang_timeout, engine.start_number)

    return judge.at(engine.url, engine.api_key).score(rollouts, max_failed, watch_engine)
