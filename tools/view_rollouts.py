"""Look at the conversations of a run.

    .venv/bin/python tools/view_rollouts.py RUN_DIR [--step N] [--show N] [--worst | --best] [--html FILE]

Prints the rollouts of one step (the last one recorded by default), turn by turn: what the policy wrote is bright, what
it was only given, and is not trained on, is dimmed. `--html` writes them into a page instead.

For figures over all of them, a step is a folder of parquet files with a row for each rollout:

    pandas.read_parquet("RUN_DIR/rollouts/step_000012")[["group", "reward", "advantage", "status", "messages"]]

megarl/observe/rollout_table.py lists the columns.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from megarl.command_line import Parser, count, ends_in_a_line, file_to_write
from megarl.config import ConfigError
from megarl.observe.rollout_log import is_whole, read_records, recorded_steps
from megarl.observe.rollout_table import Record
from megarl.types import Turn

Decode = Callable[[list[int]], str]

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
    """The step asked for or the last one recorded, which another process may be writing. Raises ConfigError."""
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run folder {run_dir}; name one, such as runs/quickstart/run-1")
    steps = recorded_steps(run_dir)
    if not steps:
        raise ConfigError(f"{run_dir} has no recorded rollouts (track.rollouts writes them)")
    if step is None:
        return steps[-1] if len(steps) == 1 or is_whole(run_dir, steps[-1]) else steps[-2]
    if step not in steps:
        raise ConfigError(f"{run_dir} has no rollouts of step {step}; it has steps {steps[0]} to {steps[-1]}")
    return step


def find_tokenizer(run_dir: Path) -> Decode:
    """Ids to text by the tokenizer of the run's model, or by that of its export; where neither is here, the ids."""
    folders = [run_dir / "export"]
    try:
        tree = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        folders.insert(0, Path(tree["model"]["path"]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError, yaml.YAMLError):
        pass
    for folder in folders:
        if not (folder / "tokenizer_config.json").is_file():
            continue
        from transformers import AutoTokenizer  # seconds, for a run that has texts only

        try:
            decode: Decode = AutoTokenizer.from_pretrained(folder, local_files_only=True).decode
            return decode
        except Exception:  # whatever the readers of a broken file raise
            continue
    return lambda ids: " ".join(map(str, ids))


def head_line(record: Record) -> str:
    """One line of figures: prompt, reward and its parts, advantage, how it ended, length."""
    rollout = record.rollout
    reward = f"no reward: {', '.join(rollout.unscored)}" if rollout.unscored else f"reward {rollout.reward:g}"
    parts = [f"prompt {rollout.prompt.id}", f"group {rollout.group}"]
    if rollout.episode >= 0:
        parts.append(f"episode {rollout.episode}")
    if (branch := rollout.branch) is not None:
        parts.append(f"branch {branch.number}, {branch.forks} forks{', drifted' if branch.drift else ''}")
    parts.append(reward)
    if len(rollout.reward_parts) > 1:
        parts.append("(" + ", ".join(f"{name} {value:g}" for name, value in rollout.reward_parts.items()) + ")")
    if record.advantage is not None:
        parts.append(f"advantage {record.advantage:+.3f}")
    if rollout.prompt.ground_truth is not None:
        parts.append(f"truth {rollout.prompt.ground_truth}")
    parts.append(f"ended by {rollout.status}")
    tokens = sum(len(turn.token_ids) for turn in rollout.turns)
    parts.append(f"{rollout.num_actions} of {tokens} tokens its own")
    if rollout.tool_errors:
        parts.append(f"{rollout.tool_errors} of {rollout.tool_calls} tool calls failed")
    return "  ".join(parts)


def turn_label(index: int, turn: Turn) -> str:
    count = len(turn.token_ids)
    if not turn.is_action:
        return f"turn {index}: given, masked, {count} tokens"
    label = f"turn {index}: policy, {count} tokens, weights {turn.weight_version}"
    if count:
        label += f", mean log-prob {np.mean(turn.logprobs, dtype=np.float64):.3f}"
    if turn.reward:
        label += f", reward {turn.reward:g}"
    return label


def print_rollouts(records: list[Record], title: str, decode: Decode, console: Console) -> None:
    console.print(title, style="bold", markup=False)
    for record in records:
        good = record.advantage if record.advantage is not None else record.rollout.reward
        console.print(Rule(style="bright_black"), soft_wrap=False)
        console.print(Text(head_line(record), style="green" if good > 0 else "red"))
        for index, turn in enumerate(record.rollout.turns):
            console.print(Text(turn_label(index, turn), style="cyan" if turn.is_action else "bright_black"))
            text = decode(list(turn.token_ids))
            console.print(Text(_printable(text), style="bold" if turn.is_action else "dim"))


def html_page(records: list[Record], title: str, decode: Decode) -> str:
    """A page that shows the records; every text in it comes from outside and is escaped."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    for record in records:
        body.append(f"<article><header>{html.escape(head_line(record))}</header>")
        for index, turn in enumerate(record.rollout.turns):
            kind = "written" if turn.is_action else "given"
            body.append(f'<div class="label">{html.escape(turn_label(index, turn))}</div>')
            body.append(f'<pre class="{kind}">{html.escape(decode(list(turn.token_ids)))}</pre>')
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
    every = read_records(options.run, step)
    records = list(every)
    if options.worst or options.best:
        records.sort(key=lambda record: record.rollout.reward, reverse=options.best)
    records = records[: options.show or None]
    title = f"{options.run}, step {step}: {len(records)} of {len(every)} rollouts"
    decode = find_tokenizer(options.run)
    if options.html:
        options.html.write_text(html_page(records, title, decode), encoding="utf-8")
        print(f"wrote {options.html}: {len(records)} of {len(every)} rollouts of step {step}")
    else:
        print_rollouts(records, title, decode, Console(highlight=False, soft_wrap=True))
    return 0


def main(arguments: list[str]) -> int:
    return ends_in_a_line(lambda: show(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
