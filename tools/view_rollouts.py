"""Look at the conversations of a run.

    .venv/bin/python tools/view_rollouts.py RUN_DIR [--step N] [--show N] [--worst | --best] [--html FILE]

Prints the rollouts of one step (the last one recorded by default), turn by turn: what the policy wrote is bright, what
it was only given, and is not trained on, is dimmed. `--html` writes them into a page instead.
"""

from __future__ import annotations

import argparse
import html
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from megarl.command_line import Parser, count, ends_in_a_line, file_to_write
from megarl.config import ConfigError
from megarl.observe.rollout_log import from_record, read_records, rollout_file

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
article { border: 1px solid #ccc; border-radius: 6px; margin: 1rem 0; padding: 0.5rem 1rem; }
header { font-weight: bold; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0.4rem 0; padding: 0.4rem 0.6rem; border-radius: 4px; }
.given { color: #888; background: #f7f7f7; }
.written { background: #e8f2e4; }
.label { font-size: 80%; color: #666; }
"""


def find_step(run_dir: Path, step: int | None) -> int:
    """The step asked for or the last one recorded. Raises ConfigError."""
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run folder {run_dir}; name one, such as runs/quickstart/run-1")
    names = (re.fullmatch(r"step_(\d{6,12})", path.stem) for path in (run_dir / "rollouts").glob("step_*.jsonl"))
    steps = sorted(int(name[1]) for name in names if name)
    if not steps:
        raise ConfigError(f"{run_dir} has no recorded rollouts (track.rollouts writes them)")
    if step is None:
        return steps[-1]
    if step not in steps:
        raise ConfigError(f"{run_dir} has no rollouts of step {step}; it has steps {steps[0]} to {steps[-1]}")
    return step


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a file. Raises ConfigError where it has none, or what another program wrote."""
    records = read_records(file)
    if not records:
        raise ConfigError(f"{file} holds no rollouts; look at another step with --step")
    for number, record in enumerate(records, start=1):
        try:
            from_record(record)
            html_page([record], "")
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(f"{file}:{number} is not a rollout as MegaRL records it") from None
    return records


def head_line(record: dict[str, Any]) -> str:
    """One line of figures: prompt, reward and its parts, advantage, how it ended, length."""
    parts = [f"prompt {record['id']}", f"group {record['group']}", f"reward {record['reward']:g}"]
    if len(record["reward_parts"]) > 1:
        parts.append("(" + ", ".join(f"{name} {value:g}" for name, value in record["reward_parts"].items()) + ")")
    if record["advantage"] is not None:
        parts.append(f"advantage {record['advantage']:+.3f}")
    if record["prompt"]["ground_truth"] is not None:
        parts.append(f"truth {record['prompt']['ground_truth']}")
    parts.append(f"ended by {record['status']}")
    tokens = sum(len(turn["token_ids"]) for turn in record["turns"])
    written = sum(len(turn["token_ids"]) for turn in record["turns"] if turn["is_action"])
    parts.append(f"{written} of {tokens} tokens its own")
    if record["tool_errors"]:
        parts.append(f"{record['tool_errors']} of {record['tool_calls']} tool calls failed")
    return "  ".join(parts)


def turn_label(index: int, turn: dict[str, Any]) -> str:
    count = len(turn["token_ids"])
    if not turn["is_action"]:
        return f"turn {index}: given, masked, {count} tokens"
    label = f"turn {index}: policy, {count} tokens, weights {turn['weight_version']}"
    if count:
        label += f", mean log-prob {sum(turn['logprobs']) / count:.3f}"
    return label


def turn_text(turn: dict[str, Any]) -> str:
    """The text as recorded, or the ids where the run recorded no texts."""
    return turn["text"] if "text" in turn else " ".join(map(str, turn["token_ids"]))


def print_rollouts(records: list[dict[str, Any]], title: str, console: Console) -> None:
    console.print(title, style="bold", markup=False)
    for record in records:
        good = record["advantage"] if record["advantage"] is not None else record["reward"]
        console.print(Rule(style="bright_black"), soft_wrap=False)
        console.print(Text(head_line(record), style="green" if good > 0 else "red"))
        for index, turn in enumerate(record["turns"]):
            console.print(Text(turn_label(index, turn), style="cyan" if turn["is_action"] else "bright_black"))
            console.print(Text(_printable(turn_text(turn)), style="bold" if turn["is_action"] else "dim"))


def html_page(records: list[dict[str, Any]], title: str) -> str:
    """A page that shows the records; every text in it comes from outside and is escaped."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    for record in records:
        body.append(f"<article><header>{html.escape(head_line(record))}</header>")
        for index, turn in enumerate(record["turns"]):
            kind = "written" if turn["is_action"] else "given"
            body.append(f'<div class="label">{html.escape(turn_label(index, turn))}</div>')
            body.append(f'<pre class="{kind}">{html.escape(turn_text(turn))}</pre>')
        body.append("</article>")
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f"<!doctype html>\n<html><head>{head}</head><body>\n" + "\n".join(body) + "\n</body></html>\n"


def _printable(text: str) -> str:
    """Without characters that would steer the terminal; a model may write any byte."""
    return "".join(char if char.isprintable() or char == "\n" else f"\\x{ord(char):02x}" for char in text)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--step", type=count(), help="which step (default: the last recorded)")
    parser.add_argument("--show", type=count(0), default=8, help="how many rollouts (default 8; 0 for all)")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--worst", action="store_true", help="lowest reward first")
    order.add_argument("--best", action="store_true", help="highest reward first")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page instead of printing")
    return parser.parse_args(arguments)


def show(options: argparse.Namespace) -> int:
    file_to_write(options.html, "--html")
    step = find_step(options.run, options.step)
    every = read(rollout_file(options.run, step))
    records = list(every)
    if options.worst or options.best:
        records.sort(key=lambda record: record["reward"], reverse=options.best)
    records = records[: options.show or None]
    title = f"{options.run}, step {step}: {len(records)} of {len(every)} rollouts"
    if options.html:
        options.html.write_text(html_page(records, title), encoding="utf-8")
        print(f"wrote {options.html}: {len(records)} of {len(every)} rollouts of step {step}")
    else:
        print_rollouts(records, title, Console(highlight=False, soft_wrap=True))
    return 0


def main(arguments: list[str]) -> int:
    return ends_in_a_line(lambda: show(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
