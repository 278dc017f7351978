"""Compare fixed numbers of concurrent conversations with the budget that adapts to the engine's KV cache.

Conversations have long-tailed numbers of turns, lengths and tool times. The engine is simulated; the gate that holds
conversations back is the real one.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.output import Report
from benchmarks.simulated_engine import EngineSpec, SimulatedConversation, SimulatedEngine, Workload, run_simulated
from megarl.config.command_line import int_in_range
from megarl.rollout.cache_budget import CacheBudget
from megarl.rollout.request_gate import RequestGate, RequestSlot
from megarl.types import as_token_ids


async def converse(slot: RequestSlot, conversation: SimulatedConversation) -> None:
    """Run one conversation."""
    size = conversation.prompt
    try:
        for response, result, seconds in zip(
            conversation.responses, conversation.results, conversation.calls, strict=True
        ):
            ids = np.ones(size, np.int32)
            ids[0] = conversation.number
            await slot.generate(as_token_ids(ids), {"num_tokens": response, "max_new_tokens": conversation.max_response})
            slot.mark_idle()
            size += response + result
            await asyncio.sleep(seconds)
    finally:
        slot.release()


async def simulate(
    spec: EngineSpec, conversations: Sequence[SimulatedConversation], num_slots: int, budget: CacheBudget | None
) -> tuple[SimulatedEngine, RequestGate]:
    engine = SimulatedEngine(spec)
    gate = RequestGate(engine, num_slots, budget)
    tasks = [asyncio.ensure_future(engine.run()), asyncio.ensure_future(gate.observe_load())]
    async with asyncio.TaskGroup() as group:
        for conversation in conversations:
            await gate.wait_for_room()
            group.create_task(converse(gate.open_slot(conversation.prompt), conversation))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return engine, gate


WORKLOADS = {
    "multi-turn, tools 2 s": Workload(),
    "multi-turn, tools 20 s": Workload(tool_s=20.0),
    "multi-turn, short": Workload(prompt=300, response=100, result=100, max_turns=8),
    "single turn, long answers": Workload(max_turns=1, response=3000, max_response=16384, tool_s=0.01, conversations=512),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--capacity", type=int_in_range(), default=300_000, help="tokens of the cache")
    parser.add_argument("--fixed", type=int_in_range(), nargs="+", default=[16, 32, 64, 128, 256])


def run(options: argparse.Namespace, report: Report) -> None:
    report.start()
    for name, workload in WORKLOADS.items():
        drawn = [workload.draw(number) for number in range(workload.conversations)]
        rows: list[dict[str, Any]] = []
        ways = [(str(size), size, None) for size in options.fixed] + [
            (f"{size}, budget", size, CacheBudget()) for size in options.fixed if size >= 128
        ]
        for label, size, budget in ways:
            (engine, gate), seconds = run_simulated(simulate(EngineSpec(options.capacity), drawn, size, budget))
            counts, usage = engine.counts, gate.usage
            rows.append(
                {
                    "concurrency": label,
                    "s": round(seconds),
                    "retractions": counts.retractions,
                    "recomputed/decoded": counts.recomputed / counts.decoded,
                    "idle s": round(counts.idle_s),
                    **{name.removeprefix("rollout/"): value for name, value in usage.metrics.items()},
                }
            )
        report.table(name, rows)
