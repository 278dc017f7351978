"""A session server with one session, and OpenAI's client of it."""

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
from megarl.engine.engine_protocol import NOT_RECORDED, Generation, Policy, RecordedPrefix
from megarl.rollout.conversation import Deadline, build_sampling_params
from megarl.rollout.session_server import AgentSession, SessionServer
from megarl.types import Ids, Prompt, as_token_ids

PARAMS = build_sampling_params(CONFIG, CHAT, greedy=False, seed=5)
QUESTION = [{"role": "user", "content": "What is 1+2?"}]


@dataclass
class ServedSession:
    server: SessionServer
    recording: AgentSession
    client: AsyncOpenAI
    log: list[str] = field(default_factory=list)

    async def create(self, messages: Sequence[Any], **fields: Any) -> Any:
        return await self.client.chat.completions.create(model="policy", messages=list(messages), **fields)

    def texts(self) -> list[list[str]]:
        """Return the turns of each branch as text, with a star before actions."""
        return [
            [("*" if turn.is_action else "") + CHAT.decode(turn.token_ids) for turn in branch.turns]
            for branch in self.recording.collect_branches()
        ]


@asynccontextmanager
async def serve_session(
    policy: Policy,
    config: RolloutConfig = CONFIG,
    prompt: Prompt = PROMPT,
    chat: ChatTemplate = CHAT,
    deadline: Deadline | None = None,
    params: dict[str, Any] = PARAMS,
    retries: int = 0,
) -> AsyncIterator[ServedSession]:
    log: list[str] = []
    server = SessionServer(chat, parse, config, log=log.append)
    await server.start()
    recording = server.open(prompt, policy, params, deadline, seed=5)
    client = AsyncOpenAI(base_url=recording.base_url, api_key=recording.key, max_retries=retries, timeout=120)
    try:
        yield ServedSession(server, recording, client, log)
    finally:
        await client.close()
        await server.aclose()


def run_with_server(test: Callable[..., Awaitable[None]], *args: Any, **settings: Any) -> None:
    """Run the test with a served session of these settings."""

    async def run_policy() -> None:
        async with serve_session(*args, **settings) as session:
            await asyncio.wait_for(test(session), 240)

    asyncio.run(run_policy())


class NumberedPolicy:
    """A policy that returns lines in turn. Its tokens have the log-probs -1, -2, ... across requests, and the routing
    record [position, number of the request]. A line that ends with "..." stops at the length limit."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.tokens, self.version = list(lines), 0, 7
        self.calls: list[tuple[list[int], dict[str, Any], int, Generation]] = []

    def ids(self, text: str) -> Sequence[int]:
        return ids(text)

    async def generate(
        self,
        context: Ids | Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix = NOT_RECORDED,
        on_tokens: Any = None,
    ) -> Generation:
        number = len(self.calls)
        line = self.lines[number % len(self.lines)]
        token_ids = list(map(int, context))
        is_cut = line.endswith("...")
        written = [*self.ids(line.removesuffix("...")), *(() if is_cut else (END,))][: params["max_new_tokens"]]
        first = self.tokens + 1
        self.tokens += len(written)
        start = recorded.next_start(self.version)
        positions = torch.arange(start, len(token_ids) + len(written) - 1, dtype=torch.int16)
        generation = Generation(
            as_token_ids(written),
            -np.arange(first, first + len(written), dtype=np.float32),
            "stop" if written[-1] == END else "length",
            self.version,
            record_start=start,
            routing=torch.stack([positions, torch.full_like(positions, number)], dim=1)[:, None],
        )
        self.calls.append((token_ids, params, start, generation))
        await asyncio.sleep(0)
        return generation

    async def stop(self) -> None:
        """Do nothing: each request ends at once."""
