"""Scripted policies, and the prompt, chat template, configuration and parser that their conversations use."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import torch

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import RolloutConfig
from megarl.engine.engine_protocol import NOT_RECORDED, EngineLost, Generation, RecordedPrefix
from megarl.engine.tool_calls import ParsedResponse, ToolCall
from megarl.environments.catalog import load_tools
from megarl.environments.process_sessions import EnvironmentPool
from megarl.environments.protocol import ToolResult
from megarl.rollout.partial_rollouts import PartialRollout, read_groups, write_groups
from megarl.types import Ids, Prompt, Turn, as_token_ids

TOKENIZER = tiny_models.tokenizer()
CHAT = ChatTemplate(TOKENIZER, load_tools(["megarl.environments.ready.calculator:calculator"]))
END = CHAT.end_of_turn
CONFIG = RolloutConfig(max_turns=3, max_new_tokens=100, max_context=1000, concurrency=4, tool_timeout=60.0)
PROMPT = Prompt(id="p", messages=({"role": "user", "content": "What is 1+2?"},))


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def call(expression: str, name: str = "calculator") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


class ScriptedPolicy:
    """A policy that returns the given lines in order and records its requests. The last line repeats."""

    def __init__(self, *lines: str | Generation) -> None:
        self.lines = list(lines)
        self.requests: list[tuple[list[int], dict[str, Any]]] = []
        self.num_running = self.max_running = 0

    async def generate(
        self,
        context: Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix = NOT_RECORDED,
        on_tokens: Any = None,
    ) -> Generation:
        self.requests.append((list(context), params))
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        await asyncio.sleep(0.001)
        self.num_running -= 1
        line = self.lines[min(len(self.requests), len(self.lines)) - 1]
        generation = make_generation(line) if isinstance(line, str) else line
        if on_tokens is not None:
            on_tokens(as_token_ids(generation.token_ids))
        return generation

    async def stop(self) -> None:
        """Do nothing: each request ends by itself within milliseconds."""


def make_generation(text: str, finish: Any = "stop", version: int = 7) -> Generation:
    tokens = ids(text) + ((END,) if finish == "stop" else ())
    return Generation(tokens, tuple(-0.1 * (i + 1) for i in range(len(tokens))), finish, version, cached=1)


def make_turn(out: Generation) -> Turn:
    return Turn(out.token_ids, out.logprobs, True, out.weight_version)


async def parse(text: str, schemas: Sequence[dict[str, Any]]) -> ParsedResponse:
    """Parse one call as SGLang's qwen25 parser does."""
    if "<tool_call>" not in text or not schemas:
        return ParsedResponse(text)
    try:
        result = json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])
        return ParsedResponse("", (ToolCall(result["name"], result["arguments"]),))
    except ValueError:
        return ParsedResponse(text, error="malformed")


class FailingPolicy(ScriptedPolicy):
    """Return lines in order, raise those that are exceptions, and hang at `None`."""

    async def generate(
        self,
        context: Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix = NOT_RECORDED,
        on_tokens: Any = None,
    ) -> Generation:
        line: Any = self.lines[len(self.requests)]
        self.requests.append((list(context), params))
        if line is None:
            await asyncio.sleep(3600)
        if isinstance(line, Exception):
            raise line
        return make_generation(line)


def begin_rollout(prompt: Prompt = PROMPT, seed: int = 0, chat: ChatTemplate = CHAT) -> PartialRollout:
    return PartialRollout.begin(replace(prompt, token_ids=as_token_ids(chat.encode_prompt(prompt))), seed)


def write_and_read(partial: PartialRollout) -> PartialRollout:
    """Return the rollout as a file of partial groups keeps it."""
    with tempfile.TemporaryDirectory() as folder:
        write_groups(Path(folder, "file"), [(partial,)])
        return read_groups(Path(folder, "file"))[0][0]


class InProcessCalculator(EnvironmentPool):
    """A calculator in this process that answers after a random delay."""

    def __init__(self) -> None:
        super().__init__(CHAT.catalog, 60.0, 1)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        await asyncio.sleep(random.random() * 0.002)
        return ToolResult(str(len(arguments["expression"])), True)


HEAD = list(ids("<|im_start|>assistant\n"))


class DeterministicPolicy:
    """A policy whose next token is a hash of all tokens before it, written after a short pause. Some of its turns call
    the calculator. Its routing record of a token is the token's position in the conversation and the version of the
    weights.

    dies_after: number of tokens after which it raises `EngineLost`.
    waits_after: number of tokens after which it sets `waits`, once, and writes no more of a turn until it is stopped.
    """

    def __init__(self, version: int = 0, pause: float = 0.0005, dies_after: int = -1, waits_after: int = -1) -> None:
        self.weight_version, self.pause, self.dies_after, self.waits_after = version, pause, dies_after, waits_after
        self.waits = asyncio.Event()
        self.num_written = self.stops = 0
        self.num_running = self.max_running = 0

    async def generate(
        self,
        context: Ids | Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix = NOT_RECORDED,
        on_tokens: Any = None,
    ) -> Generation:
        token_ids, stops, finish = list(map(int, context)), self.stops, "length"
        self.num_running += 1
        self.max_running = max(self.num_running, self.max_running)
        tokens: list[int] = []
        while len(tokens) < params["max_new_tokens"]:
            await asyncio.sleep(random.random() * self.pause)
            if self.num_written == self.dies_after:
                raise EngineLost("died", "the engine is gone")
            tokens.append(next_token([*token_ids, *tokens]))
            self.num_written += 1
            if 0 <= self.waits_after <= self.num_written and tokens[-1] != END and not self.waits.is_set():
                self.waits.set()
                while self.stops == stops:
                    await asyncio.sleep(0.001)
            if tokens[-1] == END:
                finish = "stop"
                break
            if self.stops > stops:
                finish = "abort"
                break
        self.num_running -= 1
        full = [*token_ids, *tokens]
        logprobs = [-hash_tokens(full[: len(token_ids) + i + 1]) % 1000 / 1000 - 1 for i in range(len(tokens))]
        start = recorded.next_start(self.weight_version)
        positions = torch.arange(start, len(full) - 1, dtype=torch.int16)
        routing = torch.stack([positions, torch.full_like(positions, self.weight_version)], dim=1)[:, None]
        values = np.array(logprobs, np.float32)
        return Generation(
            *(as_token_ids(tokens), values, finish, self.weight_version),  # type: ignore[arg-type]
            routing=routing,
            record_start=start,
        )

    async def stop(self) -> None:
        self.stops += 1


def hash_tokens(tokens: Sequence[int]) -> int:
    return zlib.crc32(np.array(tokens, np.int32).tobytes())


def next_token(tokens: list[int]) -> int:
    """Return the next token of a calculator call, or digits up to a length; the hash of the turn's context decides."""
    start = max(i for i in range(len(HEAD), len(tokens) + 1) if tokens[i - len(HEAD) : i] == HEAD)
    plan = hash_tokens(tokens[:start])
    if plan % 3:
        response = [*ids(call(f"{plan % 89}+{plan % 97}")), END]
        return response[len(tokens) - start]
    return END if len(tokens) - start > plan % 40 else ids(str(hash_tokens(tokens) % 5))[0]
