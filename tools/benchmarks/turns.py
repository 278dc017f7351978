"""Conversations with slow tools: MegaRL's loop against turn-by-turn generation, with a real engine, in the same run.

    .venv/bin/python tools/bench.py turns FOLDER [--conversations 32] [--turns 16] [--tokens 16] [--tool-s 0.5] [--even]
                                                 [--concurrency 32] [--rounds 2]

Uses the quickstart's model, as tools/make_quickstart.py writes it to the folder. Each round runs both methods. In each
conversation the policy writes --turns turns with --tokens tokens on average, and a tool call that takes --tool-s
seconds on average between them. Both are exponentially distributed, a turn up to four times its average: searches and
program tests are mostly fast, and sometimes slow. With --even every turn and every call is the average. In a round both
methods have the same lengths and the same seconds.

Turn by turn, like batched generation: all write, all call, and when the last tool has answered, all write again. By the
loop: each conversation continues as soon as it can. The engine has room for `concurrency` answers in both.

The table also shows the time for waiting on tools alone, with an engine that writes instantly: turn by turn it is the
sum of each turn's longest call, by the loop the longest of the conversations' sums. The ratio of the two is the loop's
speedup if only tools are slow. It grows with the number of turns, because long calls coincide in few conversations.
With --even it is 1, and the loop only gains because the engine writes while tools work. Both methods spend the same
time writing, so the slower the engine, the smaller the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Samples, Stopwatch, compute_ratio, rotate
from benchmarks.output import Report
from benchmarks.workloads import check_quickstart, start_engine
from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import from_dict
from megarl.config.command_line import int_in_range
from megarl.engine.engine_protocol import NOT_RECORDED, Engine, EngineClient, Generation, Policy, RecordedPrefix
from megarl.engine.tool_calls import ParsedResponse, ToolCall
from megarl.environments.catalog import load_tools
from megarl.environments.protocol import ToolResult
from megarl.rollout.conversation import RolloutContext
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.scheduler import gather_rollouts
from megarl.types import Ids, Message, Prompt, as_token_ids

TURNS, LOOP = "turn by turn", "by the loop"
LONGEST = 4
"""Maximum length of a turn, in multiples of the average."""


def lengths(options: argparse.Namespace, seed: object) -> list[int]:
    """Return the number of tokens of a conversation's turns."""
    if options.even:
        return [options.tokens] * options.turns
    rng = random.Random(f"lengths {seed}")
    drawn = (round(rng.expovariate(1 / options.tokens)) for _ in range(options.turns))
    return [min(max(2, tokens), LONGEST * options.tokens) for tokens in drawn]


def tool_seconds(options: argparse.Namespace, seed: object) -> list[float]:
    """Return the seconds of a conversation's calls, one after each of its turns but the last."""
    rng = random.Random(f"seconds {seed}")
    return [options.tool_s if options.even else rng.expovariate(1 / options.tool_s) for _ in range(options.turns - 1)]


