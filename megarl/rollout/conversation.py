"""The rollout loop: alternate policy turns and tool calls until the policy is done. Token ids in, token ids out."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megarl.chat_format.chat_messages import format_call, format_call_id
from megarl.chat_format.chat_template import ChatTemplate
from megarl.chat_format.observations import count_reserved_tokens, truncate_observations
from megarl.config import ConfigError, RolloutConfig
from megarl.engine.engine_protocol import Generation, Policy, RequestFailed
from megarl.engine.tool_calls import ParseFunction
from megarl.environments.process_sessions import EnvironmentPool, EnvironmentSession
from megarl.environments.protocol import SessionLost, ToolResult
from megarl.rollout.partial_rollouts import PartialRollout, merge_turns
from megarl.types import (
    IMAGE_PLACEHOLDER,
    Image,
    Message,
    Prompt,
    RewardResult,
    Rollout,
    Status,
    Turn,
    as_token_ids,
    sequence_images,
)

if TYPE_CHECKING:
    from megarl.rollout.session_server import SessionServer

TIMEOUT_REASON = "it did not finish within rollout.step_timeout"


class Deadline:
    """A time limit that stands still while the policy is asleep. when: event-loop time; None for no limit."""

    def __init__(self, when: float | None = None) -> None:
        self._when, self._suspended_at = when, float("inf")
        self._running: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Raise TimeoutError in the body at the deadline."""
        async with asyncio.timeout_at(self._next) as timeout:
            self._running.add(timeout)
            try:
                yield
            finally:
                self._running.discard(timeout)

    @property
    def is_over(self) -> bool:
        return self._next is not None and asyncio.get_running_loop().time() >= self._next

    def suspend(self) -> None:
        """Stop the clock until `resume`."""
        self._suspended_at = asyncio.get_running_loop().time()
        self._reschedule()

    def resume(self) -> None:
        if self._when is not None and self._is_suspended:
            self._when += asyncio.get_running_loop().time() - self._suspended_at
        self._suspended_at = float("inf")
        self._reschedule()

    @property
    def _is_suspended(self) -> bool:
        return self._suspended_at < float("inf")

    @property
    def _next(self) -> float | None:
        return None if self._is_suspended else self._when

    def _reschedule(self) -> None:
        for timeout in self._running:
            if not timeout.expired():
                timeout.reschedule(self._next)


@dataclass(frozen=True)
class RolloutContext:
    """Everything a conversation needs besides the policy.

    Attributes:
        on_rollout_finished: called with each finished conversation, except aborted ones; its group number is not set
        get_session_server: returns the server that agents query, started on first use; None without agents
    """

    chat: ChatTemplate
    environments: EnvironmentPool
    parse_tool_calls: ParseFunction
    config: RolloutConfig
    on_rollout_finished: Callable[[Rollout], None] = lambda rollout: None
    get_session_server: Callable[[], Awaitable[SessionServer]] | None = None


async def run_conversation(
    partial: PartialRollout,
    policy: Policy,
    context: RolloutContext,
    params: dict[str, Any],
    deadline: Deadline | None = None,
) -> PartialRollout:
    """Run a `Conversation` to its end."""
    return await Conversation(partial, policy, context, params).run(deadline or Deadline())


