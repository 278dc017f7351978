"""Talk to a policy in the terminal, with its tools, by the code of the rollout loop.

    .venv/bin/python -m megarl.chat TARGET [--tools module:name ...] [--environment module:Class [--row JSON]]
                                    [--system TEXT] [section.key=value ...]

TARGET is a Hugging Face folder (or the Hub's name of one in this machine's cache), a checkpoint, or a run folder, which
stands for its newest checkpoint; of a run its tools and sampling hold, too. rollout.temperature=0 is greedy.

/reset begins a new conversation, /quit or ctrl-D ends it, and ctrl-C stops the answer. Nothing that the policy writes
steers the terminal. Of the run's environment nobody asks for a reward.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

from megarl.chat_format.chat_template import Chat
from megarl.config import Config, ConfigError
from megarl.config.command_line import Parser, ends_in_a_line, path_text
from megarl.engine.generation import Generation, Policy, Streams
from megarl.engine.tool_calls import Parse, parser, rehearse
from megarl.environments.process_sessions import Session, Sessions
from megarl.environments.protocol import SessionLost, ToolResult
from megarl.processes.process_limits import Limits
from megarl.processes.temp_folders import Scratch
from megarl.rollout.conversation import Surroundings, run_conversation, sample_seed, sampling_params
from megarl.rollout.partial_rollouts import Partial
from megarl.types import Ids, Message, Prompt, Verdict, ids_of

if TYPE_CHECKING:
    from megarl.engine.sglang_engine import Engine

MARK = "> "


def row(text: str) -> dict[str, Any]:
    """The type of `--row`: `{"ground_truth": 17}`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object of columns, not {text[:40]!r}")
    return found


def parse(arguments: Sequence[str] | None) -> Namespace:
    parser = Parser(__doc__, prog="python -m megarl.chat")
    parser.add_argument(
        "target", type=path_text, metavar="TARGET", help="an HF folder or name, a checkpoint or a run folder"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--tools", action="append", metavar="module:name", help="a tool; may be said again")
    group.add_argument("--environment", metavar="module:Class")
    parser.add_argument("--row", type=row, default={}, metavar="JSON", help="columns that its `reset` is given")
    parser.add_argument("--system", default="", metavar="TEXT", help="a system message before all others")
    return parser.parse_intermixed_args(arguments)


class Terminal:
    """Shows a conversation on stdout."""

    def heard(self, text: str) -> None:
        sys.stdout.write(printable(text))
        sys.stdout.flush()

    def turned(self) -> None:
        print(flush=True)

    def answered(self, name: str, result: ToolResult) -> None:
        print(f"  [{printable(name)}] {printable(result.text)}", flush=True)


def talk(options: Namespace) -> int:
    from megarl import model_sources

    target = model_sources.find(options.target)
    with Scratch("megarl-chat-") as place:
        data = Path(place, "row.jsonl")
        data.write_text(json.dumps({"prompt": "x"}))
        own: dict[str, dict[str, Any]] = {
            "run": {"dir": place, "num_rollout": 1},
            "data": {"train": [str(data)], "prompts_per_step": 1, "prompt_key": "prompt", "label_key": ""},
            "rollout": {"samples_per_prompt": 1},
            "options": {"scored": False},
        }
        if options.tools:
            own["rollout"] |= {"tools": options.tools, "environments": []}
        if options.environment:
            own["rollout"] |= {"environments": [options.environment], "tools": []}
        file = Path(place, "chat.yaml")
        taken = {**model_sources.TAKEN, "run.dir": "nothing is kept", "data": "you write the prompts"}
        model_sources.configured(target, own, options.overrides, file, taken)
        ready = target.ready(Path(place, "model"))
        return converse(model_sources.configured(ready, own, options.overrides, file, taken), options)


def converse(config: Config, options: Namespace) -> int:
    """Start an engine, and answer line by line."""
    from megarl.dry_run.plan import validate
    from megarl.engine.sglang_engine import Engine
    from megarl.environments.catalog import known_of

    if config.parallel.world_size > config.rollout.tp:
        raise ConfigError(f"parallel.world_size={config.parallel.world_size}: one engine is enough; leave it out")
    validate(config).raise_errors()
    known = known_of(config.rollout)
    if agents := [name for name, one in known.environments.items() if one.kind == "agent"]:
        raise ConfigError(f"{agents[0]} is an agent, which talks to the policy by itself; name an environment or tools")
    chat = Chat.load(config.model.path, known.tools, known.environments)
    chat.check_tools()
    engine = Engine(config)
    terminal = Terminal()
    print(f"starting {config.model.path} ...", flush=True)
    try:
        engine.start()
        engine.wait_ready()
        if chat.tools:
            parser, marker = engine.tool_call_parser, engine.tool_call_marker
            of_family = not config.rollout.tool_call_parser
            limit = config.rollout.request_timeout
            if complaint := rehearse(chat, engine.url, engine.api_key, parser, marker, limit, of_family):
                raise ConfigError(complaint)
        print(f"with {known_here(chat)}; /reset begins anew, /quit ends", flush=True)
        with asyncio.Runner() as runner:
            conversation = runner.run(_begin(config, chat, terminal, options))
            try:
                lines(runner, conversation, engine, config)
            finally:
                runner.run(conversation.close())
    except RuntimeError as error:
        raise ConfigError(str(error)) from None
    finally:
        engine.shutdown()
    return 0


async def _begin(config: Config, chat: Chat, terminal: Terminal, options: Namespace) -> Talk:
    return Talk(config, chat, terminal, options.row, options.system)


def lines(runner: asyncio.Runner, talk: Talk, engine: Engine, config: Config) -> None:
    """Until /quit or the end of stdin."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  what was typed can be edited, and is there again
    while True:
        try:
            line = input(MARK).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n/quit or ctrl-D ends")
            continue
        if line == "/quit":
            return
        if line == "/reset":
            runner.run(talk.reset())
            print("a new conversation")
        elif line.startswith("/"):
            print(f"there is no {line.split()[0][:40]!r}; there are /reset and /quit")
        elif line:
            try:
                ended = runner.run(_answer(talk, engine, config, line))
            except KeyboardInterrupt:
                engine.drop_requests()
                ended = "stopped; the line is forgotten"
            if ended:
                print(f"({ended})", flush=True)


async def _answer(talk: Talk, engine: Engine, config: Config, line: str) -> str:
    from megarl.engine.client import Client

    async with Client(engine.url, engine.api_key, config.rollout.request_timeout, None, engine.version) as client:
        return await talk.say(line, client, parser(client, engine.tool_call_parser, engine.tool_call_marker))


def main(arguments: Sequence[str] | None = None) -> int:
    return ends_in_a_line(lambda: talk(parse(arguments)))


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


if __name__ == "__main__":
    sys.exit(main())
