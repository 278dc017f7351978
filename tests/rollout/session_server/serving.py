"""A server with one session, and the official client of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from openai import AsyncOpenAI
from scripted import CHAT, CONFIG, END, PROMPT, ids, parse

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import RolloutConfig
from megarl.engine.engine_protocol import Generation, Policy
from megarl.rollout.conversation import build_sampling_params
from megarl.rollout.session_server import AgentSession, SessionServer
from megarl.types import Ids, Prompt, as_token_ids

PARAMS = build_sampling_params(CONFIG, CHAT, greedy=False, seed=5)
ASK = [{"role": "user", "content": "What is 1+2?"}]


@dataclass
class Served:
    server: SessionServer
    recording: AgentSession
    client: AsyncOpenAI
    said: list[str] = field(default_factory=list)

    async def create(self, messages: Sequence[Any], **fields: Any) -> Any:
        return await self.client.chat.completions.create(model="policy", messages=list(messages), **fields)

    def texts(self) -> list[list[str]]:
        """Of each branch, its turns as text; actions are marked."""
        return [
            [("*" if turn.is_action else "") + CHAT.decode(turn.token_ids) for turn in branch.turns]
            for branch in self.recording.collect_branches()
        ]


@asynccontextmanager
async def serving(
    policy: Policy,
    config: RolloutConfig = CONFIG,
    prompt: Prompt = PROMPT,
    chat: ChatTemplate = CHAT,
    deadline: float | None = None,
    params: dict[str, Any] = PARAMS,
    retries: int = 0,
) -> AsyncIterator[Served]:
    lines: list[str] = []
    server = SessionServer(chat, parse, config, log=lines.append)
    await server.start()
    recording = server.open(prompt, policy, params, deadline, seed=5)
    client = AsyncOpenAI(base_url=recording.base_url, api_key=recording.key, max_retries=retries, timeout=120)
    try:
        yield Served(server, recording, client, lines)
    finally:
        await client.close()
        await server.aclose()


def run(test: Callable[..., Awaitable[None]], *args: Any, **settings: Any) -> None:
    """The test with a server of these settings."""

    async def whole() -> None:
        async with serving(*args, **settings) as served:
            await asyncio.wait_for(test(served), 240)

    asyncio.run(whole())


class Numbered:
    """A policy that says lines in turn, each token with a log-prob of its own: -1, -2, ... It records as routing of a
    token [its place, the number of the request]. A line that ends with "..." is cut off by its length."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.tokens = list(lines), 0
        self.calls: list[tuple[list[int], dict[str, Any], int, Generation]] = []

    def ids(self, text: str) -> Sequence[int]:
        return ids(text)

    async def generate(
        self, context: Ids | Sequence[int], params: dict[str, Any], routed: int = 0, on_tokens: Any = None
    ) -> Generation:
        number = len(self.calls)
        line = self.lines[number % len(self.lines)]
        known = list(map(int, context))
        cut = line.endswith("...")
        written = [*self.ids(line.removesuffix("...")), *(() if cut else (END,))][: params["max_new_tokens"]]
        first = self.tokens + 1
        self.tokens += len(written)
        places = torch.arange(routed, len(known) + len(written) - 1, dtype=torch.int16)
        said = Generation(
            as_token_ids(written),
            -np.arange(first, first + len(written), dtype=np.float32),
            "stop" if written[-1] == END else "length",
            number,
            routing=torch.stack([places, torch.full_like(places, number)], dim=1)[:, None],
        )
        self.calls.append((known, params, routed, said))
        await asyncio.sleep(0)
        return said

    async def stop(self) -> None:
        """It is quick enough."""
