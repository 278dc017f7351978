"""Call a tool or an environment as a run does, in a process of its own, and print what the policy would see.

    megarl try-tool my_tools:calculator --arguments '{"expression": "2+3"}'
    megarl try-tool my_game:Game --row '{"ground_truth": 7}' --call guess '{"number": 5}' --call guess '{"number": 7}'

A tool: prints its schema, and for each --arguments, which may be repeated, the result or the error.

An environment: resets it with a row, a JSON object or row N of --data; makes the calls in order, each as a turn of the
policy, and ends the conversation with --answer. Prints the messages and schemas after `reset`, the results or errors,
how the conversation ended, and the reward.

Exits with 1 if a call, `reset` or `reward` fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from megarl.config import ConfigError, RolloutConfig
from megarl.config.command_line import Parser, float_in_range, int_in_range, run_cli
from megarl.config.keys import DataConfig

if TYPE_CHECKING:
    from megarl.environments.catalog import EnvironmentCatalog
    from megarl.environments.process_sessions import EnvironmentPool
    from megarl.environments.protocol import EnvironmentInfo, ToolResult
    from megarl.types import Prompt, RewardResult

PROMPT_TEXT = "try-tool"
"""Prompt of a --row without a column `prompt`."""


def parse_call(text: str) -> dict[str, Any]:
    """Parse `--arguments`: a JSON object."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object such as {{"expression": "2+3"}}, not {text[:40]!r}')
    return arguments


def parse_row(text: str) -> dict[str, Any] | int:
    """Parse `--row`: a JSON object of columns, or a row's number."""
    return parse_call(text) if text.lstrip().startswith("{") else int_in_range(0)(text)


class _AppendCall(argparse.Action):
    """Append (name, arguments) of `--call NAME JSON`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        name, text = values
        try:
            call = (name, parse_call(text))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, f"{name}: {error}") from None
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), call])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__, prog="megarl try-tool")
    parser.add_argument("spec", metavar="module:name", help="as in rollout.tools or rollout.environments")
    parser.add_argument("--arguments", type=parse_call, action="append", default=[], metavar="JSON", help="of a call")
    parser.add_argument(
        "--call", action=_AppendCall, nargs=2, default=[], metavar=("TOOL", "JSON"), help="of an environment's tool"
    )
    parser.add_argument("--row", type=parse_row, metavar="JSON|N", help="for `reset`; or its number in --data, from 0")
    parser.add_argument("--data", type=Path, metavar="FILE", help=".jsonl or .parquet, as in data.train")
    parser.add_argument("--prompt-key", default=DataConfig.prompt_key, metavar="COLUMN", help="data.prompt_key")
    parser.add_argument("--label-key", default=DataConfig.label_key, metavar="COLUMN", help="data.label_key")
    parser.add_argument("--answer", metavar="TEXT", help="the policy's last message, for `reward` (default: empty)")
    parser.add_argument(
        "--timeout", type=float_in_range(), default=RolloutConfig.tool_timeout, help="seconds (default %(default)g)"
    )
    return parser.parse_args(arguments)


async def call_tool(catalog: EnvironmentCatalog, calls: Sequence[dict[str, Any]], timeout: float) -> list[ToolResult]:
    """Call the catalog's only tool with each of these arguments, in a session of its own."""
    from megarl.environments.process_sessions import EnvironmentPool
    from megarl.processes.children import ProcessLimits
    from megarl.types import Prompt

    config = RolloutConfig()
    pool = EnvironmentPool(catalog, timeout, 1, limits=ProcessLimits(config.pass_env, config.tool_memory_mb))
    (name,) = catalog.tools
    try:
        session = await pool.open_session(Prompt("try-tool", ({"role": "user", "content": ""},)))
        try:
            return [await session.call(name, arguments) for arguments in calls]
        finally:
            session.close()
    finally:
        await pool.aclose()


def load_target(options: argparse.Namespace) -> EnvironmentCatalog:
    """Return a catalog of the tool or the environment alone. Raises ConfigError."""
    from megarl.environments.catalog import load_catalog

    spec = options.spec
    if not (options.call or options.data or options.row is not None or options.answer is not None):
        try:
            return load_catalog(RolloutConfig(tools=(spec,)))
        except ConfigError as tool_error:
            try:
                catalog = load_catalog(RolloutConfig(environments=(spec,)))
            except ConfigError:
                raise tool_error from None
    else:
        catalog = load_catalog(RolloutConfig(environments=(spec,)))
    (environment,) = catalog.environments.values()
    if environment.kind == "agent":
        raise ConfigError(f"{spec} is an agent, which has no tools; `megarl train --dry-run` checks it")
    if options.arguments:
        name = environment.schemas[0]["function"]["name"] if environment.schemas else "TOOL"
        call = f"--call {name} '{json.dumps(options.arguments[0])}'"
        raise ConfigError(f"{spec} is an environment: instead of --arguments write {call}")
    return catalog


