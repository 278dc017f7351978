"""The program that `bench_flow.py` starts on each rank: `flow/ranks.py`."""

import sys

from flow.ranks import main

from megarl.config.command_line import Parser, run_cli


def run() -> int:
    parser = Parser(__doc__)
    parser.add_argument("order", help="JSON, made by bench_flow.py")
    main(parser.parse_args().order)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(run))
