"""Rollouts by an engine: its client, its tools' processes, and a look at whether it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from megarl.config import RolloutConfig
from megarl.models.routing import RoutingShape
from megarl.rollout.chat import Chat
from megarl.rollout.client import Client
from megarl.rollout.engine import Engine
from megarl.rollout.gathering import AHEAD, Gathered, Group, gather_rollouts
from megarl.rollout.multi_turn import Surroundings
from megarl.rollout.queue import Tickets
from megarl.rollout.tool_calls import parser
from megarl.rollout.tools import ToolPool
from megarl.types import Prompt

T = TypeVar("T")
_LOOK_S = 1.0
_LATER_S = 60.0
"""By which a request's own limit comes after the deadline of all, which says why."""


async def _watched(work: Coroutine[Any, Any, T], look: Callable[[], None]) -> T:
    """The result, or what `look` raises, which is called again and again meanwhile, in a thread: it may wait."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
            await asyncio.to_thread(look)
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


class Conversations:
    """Rollouts by one engine; its tools' processes are kept from one call to the next, until `close`.

    routing: of the engine's record of it, where the rollouts are to carry one.
    """

    def __init__(self, engine: Engine, chat: Chat, config: RolloutConfig, routing: RoutingShape | None = None) -> None:
        self._engine, self._chat, self._config, self._routing = engine, chat, config, routing
        self._runner = asyncio.Runner()  # the processes belong to one event loop
        self._tools: ToolPool | None = None

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        tickets: Tickets | None = None,
        samples: int | None = None,
        greedy: bool = False,
        seed: int = 0,
        first_group: int = 0,
        needed: int | None = None,
        carried: Sequence[Group] = (),
        look: Callable[[], None] = lambda: None,
    ) -> Gathered:
        """Rollouts of those prompts whose tickets this engine gets, ordered by group, then by sample, and what is to be
        gone on with; the engine must be ready. See `gather_rollouts`.

        tickets: that the engines share to which the same prompts are given; all are this engine's by default. samples:
        per prompt, `config.samples_per_prompt` by default. seed: of the step; each sample's own is recorded in it.
        look: called every second, in a thread; what it raises ends this.

        Returns within `config.step_timeout`; what fails or is late by itself is an aborted rollout, of which the engine
        has then let go, too. Raises RuntimeError where the engine fails, with its last log lines if it died.
        """
        engine, chat, config = self._engine, self._chat, self._config
        engine.check_alive()

        def watch() -> None:
            engine.check_alive()
            look()

        async def run() -> Gathered:
            if self._tools is None:
                log = engine.log.with_name(f"tools_{engine.index}.log")
                self._tools = ToolPool(chat.tools, config.tool_timeout, AHEAD * config.concurrency, log)
            deadline = asyncio.get_running_loop().time() + config.step_timeout
            limit = config.step_timeout + _LATER_S
            async with Client(engine.url, engine.api_key, limit, self._routing, engine.version) as client:
                parse = parser(client, engine.tool_call_parser, engine.tool_call_marker)
                talks = gather_rollouts(
                    prompts,
                    tickets or Tickets(len(prompts)),
                    client,
                    Surroundings(chat, self._tools, parse, config),
                    samples=config.samples_per_prompt if samples is None else samples,
                    greedy=greedy,
                    seed=seed,
                    first_group=first_group,
                    deadline=deadline,
                    needed=needed,
                    carried=carried,
                    version=engine.version,
                )
                return await _watched(talks, watch)

        try:
            gathered = self._runner.run(run())
            ended = [one.status for group in gathered.partials for one in group]
            if "aborted" in [*ended, *(rollout.status for rollout in gathered.rollouts)]:
                engine.drop_requests()
            return gathered
        except RuntimeError:
            engine.check_alive()
            raise

    def close(self) -> None:
        """End the tools' processes; safe to call twice."""
        tools, self._tools = self._tools, None
        if tools is not None:
            self._runner.run(tools.aclose())
        self._runner.close()
