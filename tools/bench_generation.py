"""Generation time with long-tailed answers: even slices, a queue, and a queue with over-sampling.

    .venv/bin/python tools/bench_generation.py --steps 6 --prompts 32 --samples 4 --concurrency 16

The engines are mocked: the number of tokens of an answer is log-normal, each token takes the same time, and an engine
works on a fixed number of answers at once. The code that feeds, stops and continues them is that of a run. Every step
ends with the same number of complete groups. Idle: share of the engines' slots, over all seconds, that wrote nothing.
Tokens: those of the complete groups; fewer tokens in as many groups mean shorter answers, because the long ones are
still running.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from megarl.config import RolloutConfig
from megarl.config.command_line import Parser, int_in_range, run_cli
from megarl.config.keys import max_pending_groups
from megarl.engine.engine_protocol import NOT_RECORDED, Generation, RecordedPrefix
from megarl.engine.tool_calls import ParsedResponse, ToolCall
from megarl.environments.catalog import EnvironmentCatalog
from megarl.environments.process_sessions import EnvironmentPool
from megarl.environments.protocol import ToolResult
from megarl.environments.tools import Tool
from megarl.rollout.conversation import RolloutContext
from megarl.rollout.group_queue import UNLIMITED, GroupQueue, LocalKVStore
from megarl.rollout.group_stream import AdmittedPrompt, GroupStream
from megarl.rollout.scheduler import gather_rollouts
from megarl.types import Ids, Message, Prompt, as_token_ids

END, WORD, CALL = 1, 2, 3
CATALOG = EnvironmentCatalog({"tool": Tool({"type": "function", "function": {"name": "tool"}}, lambda: "")})


class MockEngine:
    """A mocked engine: the length of an answer depends only on the sample's seed and the turn, not on engine or
    time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.stops, self.busy, self.version = options, asyncio.Event(), 0.0, 0

    async def generate(
        self,
        ids: Ids | Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix = NOT_RECORDED,
        on_tokens: Any = None,
        **_: Any,
    ) -> Generation:
        options, prompt_ids = self.options, np.asarray(ids)
        turn = int((prompt_ids == 0).sum())
        num_written = len(prompt_ids) - 1 - int(np.flatnonzero(prompt_ids == 0)[-1])
        rng = random.Random(f"{params['sampling_seed']}/{turn}")
        length = max(1, round(rng.lognormvariate(0.0, options.sigma) * options.tokens))
        last = CALL if turn < options.turns else END
        length = min(max(length - num_written, 1), params["max_new_tokens"])
        start, stops = time.perf_counter(), self.stops
        try:
            async with asyncio.timeout(length * options.token_s):
                await stops.wait()
            finish, spent = "abort", time.perf_counter() - start
            length = min(length, int(spent / options.token_s))
            tokens = [WORD] * length
        except TimeoutError:
            finish, spent = "stop", time.perf_counter() - start
            tokens = [WORD] * (length - 1) + [last]
        self.busy += spent
        return Generation(as_token_ids(tokens), np.zeros(len(tokens), np.float32), finish, self.version)  # type: ignore[arg-type]

    async def stop(self) -> None:
        self.stops.set()
        self.stops = asyncio.Event()


class MockChatTemplate:
    """The parts of a chat that a conversation needs: id 0 is the header of the policy's turn."""

    end_token_ids, end_of_call = frozenset({END, CALL}), CALL
    control_tokens = SimpleNamespace(escape=str)

    catalog = CATALOG

    def select_schemas(self, prompt: Prompt) -> list[dict[str, Any]]:
        return CATALOG.select_schemas(prompt)

    def decode(self, ids: Ids) -> str:
        return ""

    def find_content_start(self, text: str, after: str) -> int:
        return 0

    def encode(self, text: str) -> list[int]:
        return []

    def encode_continuation(self, messages: Sequence[Message], schemas: Any, last: int | None = None) -> list[int]:
        return [WORD, 0]


class SlowTools(EnvironmentPool):
    def __init__(self, seconds: float) -> None:
        super().__init__(CATALOG, 60.0, 1)
        self.seconds = seconds

    async def call_tool(self, name: str, arguments: Any) -> ToolResult:
        await asyncio.sleep(self.seconds)
        return ToolResult("", True)


async def parse(text: str, schemas: Any) -> ParsedResponse:
    return ParsedResponse("", (ToolCall("tool", {}),))


Result = tuple[float, float, int, int, int]
"""Seconds and idle share of all steps, the groups and tokens that they completed, and the conversations restarted."""


