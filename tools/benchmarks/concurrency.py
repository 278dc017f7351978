"""Compare fixed bounds of concurrent conversations with the one that adapts to the KV cache (`rollout.fit_kv_cache`).

    .venv/bin/python tools/bench.py concurrency [FOLDER] [--conversations 192] [--fixed 32 128] [--capacity 300000]

Conversations have long-tailed numbers of turns, lengths and tool times. The gate that holds them back is the run's, the
engine is simulated (`simulated_engine.py`): several tool times on three kinds of engine. With FOLDER of
tools/make_quickstart.py, or another one with a folder `model`, it is SGLang on one core of this machine, with a KV
cache of `--capacity` tokens, and the workload is 24 conversations of up to 10 turns with short tool times.

Columns: tokens of earlier turns that the engine computed again, for each generated token; then the run's own metrics of
queue and cache, `engine/...`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Stopwatch, compute_ratio
from benchmarks.output import Report
from benchmarks.simulated_engine import (
    EngineCounts,
    EngineSpec,
    SimulatedConversation,
    SimulatedEngine,
    Workload,
    run_simulated,
)
from benchmarks.workloads import check_quickstart, start_engine
from megarl.config import from_dict
from megarl.config.command_line import int_in_range
from megarl.engine.engine_protocol import EngineClient, EngineLoad, Generation, LoadSource, Policy
from megarl.rollout.cache_budget import CacheBudget
from megarl.rollout.request_gate import RequestGate, RequestSlot
from megarl.types import Ids, as_token_ids

ENGINES = {
    "dense 8B on an H100": EngineSpec(),
    "slow steps": EngineSpec(step_s=25e-3),
    "slow prefill": EngineSpec(prefill_s=1.5e-4),
}
TOOL_S = (0.5, 3.0, 10.0, 30.0)
SMALL = Workload(24, 10, prompt=300, response=16, result=100, tool_s=0.1, max_response=64, max_context=2000)
"""Workload of the engine on this machine."""


class MeasuredEngine:
    """An engine that writes `params["num_tokens"]` tokens, and counts those that it computes again."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.counts = EngineCounts()
        self._known: dict[int, int] = {}
        """Tokens of each conversation that the engine has computed."""

    async def generate(self, ids: Ids | Sequence[int], params: dict[str, Any], *_: Any, **__: Any) -> Generation:
        sampling = {"max_new_tokens": params["num_tokens"], "ignore_eos": True, "temperature": 1.0}
        generation = await self._client.generate(ids, sampling)
        known = self._known.get(params["conversation"], 0)
        self._known[params["conversation"]] = len(ids) + len(generation.token_ids) - 1
        self.counts.recomputed += max(0, known - generation.cached)
        self.counts.decoded += len(generation.token_ids)
        self.counts.retractions += generation.retractions
        return generation

    async def stop(self) -> None:
        await self._client.stop()

    async def read_load(self) -> EngineLoad | None:
        return await self._client.read_load() if isinstance(self._client, LoadSource) else None


async def converse(slot: RequestSlot, conversation: SimulatedConversation) -> None:
    """Run one conversation on its slot."""
    rng = np.random.default_rng(conversation.number)
    ids = as_token_ids(rng.integers(10, 200, conversation.prompt))
    turns = zip(conversation.responses, conversation.results, conversation.calls, strict=True)
    try:
        for response, result, seconds in turns:
            params = {"num_tokens": response, "max_new_tokens": conversation.max_response}
            generation = await slot.generate(ids, {**params, "conversation": conversation.number})
            ids = np.concatenate([ids, generation.token_ids, as_token_ids(rng.integers(10, 200, result))])
            if len(ids) + conversation.max_response > conversation.max_context:
                break
            slot.mark_idle()
            await asyncio.sleep(seconds)
    finally:
        slot.release()


async def run_conversations(
    policy: Policy, conversations: Sequence[SimulatedConversation], num_slots: int, budget: CacheBudget | None
) -> RequestGate:
    """Run all conversations, and return the gate with its observations."""
    gate = RequestGate(policy, num_slots, budget)
    observer = asyncio.ensure_future(gate.observe_load())
    async with asyncio.TaskGroup() as group:
        for conversation in conversations:
            await gate.wait_for_room()
            group.create_task(converse(gate.open_slot(conversation.prompt), conversation))
    observer.cancel()
    return gate


