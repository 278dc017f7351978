"""The rollout loop: the policy writes, tools answer, until the policy is done. Token ids in, token ids out."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from megarl.chat_format.chat_messages import format_call_id
from megarl.chat_format.chat_template import ChatTemplate
from megarl.chat_format.observations import count_reserved_tokens, truncate_observations
from megarl.config import ConfigError, RolloutConfig
from megarl.engine.generation import Policy, RequestFailed
from megarl.engine.tool_calls import ParsedResponse, ParseFunction
from megarl.environments.process_sessions import EnvironmentPool, EnvironmentSession
from megarl.environments.protocol import SessionLost
from megarl.rollout.partial_rollouts import PartialRollout, merge_turns
from megarl.types import Message, RewardResult, Rollout, Status, Turn, as_token_ids

if TYPE_CHECKING:
    from megarl.rollout.session_server import SessionServer

T = TypeVar("T")


async def reject_agents() -> SessionServer:
    raise RuntimeError("there are no agents here")


@dataclass(frozen=True)
class RolloutContext:
    """What a conversation needs besides the policy.

    halt: set where all are to stop as they are, and go on in a later step. Whoever sets it sees to it that the policy
    answers what it was asked. ended: is told of each conversation that has ended, but for aborted ones; of no group.
    agents: the server that agents ask, which listens then.
    """

    chat: ChatTemplate
    environments: EnvironmentPool
    parse_tool_calls: ParseFunction
    config: RolloutConfig
    halt: asyncio.Event = field(default_factory=asyncio.Event)
    on_rollout_finished: Callable[[Rollout], None] = lambda rollout: None
    get_session_server: Callable[[], Awaitable[SessionServer]] = reject_agents


class Halted(Exception):
    """The conversation is to stop here."""


async def run_conversation(
    begun: PartialRollout,
    policy: Policy,
    around: RolloutContext,
    params: dict[str, Any],
    deadline: float | None = None,
) -> PartialRollout:
    """Carry a conversation on, to its end or until `around.halt`; then its status is None, and it can be carried on.

    params: SGLang's sampling parameters but for max_new_tokens, which follows from the budget. The whole conversation
    stays within `max_context` tokens, the policy within `max_turns` turns, and each of these within `max_new_tokens`,
    however often it was stopped; results of tools are cut to `max_observation` tokens each, and together to what room
    there is. Status: `stop` when the policy ended a turn without a call, or with an end token that leaves no room for
    an answer; `length` when a turn or the context was full; `max_turns`; `aborted` when the engine cut it off, a
    request of it failed, or it was not done by `deadline`, in the event loop's time: then `failure` says which, and the
    turns are those it had. So it is when its environment can go on no more.

    One that is stopped keeps every token that the policy has chosen, and its session: of a turn whose tools were at
    work no call is made a second time. One with an environment that has none, out of a checkpoint, is begun anew.
    """
    talk = _Conversation(begun, policy, around, params)
    failure = ""
    try:
        async with asyncio.timeout_at(deadline):
            status = await talk.run()
            now = replace(talk.state, status=status)
            if status != "aborted":
                now = replace(now, env_reward=await talk.get_reward())
        return talk.close(now)
    except Halted:
        return talk.state
    except TimeoutError:
        failure = "it was not done within rollout.step_timeout"
    except (RequestFailed, SessionLost) as error:
        failure = str(error)
    except BaseException:
        talk.close(talk.state)
        raise
    return talk.close(replace(talk.state, status="aborted", failure=failure))


class _Conversation:
    """`now`: the conversation as far as it has come, which is what is kept of it where it is cut off."""

    def __init__(self, begun: PartialRollout, policy: Policy, around: RolloutContext, params: dict[str, Any]) -> None:
        self.state = begun
        self._policy, self._context, self._params = policy, around, params

    @property
    def _session(self) -> EnvironmentSession:
        assert self.state.session is not None
        return self.state.session

    async def run(self) -> Status:
        if self.state.session is None:
            await self._open_session()
        while True:
            status = None if self.state.is_turn_complete else await self._generate_turn()
            status = status or await self._run_tools()
            if status is not None:
                return status

    async def _open_session(self) -> None:
        """Have a session. The prompt is rendered again where it is another one then, or its tools are."""
        chat, config = self._context.chat, self._context.config
        now = self.state if chat.catalog.find_environment(self.state.prompt) is None else self.state.restart()
        task = now.prompt
        session = await self._run_unless_halted(self._context.environments.open_session(task))
        self.state = replace(now, session=session)
        if session.messages == task.messages and session.schemas == chat.select_schemas(task):
            return
        prompt = replace(task, messages=session.messages)
        try:
            prompt = replace(prompt, token_ids=as_token_ids(chat.encode_prompt(prompt, session.schemas)))
        except ConfigError as error:
            raise SessionLost(str(error)) from None
        if (length := len(prompt.token_ids)) >= config.max_context:
            raise SessionLost(
                f"the prompt has {length} tokens after reset, which leaves no room in "
                f"rollout.max_context={config.max_context}"
            )
        self.state = replace(PartialRollout.begin(prompt, now.seed), original_prompt=task, session=session)

    async def get_reward(self) -> RewardResult | None:
        """What its environment says, now that it is over."""
        now = self.state
        said = [message for message in now.messages if message["role"] == "assistant"]
        answer = str(said[-1].get("content") or "") if said else ""
        turns = [self._context.chat.decode(turn.token_ids) for turn in now.turns if turn.is_action]
        return await self._session.reward(answer, now.messages, turns)

    def close(self, now: PartialRollout) -> PartialRollout:
        """Without its session, which is given back."""
        if now.session is not None:
            now.session.close()
        return replace(now, session=None)

    async def _generate_turn(self) -> Status | None:
        """The policy's turn, or the rest of it. None where it ended with what may be a call.

        A token's routing is taken from the first request that ran it, which is the one that sampled what follows it.
        """
        chat, config, now = self._context.chat, self._context.config, self.state
        context = now.token_ids
        budget = min(config.max_new_tokens - now.num_turn_tokens, config.max_context - len(context))
        if budget <= 0:
            return "length"
        out = await self._policy.generate(context, {**self._params, "max_new_tokens": budget}, now.num_routed)
        turns, last = now.turns, None
        if len(out.token_ids):
            own, last = (
                Turn(out.token_ids, out.logprobs, True, out.weight_version, out.versions, cached_tokens=out.cached),
                int(out.token_ids[-1]),
            )
            turns = (*turns[:-1], merge_turns(turns[-1], own)) if now.num_turn_tokens else (*turns, own)
        now = self.state = replace(
            now,
            turns=turns,
            num_turn_tokens=now.num_turn_tokens + len(out.token_ids),
            drafted=now.drafted + out.drafted,
            accepted=now.accepted + out.accepted,
            routing=now.routing if out.routing is None else (*now.routing, out.routing),
            sampling_masks=now.extend_masks(out.sampling_mask, len(out.token_ids)),
        )
        over = (
            last in chat.end_token_ids or len(out.token_ids) == budget
        )  # though it may have been cut off at that moment
        if out.finish_reason == "abort" and not over and self._context.halt.is_set():
            raise Halted
        self.state = replace(now, is_turn_complete=True, num_turns=now.num_turns + 1)
        if last is not None and last == chat.end_of_call:
            return None
        self._append_messages({"role": "assistant", "content": self._decode_turn()})
        if out.finish_reason == "abort" and not over:
            self.state = replace(self.state, failure=out.abort_reason)
            return "aborted"
        return "stop" if last in chat.end_token_ids or out.finish_reason == "stop" else "length"

    def _decode_turn(self) -> str:
        """The policy's last turn in words, without what ends it."""
        chat, tokens = (
            self._context.chat,
            self.state.turns[-1].token_ids if self.state.num_turn_tokens else as_token_ids(()),
        )
        return chat.decode(tokens[:-1] if len(tokens) and int(tokens[-1]) in chat.end_token_ids else tokens)

    def _append_messages(self, *messages: Message) -> None:
        self.state = replace(self.state, messages=(*self.state.messages, *messages))

    async def _run_tools(self) -> Status | None:
        """What the tools say to the policy's turn; None where it is the policy's turn again."""
        around, now, schemas = self._context, self.state, self._session.schemas
        chat, config = around.chat, around.config
        turn = self._decode_turn()
        after = str(now.messages[-1]["role"]) if now.messages else "user"
        begins = chat.find_content_start(turn, after)  # calls in its reasoning are none
        reply = await self._run_unless_halted(around.parse_tool_calls(turn[begins:], schemas))
        reply = replace(reply, text=turn[:begins] + reply.text)
        allowed = {schema["function"]["name"] for schema in schemas}
        names = [call.name if call.name in allowed else "error" for call in reply.calls]
        ids = [format_call_id(name, number) for number, name in enumerate([*names, "error"], now.tool_calls)]
        said = _make_assistant_message(reply, ids)
        if not reply.calls and not reply.error:
            self._append_messages(said)
            return "stop"
        if now.num_turns == config.max_turns:
            self._append_messages(said)
            return "max_turns"
        numbers = range(now.tool_calls, now.tool_calls + len(reply.calls))
        results = await self._run_unless_halted(
            asyncio.gather(
                *(
                    self._session.call(number, call.name, call.arguments)
                    for number, call in zip(numbers, reply.calls, strict=True)
                )
            )
        )
        texts = [*(result.text for result in results), *([f"Error: {reply.error}"] if reply.error else ())]
        answers: list[Message] = [  # what the policy calls a tool that does not exist reaches no template
            {"role": "tool", "name": name, "tool_call_id": own, "content": text}
            for name, own, text in zip([*names, "error"], ids, texts, strict=False)
        ]
        room = config.max_context - now.num_tokens - 1
        found = truncate_observations(
            chat, answers, schemas, config.max_observation, room, count_reserved_tokens(config)
        )
        failed = sum(not result.ok for result in results) + bool(reply.error)
        now = replace(now, tool_calls=now.tool_calls + len(results), tool_errors=now.tool_errors + failed)
        self.state = now
        self._append_messages(said)
        if found is None:
            return "length"
        shown, ids_shown = found
        self._append_messages(*shown)
        self.state = replace(
            self.state, turns=(*now.turns, Turn(as_token_ids(ids_shown))), num_turn_tokens=0, is_turn_complete=False
        )
        return None

    async def _run_unless_halted(self, work: Awaitable[T]) -> T:
        """What comes of the work, which is cancelled where all are to stop."""
        working = asyncio.ensure_future(work)
        halted = asyncio.ensure_future(self._context.halt.wait())
        try:
            await asyncio.wait({working, halted}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Halted
            return working.result()
        finally:
            halted.cancel()
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)


def _make_assistant_message(reply: ParsedResponse, ids: Sequence[str]) -> Message:
    message: Message = {"role": "assistant", "content": reply.text}
    if reply.calls:
        message["tool_calls"] = [
            {"id": own, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call, own in zip(reply.calls, ids, strict=False)
        ]
    return message


def build_sampling_params(config: RolloutConfig, chat: ChatTemplate, greedy: bool, seed: int) -> dict[str, Any]:
    """SGLang's sampling parameters of one conversation, without max_new_tokens."""
    params: dict[str, Any] = {"stop_token_ids": sorted(chat.end_token_ids), "skip_special_tokens": False}
    if greedy or config.temperature == 0:
        return {**params, "temperature": 0.0}
    cut = {name: getattr(config, name) for name in ("top_p", "top_k", "min_p")}
    return {**params, "temperature": config.temperature, **cut, "sampling_seed": seed}


def derive_seed(seed: int, group: int, sample: int) -> int:
    """Seed of one conversation, 32 bits; depends on nothing but its three numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{group}/{sample}".encode()).digest()[:4], "big")