def make_context(options: argparse.Namespace) -> RolloutContext:
    config = RolloutConfig(
        max_turns=options.turns,
        max_new_tokens=10**6,
        max_context=10**8,
        concurrency=options.concurrency,
        max_staleness=options.max_staleness,
    )
    chat: Any = MockChatTemplate()
    return RolloutContext(chat, SlowTools(options.tool_s), parse, config)


def make_prompt(number: int) -> Prompt:
    return Prompt(str(number), (), [WORD, 0])  # type: ignore[arg-type]


async def run_steps(options: argparse.Namespace, is_shared: bool) -> Result:
    """Complete all groups of each step, with one queue for all engines or a slice for each."""
    engines = [MockEngine(options) for _ in range(options.engines)]
    count, seconds, rollouts = options.prompts, 0.0, []
    edges = [count * e // len(engines) for e in range(len(engines) + 1)]
    for step in range(options.steps):
        prompts, store, calls = [make_prompt(number) for number in range(count)], LocalKVStore(), []
        for number, engine in enumerate(engines):
            first, last = (0, count) if is_shared else (edges[number], edges[number + 1])
            call = gather_rollouts(
                prompts[first:last],
                GroupQueue(count, len(engines), store) if is_shared else GroupQueue(last - first),
                engine,
                make_context(options),
                samples=options.samples,
                greedy=False,
                seed=step,
                first_group=first,
            )
            calls.append(call)
        start = time.perf_counter()
        results = await asyncio.gather(*calls)
        seconds += time.perf_counter() - start
        rollouts += [rollout for result in results for rollout in result.rollouts]
    idle = 1 - sum(engine.busy for engine in engines) / (seconds * options.engines * options.concurrency)
    return seconds, idle, count * options.steps, sum(rollout.num_actions for rollout in rollouts), 0


async def run_oversampled_steps(options: argparse.Namespace) -> Result:
    """Complete as many groups in each step, the first of those in flight; the engines sleep between steps."""
    engines, store = [MockEngine(options) for _ in range(options.engines)], LocalKVStore()
    num_in_flight = max_pending_groups(options.prompts, options.oversample)
    streams = [
        GroupStream(
            GroupQueue(UNLIMITED, len(engines), store),
            engine,
            make_context(options),
            samples=options.samples,
            max_groups=-(-num_in_flight // len(engines)),
            timeout=1e6,
            is_ordered=False,
        )
        for engine in engines
    ]
    tasks = [asyncio.create_task(stream.run()) for stream in streams]
    seconds, tokens, num_restarted, num_admitted = 0.0, 0, 0, 0
    for step in range(options.steps):
        end = num_in_flight + step * options.prompts
        admitted = [AdmittedPrompt(make_prompt(number), number, 0) for number in range(num_admitted, end)]
        num_admitted = end
        start = time.perf_counter()
        for stream in streams:
            await stream.admit(admitted)
        results = await asyncio.gather(*(stream.collect(options.prompts) for stream in streams))
        await asyncio.gather(*(stream.pause("retract", sleeps=True) for stream in streams))
        seconds += time.perf_counter() - start
        for engine, stream in zip(engines, streams, strict=True):
            engine.version = step + 1
            await stream.set_version(step + 1)
            await stream.resume()
        tokens += sum(rollout.num_actions for result in results if result for rollout in result.rollouts)
        num_restarted += sum(result.num_stale for result in results if result)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    idle = 1 - sum(engine.busy for engine in engines) / (seconds * options.engines * options.concurrency)
    return seconds, idle, options.prompts * options.steps, tokens, num_restarted


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    parser = Parser(__doc__)
    sizes: dict[str, int] = {"engines": 4, "steps": 6, "prompts": 32, "samples": 4, "concurrency": 16, "turns": 1}
    for name, value in (sizes | {"max-staleness": 4, "tokens": 400}).items():
        parser.add_argument(f"--{name}", type=int_in_range(), default=value)
    for name, number in {"sigma": 1.0, "token-s": 0.001, "tool-s": 0.0, "oversample": 1.5}.items():
        parser.add_argument(f"--{name}", type=float, default=number)
    options = parser.parse_args(arguments)
    results: list[Result] = []
    for kind, work in (
        ("even slices", run_steps(options, is_shared=False)),
        ("queue", run_steps(options, is_shared=True)),
        ("queue and over-sampling", run_oversampled_steps(options)),
    ):
        results.append(asyncio.run(work))
        seconds, idle, groups, tokens, restarted = results[-1]
        print(f"{kind:24} {seconds:7.2f} s  {results[0][0] / seconds:.2f}x  {idle:5.1%} idle  ", end="")
        print(f"{groups} groups, {tokens:,} tokens, {restarted} restarted", flush=True)
    return results


def run() -> int:
    main()
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(run))