class Conversation:
    """One conversation, new or continued: from a checkpoint it may be in the middle of a turn of the policy.

    One with an environment but no session, as loaded from a checkpoint, restarts.

    The conversation stays within `max_context` tokens, the policy within `max_turns` turns, and each turn within
    `max_new_tokens`. Each tool result is truncated to `max_tool_response_tokens` tokens, and all results of a turn to
    the remaining context.

    Args:
        params: SGLang's sampling parameters without max_new_tokens, which follows from the budget

    Attributes:
        state: its progress
    """

    def __init__(
        self, partial: PartialRollout, policy: Policy, context: RolloutContext, params: dict[str, Any]
    ) -> None:
        self.state = partial
        self._policy, self._context, self._params = policy, context, params

    @property
    def oldest_version(self) -> float:
        """Oldest version of the weights that sampled a token; infinity if there is none."""
        return self.state.oldest_version

    async def run(self, deadline: Deadline) -> PartialRollout:
        """Run it to its end and return it without its session. The final status is one of:

        - `stop`: the policy ended a turn without a call, or with an end token that leaves no room for a result
        - `length`: a turn or the context was full
        - `max_turns`: the policy called a tool in its last turn
        - `aborted`: the engine aborted the request, a request failed, the environment was lost, or the conversation
          was not done by `deadline`. `failure` holds the reason, and the turns so far are kept.
        """
        try:
            async with deadline.limit():
                status = await self._converse()
                result = replace(self.state, status=status)
                if status != "aborted":
                    result = replace(result, env_reward=await self._get_reward())
            return result.close()
        except TimeoutError:
            failure = TIMEOUT_REASON
        except (RequestFailed, SessionLost) as error:
            failure = str(error)
        except BaseException:
            self.state.close()
            raise
        return replace(self.state, status="aborted", failure=failure).close()

    def with_tokens(self, generations: Sequence[Generation]) -> PartialRollout:
        """Return the state with the tokens of an unfinished request, if any, added to the policy's turn."""
        return _add_tokens(self.state, generations[0]) if generations else self.state

    @property
    def _session(self) -> EnvironmentSession:
        assert self.state.session is not None
        return self.state.session

    async def _converse(self) -> Status:
        if self.state.session is None:
            await self._open_session()
        while True:
            status = None if self.state.is_turn_complete else await self._generate_turn()
            status = status or await self._run_tools()
            if status is not None:
                return status

    async def _open_session(self) -> None:
        """Open a session, and render the prompt again if the environment changed it or its tools."""
        chat, config = self._context.chat, self._context.config
        state = self.state if chat.catalog.find_environment(self.state.prompt) is None else self.state.restart()
        task = state.prompt
        session = await self._context.environments.open_session(task)
        self.state = replace(state, session=session)
        prompt = render_after_reset(task, session, chat, config.max_context)
        if prompt is not task:
            self.state = replace(PartialRollout.begin(prompt, state.seed), original_prompt=task, session=session)

    async def _get_reward(self) -> RewardResult | None:
        """Return the environment's reward for the finished conversation."""
        state = self.state
        assistant_messages = [message for message in state.messages if message["role"] == "assistant"]
        answer = str(assistant_messages[-1].get("content") or "") if assistant_messages else ""
        turns = [self._context.chat.decode(turn.token_ids) for turn in state.turns if turn.is_action]
        return await self._session.reward(answer, state.messages, turns)

    async def _generate_turn(self) -> Status | None:
        """Generate the policy's turn, or the rest of it. Returns None if the turn may end with a call."""
        chat, config, state = self._context.chat, self._context.config, self.state
        context = state.token_ids
        budget = min(config.max_new_tokens - state.num_turn_tokens, config.max_context - len(context))
        if budget <= 0:
            return "length"
        images = sequence_images(state.turns)
        options: dict[str, Any] = {"images": images} if images else {}
        params = {**self._params, "max_new_tokens": budget}
        out = await self._policy.generate(context, params, state.recorded, **options)
        state = self.state = _add_tokens(state, out)
        last_token = int(out.token_ids[-1]) if len(out.token_ids) else None
        # complete even if it was aborted at that moment
        is_complete = last_token in chat.end_token_ids or len(out.token_ids) == budget
        self.state = replace(state, is_turn_complete=True, num_turns=state.num_turns + 1)
        if last_token is not None and last_token == chat.end_of_call:
            return None
        self._append_messages({"role": "assistant", "content": self._decode_turn()})
        if out.finish_reason == "abort" and not is_complete:
            self.state = replace(self.state, failure=out.abort_reason)
            return "aborted"
        return "stop" if last_token in chat.end_token_ids or out.finish_reason == "stop" else "length"

    def _decode_turn(self) -> str:
        """Decode the policy's last turn, without its end token."""
        chat, state = self._context.chat, self.state
        tokens = state.turns[-1].token_ids if state.num_turn_tokens else as_token_ids(())
        return chat.decode(tokens[:-1] if len(tokens) and int(tokens[-1]) in chat.end_token_ids else tokens)

    def _append_messages(self, *messages: Message) -> None:
        self.state = replace(self.state, messages=(*self.state.messages, *messages))

    async def _run_tools(self) -> Status | None:
        """Run the turn's tool calls and append their results. Returns None if the policy continues."""
        context, state, schemas = self._context, self.state, self._session.schemas
        chat, config = context.chat, context.config
        turn = self._decode_turn()
        previous_role = str(state.messages[-1]["role"]) if state.messages else "user"
        content_start = chat.find_content_start(turn, previous_role)  # ignore calls inside its reasoning
        reply = await context.parse_tool_calls(turn[content_start:], schemas)
        reply = replace(reply, text=turn[:content_start] + reply.text)
        known_names = {schema["function"]["name"] for schema in schemas}
        names = [call.name if call.name in known_names else "error" for call in reply.calls]
        call_ids = [format_call_id(name, number) for number, name in enumerate([*names, "error"], state.tool_calls)]
        assistant_message: Message = {"role": "assistant", "content": reply.text}
        if reply.calls:
            assistant_message["tool_calls"] = [
                format_call(call.name, call.arguments, call_id)
                for call, call_id in zip(reply.calls, call_ids, strict=False)
            ]
        has_call = bool(reply.calls or reply.error)
        if not has_call or state.num_turns == config.max_turns:
            self._append_messages(assistant_message)
            return "max_turns" if has_call else "stop"
        outputs = await asyncio.gather(*(self._session.call(call.name, call.arguments) for call in reply.calls))
        results = list(map(self._check_images, outputs))
        images = [Image(data) for result in results for data in result.images]
        counts = [len(result.images) for result in results]
        texts = [*(result.text for result in results), *([f"Error: {reply.error}"] if reply.error else ())]
        observations: list[Message] = [  # the template never sees the name of a tool that does not exist
            {"role": "tool", "name": name, "tool_call_id": call_id, "content": text}
            for name, call_id, text in zip([*names, "error"], call_ids, texts, strict=False)
        ]
        max_tokens = config.max_context - state.num_tokens - 1
        encode: Callable[[Sequence[Message]], list[int]] | None = None
        if images:

            def encode(messages: Sequence[Message]) -> list[int]:
                return chat.encode_continuation(_add_placeholders(messages, counts), schemas, images=images)

        limits = config.max_tool_response_tokens, max_tokens, count_reserved_tokens(config)
        truncated = truncate_observations(chat, observations, schemas, *limits, encode)
        num_failed = sum(not result.ok for result in results) + bool(reply.error)
        state = replace(state, tool_calls=state.tool_calls + len(results), tool_errors=state.tool_errors + num_failed)
        self.state = state
        self._append_messages(assistant_message)
        if truncated is None:
            return "length"
        shown_messages, observation_ids = truncated
        self._append_messages(*_add_placeholders(shown_messages, counts))
        placed = chat.place_images(observation_ids, images) if images else ()
        self.state = replace(
            self.state,
            turns=(*state.turns, Turn(as_token_ids(observation_ids), images=placed)),
            num_turn_tokens=0,
            is_turn_complete=False,
        )
        return None

    def _check_images(self, result: ToolResult) -> ToolResult:
        """Return a result whose images the model can read, or an error in its place."""
        try:
            for data in result.images:
                self._context.chat.image_format.processor.read(data)
        except (ConfigError, ValueError) as error:
            return ToolResult(f"Error: the tool returned an image that cannot be read: {error}", False)
        return result


