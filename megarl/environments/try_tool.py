"""Call a tool as a run does, in a process of its own, and print what the policy would see.

    megarl try-tool my_tools:calculator --arguments '{"expression": "2+3"}'

Prints the tool's schema, and for each --arguments, which may be repeated, the result or the error. Exits with 1 if a
call fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from megarl.config import ConfigError, RolloutConfig
from megarl.config.command_line import Parser, float_in_range, run_cli

if TYPE_CHECKING:
    from megarl.environments.catalog import EnvironmentCatalog
    from megarl.environments.protocol import ToolResult


def parse_call(text: str) -> dict[str, Any]:
    """Parse `--arguments`: a JSON object."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object such as {{"expression": "2+3"}}, not {text[:40]!r}')
    return arguments


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__, prog="megarl try-tool")
    parser.add_argument("tool", metavar="module:name", help="as in rollout.tools")
    parser.add_argument("--arguments", type=parse_call, action="append", default=[], metavar="JSON", help="of a call")
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


def run(options: argparse.Namespace) -> int:
    from megarl.environments.catalog import load_catalog

    catalog = load_catalog(RolloutConfig(tools=(options.tool,)))
    (tool,) = catalog.tools.values()
    console = Console(highlight=False, markup=False)
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