def read_prompt(options: argparse.Namespace, environment: EnvironmentInfo) -> Prompt:
    """Return the prompt of `--row` or `--data`, parsed as a run's. Raises ConfigError."""
    from megarl.data.datasets import iter_prompts, parse_prompt

    if options.data is None:
        row = {} if options.row is None else options.row
        if not isinstance(row, dict):
            raise ConfigError(f"--row {row} is the number of a row of --data FILE; or write a JSON object of columns")
        if missing := [name for name in environment.required_columns if name != "prompt" and name not in row]:
            raise ConfigError(
                f"reset of {options.spec} needs the column {missing[0]!r}: --row '{{\"{missing[0]}\": ...}}'"
            )
        label_key = options.label_key if options.label_key in row else ""
        row = {options.prompt_key: PROMPT_TEXT, **row}
        return parse_prompt(row, "--row", "try-tool", options.prompt_key, label_key, "")
    if isinstance(options.row, dict):
        raise ConfigError("--row is a JSON object and --data is a file: pass one of them, or --row N")
    number = options.row or 0
    for _, prompt in islice(iter_prompts(options.data, options.prompt_key, options.label_key), number, None):
        return prompt
    raise ConfigError(f"{options.data} has no row {number}")


def format_turn(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a turn's text, in the format of Qwen: a run has what the policy wrote."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def play(catalog: EnvironmentCatalog, prompt: Prompt, options: argparse.Namespace, console: Console) -> int:
    """Play a conversation with the catalog's only environment and print it. Returns the exit status."""
    from megarl.environments.process_sessions import EnvironmentPool
    from megarl.environments.protocol import SessionLost
    from megarl.processes.children import ProcessLimits

    config = RolloutConfig()
    pool = EnvironmentPool(catalog, options.timeout, 1, limits=ProcessLimits(config.pass_env, config.tool_memory_mb))
    try:
        return await _play(pool, prompt, options, console)
    except SessionLost as error:
        console.print(f"episode: aborted: {error}", soft_wrap=True)
        return 1
    finally:
        await pool.aclose()


async def _play(pool: EnvironmentPool, prompt: Prompt, options: argparse.Namespace, console: Console) -> int:
    session = await pool.open_session(prompt)
    try:
        for message in session.messages:
            console.print(f"{message['role']}:", message["content"], soft_wrap=True)
        functions = [schema["function"] for schema in session.schemas]
        console.print("schemas:", json.dumps(functions, indent=2), soft_wrap=True)
        messages, turns, is_ok = list(session.messages), list[str](), True
        for name, arguments in options.call:
            text = json.dumps(arguments)
            result = await session.call(name, arguments)
            console.print(f"call: {name} {text}", soft_wrap=True)
            console.print(f"{'result' if result.ok else 'error'}: {describe_result(result)}", soft_wrap=True)
            is_ok = is_ok and result.ok
            call = {"type": "function", "function": {"name": name, "arguments": text}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "name": name, "content": result.text})
            turns.append(format_turn(name, arguments))
        answer = options.answer or ""
        messages.append({"role": "assistant", "content": answer})
        console.print(f"episode: ended by the policy's answer {answer!r}", soft_wrap=True)
        reward = await session.reward(answer, messages, [*turns, answer])
        line, has_failed = describe_reward(reward)
        console.print(f"reward: {line}", soft_wrap=True)
        return int(has_failed or not is_ok)
    finally:
        session.close()


def describe_result(result: ToolResult) -> str:
    """Return the text that the policy reads, after the number of images."""
    return f"({len(result.images)} images) {result.text}" if result.images else result.text


def describe_reward(reward: RewardResult | None) -> tuple[str, bool]:
    """Return (the reward in words, whether it failed)."""
    from megarl.types import RewardFailure
    from megarl.types.reward_values import sum_reward

    if reward is None:
        return "none: the environment has no `reward`, and reward.functions compute it", False
    if isinstance(reward, RewardFailure):
        return f"failed: {reward.reason}", True
    details = [f"{name} {value:g}" for name, value in reward.parts.items()]
    details += ["turns " + " ".join(f"{value:g}" for value in reward.turns)] if any(reward.turns) else []
    return f"{sum_reward(reward):g}" + (f" ({', '.join(details)})" if details else ""), False


def run(options: argparse.Namespace) -> int:
    catalog = load_target(options)
    console = Console(highlight=False, markup=False)
    for environment in catalog.environments.values():
        return asyncio.run(play(catalog, read_prompt(options, environment), options, console))
    return run_tool(catalog, options, console)


def run_tool(catalog: EnvironmentCatalog, options: argparse.Namespace, console: Console) -> int:
    """Call the catalog's only tool and print a table. Returns the exit status."""
    (tool,) = catalog.tools.values()
    console.print("schema:", json.dumps(tool.schema["function"], indent=2), soft_wrap=True)
    if not options.arguments:
        raise ConfigError("--arguments is not given, so the tool was not called; write a JSON object of its arguments")
    results = asyncio.run(call_tool(catalog, options.arguments, options.timeout))
    table = Table("arguments", "", "result", box=box.SIMPLE_HEAD)
    for arguments, result in zip(options.arguments, results, strict=True):
        table.add_row(json.dumps(arguments), "ok" if result.ok else "error", result.text)
    console.print(table)
    return int(not all(result.ok for result in results))


def main(arguments: Sequence[str]) -> int:
    return run_cli(lambda: run(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
