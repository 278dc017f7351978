"""A conversation with a person, by the code of the rollout loop: the same template, parser of calls, tools and limits.

Each line of the person begins the loop anew with all messages so far, as a chat server is asked. Tools and environment
are those of one conversation all along: an environment's `reset` is at its first line, and its `reward` never called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol, cast

from megarl.config import Config, ConfigError
from megarl.environments.protocol import SessionLost, ToolResult
from megarl.environments.sessions import Session, Sessions
from megarl.processes.limits import Limits
from megarl.rollout.chat import Chat
from megarl.rollout.multi_turn import Surroundings, run_conversation, sample_seed, sampling_params
from megarl.rollout.partial import Partial
from megarl.rollout.policy import Generation, Policy, Streams
from megarl.rollout.tool_calls import Parse
from megarl.types import Ids, Message, Prompt, Verdict, ids_of

_CALLS_OF_A_LINE = 1 << 20
"""By which the numbers of calls go up from one line to the next: calls of equal numbers are made once."""


class Listener(Protocol):
    """Who shows the conversation."""

    def heard(self, text: str) -> None:
        """The policy's next words."""

    def turned(self) -> None:
        """Its turn is over."""

    def answered(self, name: str, result: ToolResult) -> None:
        """A tool's answer."""


def printable(text: str) -> str:
    """Without characters that would steer the terminal; a model may write any byte."""
    return "".join(char if char.isprintable() or char == "\n" else f"\\x{ord(char):02x}" for char in text)


class Talk:
    """One conversation. For one event loop; `close` gives back what tools and environment have.

    row: what the environment's `reset` is given, as of a row of data. system: a message before all others, if any.
    """

    def __init__(
        self,
        config: Config,
        chat: Chat,
        listener: Listener,
        row: Mapping[str, Any] = MappingProxyType({}),
        system: str = "",
    ) -> None:
        rollout = config.rollout
        self._config, self._chat, self._listener = config, chat, listener
        limits = Limits(rollout.pass_env, rollout.tool_memory_mb)
        self._sessions = Sessions(chat.known, rollout.tool_timeout, 4, None, limits)
        self._lasting = _Lasting(self._sessions, listener)
        self._lines = 0
        self._row = dict(row)
        self._first: tuple[Message, ...] = ({"role": "system", "content": system},) if system else ()
        self.messages: tuple[Message, ...] = self._first

    async def say(self, text: str, policy: Policy, parse: Parse) -> str:
        """Have the policy answer a line, turn by turn. What ended it, in words, where it did not end by itself.

        Where it is cut off by cancelling, or aborted, the line is as if it had never been said.
        """
        chat, rollout = self._chat, self._config.rollout
        messages: tuple[Message, ...] = (*self.messages, {"role": "user", "content": text})
        extra = {name: value for name, value in self._row.items() if name != "ground_truth"}
        truth = self._row.get("ground_truth")
        prompt = Prompt(f"line-{self._lines}", messages, ground_truth=truth, extra=extra)
        try:
            prompt = replace(prompt, token_ids=ids_of(chat.render(prompt)))
        except ConfigError as error:
            return str(error)
        if (length := len(prompt.token_ids)) >= rollout.max_context:
            return f"the conversation has {length} tokens, and rollout.max_context={rollout.max_context}: /reset it"
        seed = sample_seed(self._config.run.seed, self._lines, 0)
        self._lines += 1
        around = Surroundings(chat, cast(Sessions, self._lasting), parse, rollout)
        shown = _Shown(policy, chat, self._listener)
        params = sampling_params(rollout, chat, greedy=False, seed=seed)
        ended = await run_conversation(Partial.begin(prompt, seed), shown, around, params)
        if ended.status == "aborted":
            if self._lasting.is_lost:
                await self.reset()
            return f"aborted: {ended.failure}"
        self.messages = ended.messages
        cut = {"length": "cut off by a length", "max_turns": "cut off by rollout.max_turns"}
        return cut.get(str(ended.status), "")

    async def reset(self) -> None:
        """Begin a new conversation."""
        self.messages = self._first
        self._lasting.close()
        self._lasting = _Lasting(self._sessions, self._listener)

    async def close(self) -> None:
        self._lasting.close()
        await self._sessions.aclose()


class _Shown:
    """A policy that is listened to while it writes."""

    def __init__(self, policy: Policy, chat: Chat, listener: Listener) -> None:
        self._policy, self._chat, self._listener = policy, chat, listener

    async def generate(self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int = 0) -> Generation:
        words = Words(self._chat, self._listener.heard)
        try:
            if isinstance(self._policy, Streams):
                return await self._policy.stream(ids, params, routed, words.add)
            said = await self._policy.generate(ids, params, routed)
            words.add(ids_of(said.token_ids))
            return said
        finally:
            words.end()
            self._listener.turned()

    async def stop(self) -> None:
        await self._policy.stop()


class Words:
    """Tokens that come a few at a time, as text: none of it is said before its last byte is there, and what ends a turn
    never is."""

    def __init__(self, chat: Chat, heard: Callable[[str], None]) -> None:
        self._chat, self._heard = chat, heard
        self._ids: list[int] = []
        self._said = 0

    def add(self, ids: Ids) -> None:
        self._ids += [token for token in ids.tolist() if token not in self._chat.ends]
        self._tell(whole=False)

    def end(self) -> None:
        self._tell(whole=True)

    def _tell(self, whole: bool) -> None:
        text = self._chat.text(self._ids)
        if not whole:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # the bytes of a letter whose others are to come
        if len(text) > self._said:
            self._heard(text[self._said :])
            self._said = len(text)


class _Lasting:
    """Sessions of which there is one, from line to line. It is begun when the first line needs it."""

    def __init__(self, sessions: Sessions, listener: Listener) -> None:
        self._sessions, self._listener = sessions, listener
        self._session: Session | None = None
        self._lines = 0
        self.is_lost = False

    async def begin(self, prompt: Prompt) -> _Line:
        self._lines += 1
        first = self._session is None
        if self._session is None:
            self._session = await self._sessions.begin(prompt)
        messages = self._session.messages if first else prompt.messages
        return _Line(self, self._session, messages, self._lines * _CALLS_OF_A_LINE, self._listener)

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.end()


class _Line:
    """The session as one line's conversation has it."""

    def __init__(
        self, of: _Lasting, session: Session, messages: tuple[Message, ...], first: int, listener: Listener
    ) -> None:
        self._of, self._session, self._first, self._listener = of, session, first, listener
        self.messages, self.schemas = messages, session.schemas

    async def call(self, number: int, name: str, arguments: Any) -> ToolResult:
        try:
            result = await self._session.call(self._first + number, name, arguments)
        except SessionLost:
            self._of.is_lost = True
            raise
        self._listener.answered(name, result)
        return result

    async def reward(self, answer: str, messages: Sequence[Message], turns: Sequence[str]) -> Verdict | None:
        return None

    def end(self) -> None:
        """It goes on at the next line."""


def known_here(chat: Chat) -> str:
    """The environment and the tools, in words."""
    environments = [f"the environment {name}" for name in chat.known.environments]
    return ", ".join([*environments, *chat.tools]) or "no tools"
