"""Conversations with a policy in the terminal, for `megarl chat`: turns run through the same code as rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import Config, ConfigError
from megarl.engine.engine_protocol import NOT_RECORDED, Engine, Generation, Policy, RecordedPrefix, TokenCallback
from megarl.engine.tool_calls import ParseFunction, check_parser, make_parser
from megarl.environments.process_sessions import EnvironmentPool, EnvironmentSession
from megarl.environments.protocol import SessionLost, ToolResult
from megarl.processes.children import ProcessLimits
from megarl.processes.temp_folders import TempFolder
from megarl.rollout.conversation import RolloutContext, build_sampling_params, derive_seed, run_conversation
from megarl.rollout.partial_rollouts import PartialRollout
from megarl.types import Ids, Message, Prompt, RewardResult, as_token_ids

INPUT_MARK = "> "


class Terminal:
    """Prints a conversation to stdout."""

    def on_text(self, text: str) -> None:
        sys.stdout.write(printable(text))
        sys.stdout.flush()

    def on_turn_end(self) -> None:
        print(flush=True)

    def on_tool_result(self, name: str, result: ToolResult) -> None:
        print(f"  [{printable(name)}] {printable(result.text)}", flush=True)


def run_chat(options: Namespace) -> int:
    from megarl import model_sources

    target = model_sources.resolve_target(options.target)
    with TempFolder("megarl-chat-") as folder:
        data = Path(folder, "row.jsonl")
        data.write_text(json.dumps({"prompt": "x"}))
        settings: dict[str, dict[str, Any]] = {
            "run": {"dir": folder, "num_rollout": 1},
            "data": {"train": [str(data)], "prompts_per_step": 1, "prompt_key": "prompt", "label_key": ""},
            "rollout": {"samples_per_prompt": 1},
            "options": {"scored": False},
        }
        if options.tools:
            settings["rollout"] |= {"tools": options.tools, "environments": []}
        if options.environment:
            settings["rollout"] |= {"environments": [options.environment], "tools": []}
        file = Path(folder, "chat.yaml")
        reserved = {"run.dir": "nothing is saved", "data": "you write the prompts"}
        model_sources.build_config(target, settings, options.overrides, file, reserved)
        ready = target.prepare(Path(folder, "model"))
        return converse(model_sources.build_config(ready, settings, options.overrides, file, reserved), options)


def converse(config: Config, options: Namespace) -> int:
    """Start an engine and answer line by line."""
    from megarl.dry_run.validation import validate
    from megarl.engine.engine_backends import engine_backend
    from megarl.environments.catalog import load_catalog

    if config.parallel.auto:  # the size of the one engine
        config = validate(config).resolve(config)
        size = config.rollout.tp
        config = replace(config, parallel=replace(config.parallel, world_size=size, ranks_per_node=size))
    if config.parallel.world_size > config.rollout.tp:
        raise ConfigError(f"parallel.world_size={config.parallel.world_size}: one engine is enough; remove it")
    validate(config).raise_errors()
    catalog = load_catalog(config.rollout)
    if agents := [name for name, entry in catalog.environments.items() if entry.kind == "agent"]:
        raise ConfigError(f"{agents[0]} is an agent, which talks to the policy by itself; name an environment or tools")
    chat = ChatTemplate.load(config.model.path, catalog.tools, catalog.environments)
    chat.check_tools()
    engine = engine_backend(config).make_engine(config)
    print(f"starting {config.model.path} ...", flush=True)
    try:
        engine.start()
        engine.wait_ready()
        parser, marker = engine.tool_call_parser, engine.tool_call_marker
        if chat.tools:
            limit, of_family = config.rollout.request_timeout, not config.rollout.tool_call_parser
            if complaint := check_parser(chat, engine.connect(limit), parser, marker, of_family):
                raise ConfigError(complaint)
        print(f"with {describe_tools(chat)}; /reset starts over, /quit exits", flush=True)
        with asyncio.Runner() as runner:

            async def open_conversation() -> ChatConversation:
                return ChatConversation(config, chat, Terminal(), options.row, options.system)

            conversation = runner.run(open_conversation())
            try:
                read_lines(runner, conversation, engine, config)
            finally:
                runner.run(conversation.close())
    except RuntimeError as error:
        raise ConfigError(str(error)) from None
    finally:
        engine.shutdown()
    return 0


def read_lines(runner: asyncio.Runner, conversation: ChatConversation, engine: Engine, config: Config) -> None:
    """Read lines until /quit or the end of stdin."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  line editing and history
    while True:
        try:
            line = input(INPUT_MARK).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n/quit or ctrl-D exits")
            continue
        if line == "/quit":
            return
        if line == "/reset":
            runner.run(conversation.reset())
            print("a new conversation")
        elif line.startswith("/"):
            print(f"there is no {line.split()[0][:40]!r}; commands are /reset and /quit")
        elif line:
            try:
                reason = runner.run(_answer_line(conversation, engine, config, line))
            except KeyboardInterrupt:
                engine.abort_requests()
                reason = "stopped; the message is discarded"
            if reason:
                print(f"({reason})", flush=True)


async def _answer_line(conversation: ChatConversation, engine: Engine, config: Config, line: str) -> str:
    async with engine.connect(config.rollout.request_timeout) as client:
        parse = make_parser(client, engine.tool_call_parser, engine.tool_call_marker)
        return await conversation.send(line, client, parse)


def printable(text: str) -> str:
    """Escape characters that would control the terminal; a model may emit any byte."""
    return "".join(char if char.isprintable() or char == "\n" else f"\\x{ord(char):02x}" for char in text)


