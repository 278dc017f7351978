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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.command_line import Parser, ends_in_a_line, path_text
from megarl.config import Config, ConfigError
from megarl.processes.scratch import Scratch

if TYPE_CHECKING:
    from megarl.environments.protocol import ToolResult
    from megarl.rollout.chat import Chat
    from megarl.rollout.engine import Engine
    from megarl.talking import Talk

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
        from megarl.talking import printable

        sys.stdout.write(printable(text))
        sys.stdout.flush()

    def turned(self) -> None:
        print(flush=True)

    def answered(self, name: str, result: ToolResult) -> None:
        from megarl.talking import printable

        print(f"  [{printable(name)}] {printable(result.text)}", flush=True)


def talk(options: Namespace) -> int:
    from megarl import targets

    target = targets.find(options.target)
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
        taken = {**targets.TAKEN, "run.dir": "nothing is kept", "data": "you write the prompts"}
        targets.configured(target, own, options.overrides, file, taken)
        ready = target.ready(Path(place, "model"))
        return converse(targets.configured(ready, own, options.overrides, file, taken), options)


def converse(config: Config, options: Namespace) -> int:
    """Start an engine, and answer line by line."""
    from megarl.checking.dry_run import validate
    from megarl.environments.describing import known_of
    from megarl.rollout.chat import Chat
    from megarl.rollout.engine import Engine
    from megarl.rollout.tool_calls import rehearse
    from megarl.talking import known_here

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
    from megarl.talking import Talk

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
    from megarl.rollout.client import Client
    from megarl.rollout.tool_calls import parser

    async with Client(engine.url, engine.api_key, config.rollout.request_timeout, None, engine.version) as client:
        return await talk.say(line, client, parser(client, engine.tool_call_parser, engine.tool_call_marker))


def main(arguments: Sequence[str] | None = None) -> int:
    return ends_in_a_line(lambda: talk(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
