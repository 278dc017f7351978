"""Conversations with slow tools: MegaRL's loop against one that goes turn by turn, by a real engine, in the same run.

    .venv/bin/python tools/bench_turns.py FOLDER [--conversations 96] [--turns 4] [--tokens 24] [--tool-s 0.5]
                                                 [--spread] [--concurrency 32] [--rounds 3]

with the model of the quickstart, as tools/make_quickstart.py leaves it in the folder. Both ways in turn, in as many
rounds. In each conversation the policy writes so many turns of so many tokens, with a call of a tool between them that
takes so many seconds; with --spread as many on average, exponentially distributed, as searches and tests of programs
are. Turn by turn, as a batched generation goes: all write, all call, and when the last tool has answered all write
again. By the loop: whoever is done goes on. The engine has room for `concurrency` answers either way.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.command_line import Parser, count, ends_in_a_line
from megarl.config import from_dict
from megarl.environments.protocol import ToolResult
from megarl.rollout.chat import Chat
from megarl.rollout.client import Client
from megarl.rollout.engine import Engine, start_host
from megarl.rollout.gathering import gather_rollouts
from megarl.rollout.hosting import SHARED
from megarl.rollout.multi_turn import Surroundings
from megarl.rollout.policy import Generation, Policy
from megarl.rollout.queue import Tickets
from megarl.rollout.tool_calls import Call, Reply
from megarl.rollout.tools import load_tools
from megarl.types import Ids, Message, Prompt, ids_of


class Writes:
    """The engine, which writes as many tokens as it is asked for and then ends its turn, so that it can call."""

    def __init__(self, client: Client, end: int) -> None:
        self._client, self._end = client, end

    async def generate(self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int = 0) -> Generation:
        said = await self._client.generate(ids, {**params, "ignore_eos": True, "stop_token_ids": []}, routed)
        tokens = np.concatenate([said.token_ids[:-1], ids_of([self._end])])
        return Generation(tokens, said.logprobs, "stop", said.weight_version, routing=said.routing)

    async def stop(self) -> None:
        await self._client.stop()


class InStep:
    """A policy that answers nobody before all have asked, and all have been answered."""

    def __init__(self, policy: Policy, conversations: int, at_once: int) -> None:
        self._policy, self._gate = policy, asyncio.Barrier(conversations)
        self._room = asyncio.Semaphore(at_once)

    async def generate(self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int = 0) -> Generation:
        await self._gate.wait()
        async with self._room:
            said = await self._policy.generate(ids, params, routed)
        await self._gate.wait()
        return said

    async def stop(self) -> None:
        await self._policy.stop()


class SlowSessions:
    """Tools that take their time; nothing else of a session is wanted."""

    def __init__(self, options: argparse.Namespace, schemas: list[dict[str, Any]]) -> None:
        self._options, self._schemas = options, schemas

    async def begin(self, prompt: Prompt) -> SlowSession:
        return SlowSession(self._options, prompt, self._schemas)


class SlowSession:
    def __init__(self, options: argparse.Namespace, prompt: Prompt, schemas: list[dict[str, Any]]) -> None:
        self._options, self.messages, self.schemas = options, prompt.messages, schemas
        self._dice = random.Random(prompt.id)

    async def call(self, number: int, name: str, arguments: Any) -> ToolResult:
        seconds = self._options.tool_s
        await asyncio.sleep(self._dice.expovariate(1 / seconds) if self._options.spread else seconds)
        return ToolResult("42", True)

    async def reward(self, answer: str, messages: Sequence[Message], turns: Sequence[str]) -> None:
        return None

    def end(self) -> None:
        pass


async def parse(text: str, schemas: Any) -> Reply:
    """Every turn is a call."""
    return Reply("", (Call("calculator", {"expression": "6*7"}),))


async def compare(engine: Engine, chat: Chat, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every round, of both ways."""
    found: dict[str, list[float]] = {"turn by turn": [], "by the loop": []}
    config = engine.config.rollout
    async with Client(engine.url, engine.api_key, 600.0, None, engine.version) as client:
        for number in range(options.rounds + 1):  # the first is not counted
            for way in sorted(found, reverse=bool(number % 2)):
                asked = [f"{number}{way[0]}{i}: what is {i}+{2 * i}?" for i in range(options.conversations)]
                prompts = [Prompt(text, ({"role": "user", "content": text},)) for text in asked]
                policy: Policy = Writes(client, chat.end_of_turn)
                own = config
                if way == "turn by turn":
                    policy = InStep(policy, options.conversations, options.concurrency)
                    own = from_dict(settings(options, options.conversations)).rollout
                sessions: Any = SlowSessions(options, chat.schemas(prompts[0]))
                around = Surroundings(chat, sessions, parse, own)
                start = time.perf_counter()
                done = await gather_rollouts(
                    prompts, Tickets(len(prompts)), policy, around, samples=1, greedy=False, seed=number
                )
                seconds = time.perf_counter() - start
                turns = {sum(turn.is_action for turn in rollout.turns) for rollout in done.rollouts}
                assert turns == {options.turns} and len(done.rollouts) == options.conversations, turns
                if number:
                    found[way].append(seconds)
                    print(f"round {number}, {way:14} {seconds:6.2f} s", flush=True)
    return found


def settings(options: argparse.Namespace, concurrency: int) -> dict[str, Any]:
    rollout = {
        "max_turns": options.turns,
        "max_new_tokens": options.tokens,
        "max_context": 2048,
        "concurrency": concurrency,
        "tools": ["megarl.rollout.tools:calculator"],
        "tool_call_parser": "qwen25",
    }
    return {
        "model": {"path": str(options.folder / "model"), "dtype": "float32"},
        "rollout": rollout,
        "train": {"replay_routing": False},
    }


def run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        tree = settings(options, options.concurrency)
        config = from_dict({**tree, "run": {"dir": folder}})
        chat = Chat.load(config.model.path, load_tools(config.rollout.tools))
        host = start_host(config, threads=1)
        os.environ[SHARED] = host.path
        engine = Engine(config, threads=1)
        try:
            engine.start()
            engine.wait_ready()
            found = asyncio.run(compare(engine, chat, options))
        finally:
            engine.shutdown()
            host.close()
    slow, quick = (statistics.median(found[way]) for way in ("turn by turn", "by the loop"))
    print(f"medians: turn by turn {slow:.2f} s, by the loop {quick:.2f} s: {slow / quick:.2f}x")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of tools/make_quickstart.py")
    for name, value in {"conversations": 96, "turns": 4, "tokens": 24, "concurrency": 32, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=count(), default=value)
    parser.add_argument("--tool-s", type=float, default=0.5)
    parser.add_argument("--spread", action="store_true")
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(ends_in_a_line(main))
