"""The rollout loop: the policy writes, tools answer, until the policy is done. Token ids in, token ids out."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from megarl.config import RolloutConfig
from megarl.models.routing import RoutingShape
from megarl.rollout.chat import Chat, call_id
from megarl.rollout.client import Client, Policy, RequestFailed
from megarl.rollout.engine import Engine
from megarl.rollout.tool_calls import Parse, Reply, parser
from megarl.rollout.tools import ToolPool, ToolResult
from megarl.types import Message, Prompt, Rollout, Status, Turn, ids_of

_LOOK_S = 1.0
_LATER_S = 60.0
"""By which a request's own limit comes after the deadline of all, which says why."""


@dataclass(frozen=True)
class Surroundings:
    """What a conversation needs besides the policy."""

    chat: Chat
    tools: ToolPool
    parse: Parse
    config: RolloutConfig


@dataclass
class _Talk:
    """A conversation as far as it has come, which is what is kept of it where it is cut off."""

    turns: list[Turn]
    messages: list[Message]
    routing: list[torch.Tensor] = field(default_factory=list)
    calls: int = 0
    errors: int = 0
    drafted: int = 0
    accepted: int = 0
    failure: str = ""


async def run_conversation(
    prompt: Prompt,
    policy: Policy,
    around: Surroundings,
    params: dict[str, Any],
    group: int = 0,
    seed: int = 0,
    deadline: float | None = None,
) -> Rollout:
    """One conversation. params: SGLang's sampling parameters but for max_new_tokens, which follows from the budget.

    The whole conversation stays within `max_context` tokens and the policy within `max_turns` turns. Status: `stop`
    when the policy ended a turn without a call, or with an end token that leaves no room for an answer; `length` when
    a turn or the context was full; `max_turns`; `aborted` when the engine cut it off, a request of it failed, or it was
    not done by `deadline`, in the event loop's time: then `failure` says which, and the turns are those it had.
    """
    rendered = prompt.token_ids if len(prompt.token_ids) else ids_of(around.chat.render(prompt))
    talk = _Talk([Turn(rendered)], list(prompt.messages))
    status: Status = "aborted"
    try:
        async with asyncio.timeout_at(deadline):
            status = await _converse(prompt, policy, around, params, talk)
    except TimeoutError:
        talk.failure = "it was not done within rollout.step_timeout"
    except RequestFailed as error:
        talk.failure = str(error)
    return Rollout(
        prompt=prompt,
        turns=tuple(talk.turns),
        status=status,
        seed=seed,
        group=group,
        messages=tuple(talk.messages),
        tool_calls=talk.calls,
        tool_errors=talk.errors,
        routing=torch.cat(talk.routing) if talk.routing else None,
        drafted=talk.drafted,
        accepted=talk.accepted,
        failure=talk.failure,
    )


async def _converse(
    prompt: Prompt, policy: Policy, around: Surroundings, params: dict[str, Any], talk: _Talk
) -> Status:
    """Carry the talk on to its end.

    A token's routing is taken from the first request that ran it, which is the one that sampled what follows it.
    """
    chat, config = around.chat, around.config
    schemas = chat.schemas(prompt)
    turns, messages = talk.turns, talk.messages
    context = turns[0].token_ids
    routed = 0
    for number in range(1, config.max_turns + 1):
        budget = min(config.max_new_tokens, config.max_context - len(context))
        if budget <= 0:
            return "length"
        out = await policy.generate(context, {**params, "max_new_tokens": budget}, routed)
        talk.drafted, talk.accepted = talk.drafted + out.drafted, talk.accepted + out.accepted
        if out.routing is not None:
            talk.routing.append(out.routing)
            routed += len(out.routing)
        last = int(out.token_ids[-1]) if len(out.token_ids) else None
        if last is not None:
            turns.append(Turn(out.token_ids, out.logprobs, True, out.weight_version, out.versions))
            context = np.concatenate([context, turns[-1].token_ids])
        said = chat.text(out.token_ids[:-1] if last in chat.ends else out.token_ids)
        if last is None or last != chat.end_of_call:
            messages.append({"role": "assistant", "content": said})
            talk.failure = out.reason
            return "aborted" if out.finish == "abort" else "stop" if last in chat.ends else out.finish
        reply = await around.parse(said, schemas)
        allowed = {schema["function"]["name"] for schema in schemas}
        names = [call.name if call.name in allowed else "error" for call in reply.calls]
        ids = [call_id(name, number) for number, name in enumerate([*names, "error"], talk.calls)]
        messages.append(_assistant(reply, ids))
        if not reply.calls and not reply.error:
            return "stop"
        if number == config.max_turns:
            break
        results = await asyncio.gather(*(_run(around.tools, allowed, call) for call in reply.calls))
        talk.errors += sum(not result.ok for result in results) + bool(reply.error)
        talk.calls += len(results)
        texts = [*(result.text for result in results), *([f"Error: {reply.error}"] if reply.error else ())]
        answers: list[Message] = [  # what the policy calls a tool that does not exist reaches no template
            {"role": "tool", "name": name, "tool_call_id": own, "content": text}
            for name, own, text in zip([*names, "error"], ids, texts, strict=False)
        ]
        observed = chat.observation(answers, schemas)
        if len(context) + len(observed) >= config.max_context:
            return "length"
        turns.append(Turn(ids_of(observed)))
        context = np.concatenate([context, turns[-1].token_ids])
        messages += answers
    return "max_turns"