class ChatConversation:
    """One conversation, on one event loop. `close` releases the sessions of its tools and environment.

    row: argument of the environment's `reset`, in the form of a data row. system: system message, if any.
    """

    def __init__(
        self,
        config: Config,
        chat: ChatTemplate,
        listener: Terminal,
        row: Mapping[str, Any] = MappingProxyType({}),
        system: str = "",
    ) -> None:
        rollout = config.rollout
        self._config, self._chat, self._listener = config, chat, listener
        limits = ProcessLimits(rollout.pass_env, rollout.tool_memory_mb)
        self._sessions = EnvironmentPool(chat.catalog, rollout.tool_timeout, 4, None, limits)
        self._session = _ChatSession(self._sessions, listener)
        self._lines = 0
        self._row = row
        self._system_messages: tuple[Message, ...] = ({"role": "system", "content": system},) if system else ()
        self.messages: tuple[Message, ...] = self._system_messages

    async def send(self, text: str, policy: Policy, parse: ParseFunction) -> str:
        """Run the policy's turns for one user message. Returns why it ended early, or an empty string.

        If the task is cancelled or the rollout is aborted, the conversation stays as it was before the message.
        """
        chat, rollout = self._chat, self._config.rollout
        messages: tuple[Message, ...] = (*self.messages, {"role": "user", "content": text})
        extra = dict(self._row)
        prompt = Prompt(f"line-{self._lines}", messages, ground_truth=extra.pop("ground_truth", None), extra=extra)
        try:
            prompt = replace(prompt, token_ids=as_token_ids(chat.encode_prompt(prompt)))
        except ConfigError as error:
            return str(error)
        if (length := len(prompt.token_ids)) >= rollout.max_context:
            return f"the conversation has {length} tokens, and rollout.max_context={rollout.max_context}: /reset it"
        seed = derive_seed(self._config.run.seed, self._lines, 0)
        self._lines += 1
        context = RolloutContext(chat, cast(EnvironmentPool, self._session), parse, rollout)
        streaming_policy = _StreamingPolicy(policy, chat, self._listener)
        params = build_sampling_params(rollout, chat, greedy=False, seed=seed)
        trajectory = await run_conversation(PartialRollout.begin(prompt, seed), streaming_policy, context, params)
        if trajectory.status == "aborted":
            if self._session.is_lost:
                await self.reset()
            return f"aborted: {trajectory.failure}"
        self.messages = trajectory.messages
        reasons = {"length": "truncated by a length limit", "max_turns": "stopped by rollout.max_turns"}
        return reasons.get(str(trajectory.status), "")

    async def reset(self) -> None:
        """Start a new conversation."""
        self.messages = self._system_messages
        self._session.end()
        self._session = _ChatSession(self._sessions, self._listener)

    async def close(self) -> None:
        self._session.end()
        await self._sessions.aclose()


class _StreamingPolicy:
    """Policy wrapper that streams its output to a listener."""

    def __init__(self, policy: Policy, chat: ChatTemplate, listener: Terminal) -> None:
        self._policy, self._chat, self._listener = policy, chat, listener
        self.stop = policy.stop

    async def generate(
        self,
        ids: Ids | Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix = NOT_RECORDED,
        on_tokens: TokenCallback | None = None,
        **images: Any,
    ) -> Generation:
        detokenizer = IncrementalDetokenizer(self._chat, self._listener.on_text)
        try:
            return await self._policy.generate(ids, params, recorded, detokenizer.add, **images)
        finally:
            detokenizer.end()
            self._listener.on_turn_end()


class IncrementalDetokenizer:
    """Decode tokens to text incrementally. Holds back incomplete UTF-8 sequences; drops end-of-turn tokens."""

    def __init__(self, chat: ChatTemplate, on_text: Callable[[str], None]) -> None:
        self._chat, self._on_text = chat, on_text
        self._ids: list[int] = []
        self._num_emitted = 0

    def add(self, ids: Ids, is_final: bool = False) -> None:
        self._ids += [token for token in ids.tolist() if token not in self._chat.end_token_ids]
        text = self._chat.decode(self._ids)
        if not is_final:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # an incomplete UTF-8 sequence
        if len(text) > self._num_emitted:
            self._on_text(text[self._num_emitted :])
            self._num_emitted = len(text)

    def end(self) -> None:
        self.add(as_token_ids(()), is_final=True)


class _ChatSession:
    """The environment session of a chat, which persists across lines: to each line's rollout both pool and session."""

    def __init__(self, pool: EnvironmentPool, listener: Terminal) -> None:
        self._pool, self._listener = pool, listener
        self._session: EnvironmentSession | None = None
        self.is_lost = False

    async def open_session(self, prompt: Prompt) -> _ChatSession:
        self.messages = prompt.messages
        if self._session is None:
            self._session = await self._pool.open_session(prompt)
            self.messages = self._session.messages
        self.schemas = self._session.schemas
        return self

    async def call(self, name: str, arguments: Any) -> ToolResult:
        assert self._session is not None
        try:
            result = await self._session.call(name, arguments)
        except SessionLost:
            self.is_lost = True
            raise
        self._listener.on_tool_result(name, result)
        return result

    async def reward(self, answer: str, messages: Sequence[Message], turns: Sequence[str]) -> RewardResult | None:
        return None

    def close(self) -> None:
        """Do nothing: the session continues with the next line."""

    def end(self) -> None:
        if self._session is not None:
            self._session.close()


def describe_tools(chat: ChatTemplate) -> str:
    """Describe the environment and the tools in words."""
    environments = [f"the environment {name}" for name in chat.catalog.environments]
    return ", ".join([*environments, *chat.tools]) or "no tools"
