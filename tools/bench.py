"""Measure one table of docs/performance.md on this machine.

    .venv/bin/python tools/bench.py COMMAND [options] [--json [FILE]]

Every command prints the machine, the versions of packages and the load before and after. What is compared takes turns
(A, B, A, B, ...), and a ratio is the median over the turns, with quartiles: other programs on the machine slow all ways
alike. Processor seconds hardly depend on other programs. `--json` writes all of it and every sample as one object.
COMMAND --help says what the command measures.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence

from benchmarks.output import STDOUT, Report, add_json_option

from megarl.config.command_line import Parser, run_cli

COMMANDS = {
    "reshard": "ways to bring weights from a trainer's ranks to engines' shards",
    "step": "training steps by the ways to split sequences into micro-batches",
    "context": "steps with context parallelism of static and of dynamic sizes, modelled",
    "trl": "steps of GRPO beside TRL's",
    "asynchronous": "steps with asynchronous generation beside synchronous ones",
    "turns": "conversations with slow tools beside turn-by-turn generation",
    "concurrency": "conversations held back by the KV cache beside fixed numbers of them, on a simulated engine",
    "boxes": "boxes of the sandbox beside bare bubblewrap",
    "sessions": "conversations through the session server beside the engine itself",
    "save": "steps with asynchronous and synchronous saves",
    "observe": "steps with trackers and profiler ranges",
    "flow": "host cost of a step outside of model, optimizer and engine",
    "scale": "the same, modelled for jobs too large for this machine",
}
"""Modules of `benchmarks/`."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    listing = "\n".join(f"  {name:14}{title}" for name, title in COMMANDS.items())
    commands = Parser(f"{__doc__}\n{listing}", prog="bench.py")
    commands.add_argument("command", metavar="COMMAND", choices=list(COMMANDS), help="one of those above")
    command = commands.parse_known_args(words[:1])[0].command
    benchmark = importlib.import_module(f"benchmarks.{command}")
    parser = Parser(benchmark.__doc__, prog=f"bench.py {command}")
    benchmark.add_options(parser)
    add_json_option(parser)
    options = parser.parse_intermixed_args(words[1:])
    report = Report(command, options)
    with contextlib.redirect_stdout(sys.stderr if options.json == STDOUT else sys.stdout):
        benchmark.run(options, report)
    report.close()
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
