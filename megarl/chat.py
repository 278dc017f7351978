"""Chat with a policy in the terminal, with its tools; turns run through the same code as rollouts.

    megarl chat TARGET [--tools module:name ...] [--environment module:Class [--row JSON]]
                                    [--system TEXT] [section.key=value ...]

TARGET is a Hugging Face folder (or the Hub's name of one in this machine's cache), a checkpoint, or a run folder, which
stands for its newest checkpoint. A run's tools and sampling settings apply, too. rollout.temperature=0 is greedy.

/reset begins a new conversation, /quit or ctrl-D exits it, and ctrl-C stops the answer. Control characters in the
policy's output are escaped. The run's environment is not asked for a reward.
"""

from __future__ import annotations

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from megarl.config.command_line import Parser, parse_path_text, run_cli


def parse_row(text: str) -> dict[str, Any]:
    """Parse `--row`, such as `{"ground_truth": 17}`."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object of columns, not {text[:40]!r}")
    return row


def parse_arguments(arguments: Sequence[str] | None) -> Namespace:
    parser = Parser(__doc__, prog="megarl chat")
    parser.add_argument(
        "target", type=parse_path_text, metavar="TARGET", help="an HF folder or name, a checkpoint or a run folder"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--tools", action="append", metavar="module:name", help="a tool; may be repeated")
    group.add_argument("--environment", metavar="module:Class")
    parser.add_argument("--row", type=parse_row, default={}, metavar="JSON", help="columns passed to its `reset`")
    parser.add_argument("--system", default="", metavar="TEXT", help="a system message before all others")
    return parser.parse_intermixed_args(arguments)


def run(options: Namespace) -> int:
    from megarl import chat_conversation  # imports torch

    return chat_conversation.run_chat(options)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_cli(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