def tool_wait_seconds(calls: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return (turn by turn, by the loop): seconds that pass in calls alone. calls: seconds of each, by conversation."""
    return sum(map(max, zip(*calls, strict=True))), max(map(sum, calls))


class FixedLengthEngine:
    """Engine that writes each turn's planned number of tokens and then ends it, so that the conversation calls a
    tool."""

    def __init__(self, client: EngineClient, end: int, options: argparse.Namespace) -> None:
        self._client, self._end, self._options = client, end, options
        self._remaining: dict[int, list[int]] = {}
        """Lengths of the remaining turns, by the seeds of conversations."""

    async def generate(
        self,
        ids: Ids | Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix = NOT_RECORDED,
        *_: Any,
        **__: Any,
    ) -> Generation:
        seed = params["sampling_seed"]
        length = self._remaining.setdefault(seed, lengths(self._options, seed)).pop(0)
        turn_params = {**params, "max_new_tokens": length, "ignore_eos": True, "stop_token_ids": []}
        generated = await self._client.generate(ids, turn_params, recorded)
        tokens = np.concatenate([generated.token_ids[:-1], as_token_ids([self._end])])
        return Generation(tokens, generated.logprobs, "stop", generated.weight_version, routing=generated.routing)

    async def stop(self) -> None:
        await self._client.stop()


class LockstepPolicy:
    """Policy that answers only after all conversations have asked, and returns only after all are answered."""

    def __init__(self, policy: Policy, conversations: int, max_concurrency: int) -> None:
        self._policy, self._gate = policy, asyncio.Barrier(conversations)
        self._room = asyncio.Semaphore(max_concurrency)

    async def generate(
        self,
        ids: Ids | Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix = NOT_RECORDED,
        *_: Any,
        **__: Any,
    ) -> Generation:
        await self._gate.wait()
        async with self._room:
            generated = await self._policy.generate(ids, params, recorded)
        await self._gate.wait()
        return generated

    async def stop(self) -> None:
        await self._policy.stop()


class SlowSessions:
    """Tools that sleep; other methods of a session are not needed."""

    def __init__(self, options: argparse.Namespace, schemas: list[dict[str, Any]]) -> None:
        self._options, self._schemas = options, schemas

    async def open_session(self, prompt: Prompt) -> SlowSession:
        return SlowSession(self._options, prompt, self._schemas)


class SlowSession:
    def __init__(self, options: argparse.Namespace, prompt: Prompt, schemas: list[dict[str, Any]]) -> None:
        self.messages, self.schemas = prompt.messages, schemas
        self._seconds = iter(tool_seconds(options, prompt.ground_truth))

    async def call(self, name: str, arguments: Any) -> ToolResult:
        await asyncio.sleep(next(self._seconds))
        return ToolResult("42", True)

    async def reward(self, answer: str, messages: Sequence[Message], turns: Sequence[str]) -> None:
        return None

    def close(self) -> None:
        pass


async def parse(text: str, schemas: Any) -> ParsedResponse:
    """Parse every turn as a tool call."""
    return ParsedResponse("", (ToolCall("calculator", {"expression": "6*7"}),))


async def compare(
    engine: Engine, chat: ChatTemplate, options: argparse.Namespace, report: Report
) -> tuple[Samples, dict[str, list[float]]]:
    """Return every round of both methods, and the seconds of waiting for tools alone."""
    samples, waits = Samples((TURNS, LOOP)), dict[str, list[float]]({TURNS: [], LOOP: []})
    async with engine.connect(600.0) as client:
        short = argparse.Namespace(**{**vars(options), "turns": 2})
        for method in (TURNS, LOOP):  # warm-up, not counted
            await converse(chat, short, client, method, 0)
        for number in range(1, options.rounds + 1):
            pure = tool_wait_seconds([tool_seconds(options, seed) for seed in seeds(options, number)])
            for method, seconds in zip((TURNS, LOOP), pure, strict=True):
                waits[method].append(seconds)
            for method in rotate((TURNS, LOOP), number - 1):
                with Stopwatch() as watch:
                    await converse(chat, options, client, method, number)
                samples.add(method, watch.seconds, watch.processor_s)
                report.progress(
                    f"round {number}, {method:14} {watch.seconds:6.2f} s, of which waiting for tools alone "
                    f"{waits[method][-1]:6.2f} s"
                )
    return samples, waits


def seeds(options: argparse.Namespace, number: int) -> list[str]:
    """Return the seeds of the calls of a round's conversations."""
    return [f"{number}/{i}" for i in range(options.conversations)]


async def converse(
    chat: ChatTemplate, options: argparse.Namespace, client: EngineClient, method: str, number: int
) -> None:
    """Run one round of one method."""
    prompts = []
    for i, seed in enumerate(seeds(options, number)):
        text = f"{number}{options.turns}{method[0]}{i}: what is {i}+{2 * i}?"
        prompts.append(Prompt(text, ({"role": "user", "content": text},), ground_truth=seed))
    policy: Policy = FixedLengthEngine(client, chat.end_of_turn, options)
    max_concurrency = options.concurrency
    if method == TURNS:
        policy = LockstepPolicy(policy, options.conversations, options.concurrency)
        max_concurrency = options.conversations
    sessions: Any = SlowSessions(options, chat.catalog.select_schemas(prompts[0]))
    context = RolloutContext(chat, sessions, parse, from_dict(settings(options, max_concurrency)).rollout)
    result = await gather_rollouts(
        prompts, GroupQueue(len(prompts)), policy, context, samples=1, greedy=False, seed=number
    )
    turns = {sum(turn.is_action for turn in rollout.turns) for rollout in result.rollouts}
    assert turns == {options.turns} and len(result.rollouts) == options.conversations, turns


def settings(options: argparse.Namespace, concurrency: int) -> dict[str, Any]:
    rollout = {
        "max_turns": options.turns,
        "max_new_tokens": LONGEST * options.tokens,
        "max_context": 2048,
        "concurrency": concurrency,
        "tools": ["megarl.environments.ready.calculator:calculator"],
        "tool_call_parser": "qwen25",
    }
    return {
        "model": {"path": str(options.folder / "model"), "dtype": "float32"},
        "rollout": rollout,
        "train": {"routing_replay": False},
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="of tools/make_quickstart.py")
    for name, value in {"conversations": 32, "turns": 16, "tokens": 16, "concurrency": 32, "rounds": 2}.items():
        parser.add_argument(f"--{name}", type=int_in_range(), default=value, help="default %(default)s")
    parser.add_argument("--tool-s", type=float, default=0.5, help="default %(default)s")
    parser.add_argument("--even", action="store_true", help="no turn is longer than another, no call slower")


def run(options: argparse.Namespace, report: Report) -> None:
    options.folder = check_quickstart(options.folder, "model")
    report.start()
    with tempfile.TemporaryDirectory() as folder:
        config = from_dict({**settings(options, options.concurrency), "run": {"dir": folder}})
        chat = ChatTemplate.load(config.model.path, load_tools(config.rollout.tools))
        with start_engine(config) as engine:
            samples, waits = asyncio.run(compare(engine, chat, options, report))
    more: dict[str, dict[str, Any]] = {
        method: {
            "times as fast": compute_ratio(samples.seconds[TURNS], samples.seconds[method]),
            "waiting alone, s": statistics.median(waits[method]),
            "waiting alone, times as fast": compute_ratio(waits[TURNS], waits[method]),
        }
        for method in waits
    }
    title = f"{options.conversations} conversations of {options.turns} turns, medians of {options.rounds} rounds"
    report.table(title, samples.rows(more))
