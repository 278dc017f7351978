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
from megarl.engine.engine_protocol import Generation
from megarl.engine.tool_calls import ParsedResponse, ToolCall
from megarl.environments.catalog import EnvironmentCatalog
from megarl.environments.process_sessions import EnvironmentPool
from megarl.environments.protocol import ToolResult
from megarl.environments.tools import Tool
from megarl.rollout.conversation import RolloutContext
from megarl.rollout.group_queue import GroupQueue, LocalKVStore
from megarl.rollout.scheduler import Group, gather_rollouts
from megarl.types import Ids, Message, Prompt, as_token_ids

END, WORD, CALL = 1, 2, 3
CATALOG = EnvironmentCatalog({"tool": Tool({"type": "function", "function": {"name": "tool"}}, lambda: "")})


class MockEngine:
    """A mocked engine: the length of an answer depends only on the sample's seed and the turn, not on engine or
    time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.stops, self.busy, self.version = options, asyncio.Event(), 0.0, 0

    async def generate(
        self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int = 0, on_tokens: Any = None, **_: Any
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


async def steps(kind: str, options: argparse.Namespace) -> tuple[float, float, int, int, int]:
    """Return seconds and idle share of all steps, the groups and tokens that they completed, and the conversations
    started anew."""
    config = RolloutConfig(
        max_turns=options.turns,
        max_new_tokens=10**6,
        max_context=10**8,
        concurrency=options.concurrency,
        max_staleness=options.max_staleness,
    )
    engines = [MockEngine(options) for _ in range(options.engines)]
    carried_groups: list[list[Group]] = [[] for _ in engines]
    oversample = options.oversample if kind == "queue and over-sampling" else 1.0
    seconds, groups, tokens, num_restarted, num_handed = 0.0, 0, 0, 0, 0
    for step in range(options.steps):
        num_carried = sum(map(len, carried_groups))
        count = round(options.prompts * oversample) - num_carried
        prompts = [Prompt(str(num_handed + number), (), [WORD, 0]) for number in range(count)]  # type: ignore[arg-type]
        counts = LocalKVStore()
        edges = [count * e // len(engines) for e in range(len(engines) + 1)]

        calls = []
        for number, engine in enumerate(engines):
            tools = SlowTools(options.tool_s)
            chat: Any = MockChatTemplate()
            engine.version = step
            first, last = (edges[number], edges[number + 1]) if kind == "even slices" else (0, count)
            tickets = GroupQueue(count, len(engines), counts, "step", num_carried)
            call = gather_rollouts(
                prompts[first:last],
                GroupQueue(last - first) if kind == "even slices" else tickets,
                engine,
                RolloutContext(chat, tools, parse, config),
                samples=options.samples,
                greedy=False,
                seed=step,
                first_group=first,
                num_needed_groups=options.prompts if oversample > 1 else None,
                partial_groups=carried_groups[number],
                version=step,
            )
            calls.append(call)
        start = time.perf_counter()
        results = await asyncio.gather(*calls)
        seconds += time.perf_counter() - start
        carried_groups = [result.partials for result in results]
        groups += len({rollout.group for result in results for rollout in result.rollouts})
        tokens += sum(rollout.num_actions for result in results for rollout in result.rollouts)
        num_restarted += sum(result.num_stale for result in results)
        num_handed += GroupQueue(count, 1, counts, "step").count_claimed()
    idle = 1 - sum(engine.busy for engine in engines) / (seconds * options.engines * options.concurrency)
    return seconds, idle, groups, tokens, num_restarted


def main(arguments: Sequence[str] | None = None) -> list[tuple[float, float, int, int, int]]:
    parser = Parser(__doc__)
    sizes: dict[str, int] = {"engines": 4, "steps": 6, "prompts": 32, "samples": 4, "concurrency": 16, "turns": 1}
    for name, value in (sizes | {"max-staleness": 4, "tokens": 400}).items():
        parser.add_argument(f"--{name}", type=int_in_range(), default=value)
    for name, number in {"sigma": 1.0, "token-s": 0.001, "tool-s": 0.0, "oversample": 1.5}.items():
        parser.add_argument(f"--{name}", type=float, default=number)
    options = parser.parse_args(arguments)
    results = []
    for kind in ("even slices", "queue", "queue and over-sampling"):
        results.append(asyncio.run(steps(kind, options)))
        seconds, idle, groups, tokens, restarted = results[-1]
        print(f"{kind:24} {seconds:7.2f} s  {results[0][0] / seconds:.2f}x  {idle:5.1%} idle  ", end="")
        print(f"{groups} groups, {tokens:,} tokens, {restarted} restarted", flush=True)
    return results


def run() -> int:
    main()
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(run))