def render_after_reset(task: Prompt, session: EnvironmentSession, chat: ChatTemplate, max_context: int) -> Prompt:
    """Render a prompt with the messages and tools of its session; return `task` itself if the session changed neither.

    task: with token ids. Raises SessionLost for messages that the template cannot render, and for a prompt without room
    for a response in `max_context` tokens.
    """
    if session.messages == task.messages and session.schemas == chat.catalog.select_schemas(task):
        return task
    try:
        prompt = chat.render_prompt(replace(task, messages=session.messages), session.schemas)
    except ConfigError as error:
        raise SessionLost(str(error)) from None
    if (length := len(prompt.token_ids)) >= max_context:
        raise SessionLost(
            f"the prompt has {length} tokens after reset, which leaves no room in rollout.max_context={max_context}"
        )
    return prompt


def _add_tokens(state: PartialRollout, out: Generation) -> PartialRollout:
    """Add the tokens of a request, with their records, to the policy's current turn."""
    turns = state.turns
    if len(out.token_ids):
        new_turn = out.to_turn()
        turns = (*turns[:-1], merge_turns(turns[-1], new_turn)) if state.num_turn_tokens else (*turns, new_turn)
    return replace(
        state.extend_record(out),
        turns=turns,
        num_turn_tokens=state.num_turn_tokens + len(out.token_ids),
        drafted=state.drafted + out.drafted,
        accepted=state.accepted + out.accepted,
        sampling_masks=state.extend_masks(out.sampling_mask, len(out.token_ids)),
    )


def _add_placeholders(messages: Sequence[Message], counts: Sequence[int]) -> list[Message]:
    """Write a placeholder for each image before the text of its tool result. counts: images of the leading results."""
    if not any(counts):
        return list(messages)
    result = []
    for number, message in enumerate(messages):
        text = str(message["content"]).replace(IMAGE_PLACEHOLDER, "<image >")  # the tool's own words
        count = counts[number] if number < len(counts) else 0
        result.append({**message, "content": IMAGE_PLACEHOLDER * count + text})
    return result


def build_sampling_params(config: RolloutConfig, chat: ChatTemplate, greedy: bool, seed: int) -> dict[str, Any]:
    """Return SGLang's sampling parameters for one conversation, without max_new_tokens."""
    params: dict[str, Any] = {"stop_token_ids": sorted(chat.end_token_ids), "skip_special_tokens": False}
    if greedy or config.temperature == 0:
        return {**params, "temperature": 0.0}
    truncation = {name: getattr(config, name) for name in ("top_p", "top_k", "min_p")}
    return {**params, "temperature": config.temperature, **truncation, "sampling_seed": seed}


def derive_seed(seed: int, group: int, sample: int) -> int:
    """Return a conversation's 32-bit seed, which depends only on these three numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{group}/{sample}".encode()).digest()[:4], "big")
