"""`bench.py concurrency`: the simulated engine, and what the budget changes on it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from benchmarks.concurrency import simulate
from benchmarks.simulated_engine import EngineSpec, SimulatedEngine, Workload, run_simulated

from megarl.engine.engine_protocol import Generation
from megarl.rollout.cache_budget import CacheBudget
from megarl.types import as_token_ids

pytestmark = pytest.mark.alone

SPEC = EngineSpec(capacity=1000, step_s=0.1, token_s=0.0, prefill_s=0.01)


def ask(requests: list[tuple[float, int, int, int]], spec: EngineSpec = SPEC) -> tuple[list[Generation], float]:
    """Return the responses to requests (start, conversation, prompt tokens, response tokens), and all seconds."""

    async def run() -> list[Generation]:
        engine = SimulatedEngine(spec)
        work = asyncio.ensure_future(engine.run())

        async def send(start: float, conversation: int, prompt: int, response: int) -> Generation:
            await asyncio.sleep(start)
            params = {"conversation": conversation, "num_tokens": response, "max_new_tokens": response}
            return await engine.generate(as_token_ids(np.ones(prompt, np.int32)), params)

        answers = await asyncio.gather(*(send(*request) for request in requests))
        work.cancel()
        return answers

    return run_simulated(run())


def test_time_and_prefix_of_a_second_turn() -> None:
    (first, second), seconds = ask([(0.0, 1, 100, 10), (50.0, 1, 200, 5)])
    assert (first.cached, second.cached) == (0, 110) and len(second.token_ids) == 5
    # 90 prompt tokens of the second turn, in a step of their own, and 5 steps.
    assert seconds == pytest.approx(50 + 90 * 0.01 + 0.1 + 5 * 0.1)


def test_evicts_the_least_recently_used_prefix() -> None:
    others = [(10.0, 2, 400, 1), (20.0, 3, 500, 1)]
    answers, _ = ask([(0.0, 1, 300, 1), *others, (50.0, 1, 301, 1), (90.0, 3, 501, 1)])
    assert answers[3].cached < 301 - 100 and answers[4].cached == 500


def test_retracts_if_responses_do_not_fit() -> None:
    async def run() -> tuple[list[Generation], int]:
        engine = SimulatedEngine(SPEC)
        work = asyncio.ensure_future(engine.run())
        engine._ratio = 0.0  # expect nothing of running requests
        ids = as_token_ids(np.ones(300, np.int32))
        params = {"num_tokens": 300, "max_new_tokens": 300}
        first = asyncio.ensure_future(engine.generate(ids, {**params, "conversation": 1}))
        await asyncio.sleep(5.0)
        answers = await asyncio.gather(first, engine.generate(ids, {**params, "conversation": 2}))
        work.cancel()
        return answers, engine.counts.retractions

    (first, second), count = run_simulated(run())[0]
    assert (first.retractions, second.retractions) == (0, count) and count >= 1


@pytest.mark.parametrize("tool_s", [0.5, 30.0])
def test_budget_saves_time_with_short_tools_and_costs_none_with_long_ones(tool_s: float) -> None:
    workload = Workload(conversations=96, max_turns=10, tool_s=tool_s)
    drawn = [workload.draw(number) for number in range(workload.conversations)]
    spec = EngineSpec(capacity=100_000)
    (fixed, _), fixed_s = run_simulated(simulate(spec, drawn, 96, None))
    (adapted, gate), adapted_s = run_simulated(simulate(spec, drawn, 96, CacheBudget()))
    assert fixed.decoded == adapted.decoded
    if tool_s < 1:
        assert adapted_s < 0.95 * fixed_s and adapted.recomputed < 0.6 * fixed.recomputed
        assert gate.usage.waiting_conversations > 0
    else:
        assert adapted_s < 1.05 * fixed_s