async def _run(tools: ToolPool, allowed: set[str], call: Any) -> ToolResult:
    if call.name not in allowed:
        return ToolResult(f"Error: there is no tool {call.name!r}; there are: {', '.join(sorted(allowed))}", False)
    return await tools.call(call.name, call.arguments)


def _assistant(reply: Reply, ids: Sequence[str]) -> Message:
    message: Message = {"role": "assistant", "content": reply.text}
    if reply.calls:
        message["tool_calls"] = [
            {"id": own, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call, own in zip(reply.calls, ids, strict=False)
        ]
    return message


def sampling_params(config: RolloutConfig, chat: Chat, greedy: bool, seed: int) -> dict[str, Any]:
    """SGLang's sampling parameters of one conversation, without max_new_tokens."""
    params: dict[str, Any] = {"stop_token_ids": sorted(chat.ends), "skip_special_tokens": False}
    if greedy or config.temperature == 0:
        return {**params, "temperature": 0.0}
    return {**params, "temperature": config.temperature, "top_p": config.top_p, "sampling_seed": seed}


def sample_seed(seed: int, group: int, sample: int) -> int:
    """Seed of one conversation, 32 bits; depends on nothing but its three numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{group}/{sample}".encode()).digest()[:4], "big")


async def gather_rollouts(
    prompts: Sequence[Prompt],
    policy: Policy,
    around: Surroundings,
    *,
    samples: int,
    greedy: bool,
    seed: int,
    first_group: int = 0,
    deadline: float | None = None,
) -> list[Rollout]:
    """`samples` conversations of each prompt, `config.concurrency` at once; ordered by prompt, then by sample.

    What is not done at `deadline`, in the event loop's time, is aborted, also if its turn has not come by then.
    """
    slots = asyncio.Semaphore(around.config.concurrency)

    async def one(prompt: Prompt, group: int, sample: int) -> Rollout:
        own = sample_seed(seed, group, sample)
        async with slots:
            params = sampling_params(around.config, around.chat, greedy, own)
            return await run_conversation(prompt, policy, around, params, group, own, deadline)

    tasks: list[asyncio.Task[Rollout]] = []
    try:
        async with asyncio.TaskGroup() as together:
            for group, prompt in enumerate(prompts, first_group):
                if not len(prompt.token_ids):
                    prompt = replace(prompt, token_ids=ids_of(around.chat.render(prompt)))
                tasks += [together.create_task(one(prompt, group, sample)) for sample in range(samples)]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _watched(work: Coroutine[Any, Any, list[Rollout]], look: Callable[[], None]) -> list[Rollout]:
    """The result, or what `look` raises, which is called again and again meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
            look()
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
        samples: int | None = None,
        greedy: bool = False,
        seed: int = 0,
        first_group: int = 0,
        look: Callable[[], None] = lambda: None,
    ) -> list[Rollout]:
        """Rollouts of the prompts, ordered by prompt, then by sample; the engine must be ready.

        samples: per prompt, `config.samples_per_prompt` by default. Prompt i gets the group `first_group + i`, so that
        engines that share a batch do not give a number twice. seed: of the step; each sample's own is recorded in it.
        look: called every second; what it raises ends this.

        Returns within `config.step_timeout`; what fails or is late by itself is an aborted rollout, of which the engine
        has then let go, too. Raises RuntimeError where the engine fails, with its last log lines if it died.
        """
        engine, chat, config = self._engine, self._chat, self._config
        engine.check_alive()

        def watch() -> None:
            engine.check_alive()
            look()

        async def run() -> list[Rollout]:
            if self._tools is None:
                log = engine.log.with_name(f"tools_{engine.index}.log")
                self._tools = ToolPool(chat.tools, config.tool_timeout, log=log)
            deadline = asyncio.get_running_loop().time() + config.step_timeout
            limits = config.step_timeout + _LATER_S, config.concurrency
            async with Client(engine.url, engine.api_key, *limits, self._routing, engine.version) as client:
                parse = parser(client, engine.tool_call_parser, engine.tool_call_marker)
                talks = gather_rollouts(
                    prompts,
                    client,
                    Surroundings(chat, self._tools, parse, config),
                    samples=config.samples_per_prompt if samples is None else samples,
                    greedy=greedy,
                    seed=seed,
                    first_group=first_group,
                    deadline=deadline,
                )
                return await _watched(talks, watch)

        try:
            rollouts = self._runner.run(run())
            if any(rollout.status == "aborted" for rollout in rollouts):
                engine.drop_requests()
            return rollouts
        except RuntimeError:
            engine.check_alive()
            raise

    def close(self) -> None:
        """End the tools' processes; safe to call twice."""
        tools, self._tools = self._tools, None
        if tools is not None:
            self._runner.run(tools.aclose())
        self._runner.close()