async def simulate(
    spec: EngineSpec, conversations: Sequence[SimulatedConversation], num_slots: int, budget: CacheBudget | None
) -> tuple[EngineCounts, RequestGate]:
    """Run all conversations on a simulated engine."""
    engine = SimulatedEngine(spec)
    work = asyncio.ensure_future(engine.run())
    gate = await run_conversations(engine, conversations, num_slots, budget)
    work.cancel()
    return engine.counts, gate


def make_row(label: str, seconds: float, counts: EngineCounts, gate: RequestGate) -> dict[str, Any]:
    metrics = {name.removeprefix("engine/"): value for name, value in gate.pop_usage().metrics.items()}
    recomputed = counts.recomputed / counts.decoded
    return {"concurrency": label, "s": seconds, "recomputed per token": recomputed, **metrics}


def list_ways(options: argparse.Namespace) -> list[tuple[str, int, CacheBudget | None]]:
    """Return label, bound and budget of each way."""
    fixed: list[tuple[str, int, CacheBudget | None]] = [(str(size), size, None) for size in options.fixed]
    return [*fixed, (f"{max(options.fixed)}, adapted", max(options.fixed), CacheBudget())]


def compare_simulated(options: argparse.Namespace, report: Report) -> None:
    """Print one table per engine and tool time."""
    for title, spec in ENGINES.items():
        seconds_of: dict[str, list[float]] = {label: [] for label, *_ in list_ways(options)}
        for tool_s in TOOL_S:
            workload = Workload(conversations=options.conversations, tool_s=tool_s)
            drawn = [workload.draw(number) for number in range(workload.conversations)]
            rows = []
            for label, size, budget in list_ways(options):
                engine = EngineSpec(options.capacity, spec.step_s, prefill_s=spec.prefill_s)
                (counts, gate), seconds = run_simulated(simulate(engine, drawn, size, budget))
                rows.append(make_row(label, seconds, counts, gate))
                seconds_of[label].append(seconds)
            report.table(f"{title}, simulated: tools of {tool_s:g} s", rows)
        reference = seconds_of[str(max(options.fixed))]
        ratios = {label: compute_ratio(reference, seconds) for label, seconds in seconds_of.items()}
        summary = [{"concurrency": label, "times as fast": ratio} for label, ratio in ratios.items()]
        report.table(f"{title}, simulated: all tool times", summary)


def compare_measured(options: argparse.Namespace, report: Report) -> None:
    """Print one table for SGLang on this machine, a row per round."""
    drawn = [SMALL.draw(number) for number in range(SMALL.conversations)]
    with tempfile.TemporaryDirectory() as folder:
        rollout = {
            "max_context": SMALL.max_context,
            "concurrency": max(options.fixed),
            "sglang": {"max_total_tokens": options.capacity},
        }
        model = {"path": str(options.folder / "model"), "dtype": "float32"}
        tree = {"model": model, "rollout": rollout, "train": {"routing_replay": False}, "run": {"dir": folder}}
        with start_engine(from_dict(tree)) as engine:

            async def measure(size: int, budget: CacheBudget | None) -> tuple[EngineCounts, RequestGate]:
                async with engine.connect(600.0) as client:
                    policy = MeasuredEngine(client)
                    return policy.counts, await run_conversations(policy, drawn, size, budget)

            rows = []
            budgets = {label: budget for label, _, budget in list_ways(options)}
            for number in range(1, options.rounds + 1):
                for label, size, _ in list_ways(options):
                    engine.abort_requests()  # and drop the cache
                    with Stopwatch() as watch:
                        counts, gate = asyncio.run(measure(size, budgets[label]))
                    budgets[label] = gate.budget
                    row = make_row(f"{label} ({number})", watch.seconds, counts, gate)
                    rows.append({**row, "processor s": watch.processor_s})
                    report.progress(f"round {number}, {label}: {watch.seconds:.1f} s")
    report.table(f"SGLang, {SMALL.conversations} conversations, a cache of {options.capacity} tokens", rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, nargs="?", help="of tools/make_quickstart.py, for SGLang")
    for name, value in {"conversations": 192, "capacity": 300_000, "rounds": 2}.items():
        parser.add_argument(f"--{name}", type=int_in_range(), default=value, help="default %(default)s")
    parser.add_argument("--fixed", type=int_in_range(), nargs="+", default=[32, 128], help="default %(default)s")


def run(options: argparse.Namespace, report: Report) -> None:
    if options.folder is not None:
        options.folder = check_quickstart(options.folder, "model")
    report.start()
    (compare_simulated if options.folder is None else compare_measured)(options, report)
