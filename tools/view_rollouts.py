"""View the conversations of a run.

    .venv/bin/python tools/view_rollouts.py RUN_DIR [--step N] [--show N] [--worst | --best | --sort COLUMN]
                                            [--where "reward<0.5 and turns>2"] [--tokens] [--html FILE]

Prints the rollouts of one step (by default the last recorded one), turn by turn: text that the policy wrote is bright;
text that it was only given, and that is not trained on, is dimmed. A long beginning of a prompt (system prompt, tools)
is printed once. `--html` writes them to a page instead;
megarl view writes one of all steps. `--where` filters by columns with <, <=, >, >=, = or != (for text also ~,
"contains"), and, or, not and parentheses. `--sort reward` starts with the lowest, `--sort reward:down` with the
highest. Columns: step, number, group, prompt, source, status, reward, advantage, logprob, length, actions (the policy's
tokens), turns, tool_calls, tool_errors, staleness, mode (sampled or greedy). `--tokens` prints a line per token: its
position, id, log-prob, advantage, weight version and text. RUN_DIR/evaluation has the rollouts of evaluations.

For statistics over all of them, a step is a folder of parquet files with a row per rollout:

    pandas.read_parquet("RUN_DIR/rollouts/step_000012")[["group", "reward", "advantage", "status", "messages"]]

megarl/observe/rollout_columns.py lists the columns.
"""

from __future__ import annotations

import argparse
import html
import math
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from megarl.config import ConfigError
from megarl.config.command_line import Parser, check_writable_file, int_in_range, run_cli
from megarl.observe.rollout_log import is_complete, read_records, recorded_steps
from megarl.observe.rollout_table import Record
from megarl.types import Turn
from megarl.view.query import COLUMNS, MODES, TEXT_COLUMNS, Value, check_column, parse_condition
from megarl.view.rollout_details import Decode, TokenDecoder, load_decoder, load_decoder_or_default

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
article { border: 1px solid #ccc; border-radius: 6px; margin: 1rem 0; padding: 0.5rem 1rem; }
header { font-weight: bold; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0.4rem 0; padding: 0.4rem 0.6rem; border-radius: 4px; }
.given { color: #888; background: #f7f7f7; }
.written { background: #e8f2e4; }
.label { font-size: 80%; color: #666; }
"""
MIN_REPEATED_CHARS = 100
"""Characters of a prompt's beginning that is not printed again."""


def find_step(run_dir: Path, step: int | None) -> int:
    """Return the requested step, or the last recorded one, which another process may still be writing. Raises
    ConfigError."""
    if not run_dir.is_dir():
        raise ConfigError(f"no run folder {run_dir}; name one, such as runs/quickstart/run-1")
    steps = recorded_steps(run_dir)
    if not steps:
        raise ConfigError(f"{run_dir} has no recorded rollouts (track.save_rollouts writes them)")
    if step is None:
        return steps[-1] if len(steps) == 1 or is_complete(run_dir, steps[-1]) else steps[-2]
    if step not in steps:
        raise ConfigError(f"{run_dir} has no rollouts of step {step}; it has steps {steps[0]} to {steps[-1]}")
    return step


def figures(record: Record, step: int, newest: int) -> dict[str, Value]:
    """Return a rollout's values by the names of COLUMNS. newest: newest weight version that sampled in its step."""
    rollout = record.rollout
    written = [turn.logprobs for turn in rollout.turns if turn.is_action]
    logprobs = np.concatenate([np.zeros(0, np.float32), *written])
    oldest = min((version for version, _ in rollout.version_spans if version >= 0), default=newest)
    values: dict[str, Value] = {
        "step": step,
        "number": record.number,
        "group": rollout.group,
        "prompt": rollout.prompt.id,
        "source": rollout.prompt.data_source,
        "status": rollout.status,
        "reward": None if rollout.unscored else rollout.reward,
        "advantage": record.advantage,
        "logprob": float(logprobs.mean(dtype=np.float64)) if len(logprobs) else None,
        "length": rollout.num_tokens,
        "actions": rollout.num_actions,
        "turns": len(written),
        "tool_calls": rollout.tool_calls,
        "tool_errors": rollout.tool_errors,
        "staleness": newest - oldest,
        "mode": MODES[record.is_greedy],
    }
    return values


def select_records(records: list[Record], step: int, options: argparse.Namespace) -> list[Record]:
    """Return the rollouts that match `--where`, in the requested order. Raises ConfigError."""
    matches = parse_condition(options.where) if options.where is not None else None
    name, _, direction = options.sort.partition(":") if options.sort is not None else ("", "", "")
    if options.sort is not None:
        check_column(name, "--sort")
        if direction not in ("", "up", "down"):
            raise ConfigError(f"--sort {options.sort[:60]}: write {name}, or {name}:down for the highest first")
    selected = list(records)
    if matches is not None or name:
        newest = max((version for one in records for version, _ in one.rollout.version_spans), default=-1)
        values = {id(one): figures(one, step, newest) for one in records}
        if matches is not None:
            selected = [one for one in selected if matches(values[id(one)])]
        if name in TEXT_COLUMNS:
            selected.sort(key=lambda one: str(values[id(one)][name]), reverse=direction == "down")
        elif name:
            selected.sort(key=lambda one: _last_if_none(values[id(one)][name], direction == "down"))
    if options.worst or options.best:
        selected.sort(key=lambda record: record.rollout.reward, reverse=options.best)
    return selected


def _last_if_none(value: Value, down: bool) -> tuple[bool, float]:
    if value is None or isinstance(value, str) or math.isnan(value):
        return True, 0.0
    return False, -value if down else value


def head_line(record: Record) -> str:
    """Return one line: prompt, reward and its parts, advantage, status, length."""
    rollout = record.rollout
    reward = f"reward {rollout.reward:g}"
    if rollout.unscored:
        reward = f"no reward ({'; '.join(f'{part}: {reason}' for part, reason in rollout.unscored.items())[:200]})"
    parts = [f"prompt {rollout.prompt.id}", f"group {rollout.group}"]
    if rollout.episode >= 0:
        parts.append(f"episode {rollout.episode}")
    if (branch := rollout.branch) is not None:
        parts.append(f"branch {branch.number}, {branch.forks} forks{', drifted' if branch.has_drifted else ''}")
    parts.append(reward)
    if len(rollout.reward_parts) > 1:
        parts.append("(" + ", ".join(f"{name} {value:g}" for name, value in rollout.reward_parts.items()) + ")")
    if record.advantage is not None:
        parts.append(f"advantage {record.advantage:+.3f}")
    if rollout.prompt.ground_truth is not None:
        parts.append(f"ground truth {rollout.prompt.ground_truth}")
    parts.append(f"status {rollout.status}")
    tokens = sum(len(turn.token_ids) for turn in rollout.turns)
    parts.append(f"{rollout.num_actions} of {tokens} tokens from the policy")
    if rollout.tool_errors:
        parts.append(f"{rollout.tool_errors} of {rollout.tool_calls} tool calls failed")
    return "  ".join(parts)


def turn_label(index: int, turn: Turn) -> str:
    count = len(turn.token_ids)
    if not turn.is_action:
        return f"turn {index}: prompt or tool result, not trained on, {count} tokens"
    label = f"turn {index}: policy, {count} tokens, weight version {turn.weight_version}"
    if count:
        label += f", mean log-prob {np.mean(turn.logprobs, dtype=np.float64):.3f}"
    if turn.cached_tokens >= 0:
        label += f", {turn.cached_tokens} prefix tokens cached"
    if turn.reward:
        label += f", reward {turn.reward:g}"
    return label


def print_rollouts(
    records: list[Record], title: str, decode: Decode, console: Console, decoder: TokenDecoder | None = None
) -> None:
    """Print rollouts. decoder: if given, print a line per token."""
    console.print(title, style="bold", markup=False)
    printed: dict[str, int] = {}
    for record in records:
        score = record.advantage if record.advantage is not None else record.rollout.reward
        console.print(Rule(style="bright_black"), soft_wrap=False)
        console.print(Text(head_line(record), style="green" if score > 0 else "red"))
        position = 0
        for index, turn in enumerate(record.rollout.turns):
            console.print(Text(turn_label(index, turn), style="cyan" if turn.is_action else "bright_black"))
            if decoder is not None:
                style = "" if turn.is_action else "dim"
                for line in token_lines(record, turn, position, decoder):
                    console.print(Text(line, style=style))
                position += len(turn.token_ids)
                continue
            text = decode(list(turn.token_ids))
            if index == 0:
                text = shorten_beginning(text, record, printed)
            console.print(Text(_printable(text), style="bold" if turn.is_action else "dim"))


def shorten_beginning(text: str, record: Record, printed: dict[str, int]) -> str:
    """Return the text of a prompt, without what precedes the first message of the user if an earlier rollout has it.

    Args:
        printed: number of the first rollout with each beginning; it is extended.
    """
    contents = [message.get("content") for message in record.rollout.messages if message.get("role") == "user"]
    place = text.find(contents[0]) if contents and isinstance(contents[0], str) and contents[0] else -1
    beginning = text[: max(place, 0)]
    if len(beginning) < MIN_REPEATED_CHARS or printed.setdefault(beginning, record.number) == record.number:
        return text
    return f"[{len(beginning)} characters as in rollout {printed[beginning]}] {text[place:]}"


def token_lines(record: Record, turn: Turn, first: int, decoder: TokenDecoder) -> list[str]:
    """Return a line per token of a turn that begins at token `first` of its rollout."""
    ids = turn.token_ids.tolist()
    versions, lines = turn.token_versions, []
    for place, (token, word) in enumerate(zip(ids, decoder.decode_each(ids), strict=True)):
        text = _printable(word).replace("\n", "\\n")
        source = ""
        if turn.is_action:
            advantage = "" if record.advantages is None else f"{record.advantages[first + place]:+.4f}"
            source = f"{turn.logprobs[place]:.4f}  {advantage:>8}  w{versions[place]}"
        lines.append(f"{first + place:6}  {token:7}  {source:>26}  |{text}|")
    return lines


def html_page(records: list[Record], title: str, decode: Decode) -> str:
    """Return a page that shows the records; all of its text comes from outside and is escaped."""
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
    """Remove terminal control characters; a model may write any byte."""
    return "".join(char if char.isprintable() or char == "\n" else f"\\x{ord(char):02x}" for char in text)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--step", type=int_in_range(), help="which step (default: the last recorded)")
    parser.add_argument("--show", type=int_in_range(0), default=8, help="how many rollouts (default 8; 0 for all)")
    sorting = parser.add_mutually_exclusive_group()
    sorting.add_argument("--worst", action="store_true", help="lowest reward first")
    sorting.add_argument("--best", action="store_true", help="highest reward first")
    sorting.add_argument(
        "--sort", metavar="COLUMN", help=f"by one of {', '.join(COLUMNS)}; COLUMN:down for highest first"
    )
    parser.add_argument("--where", metavar="CONDITION", help="only those that fit, such as 'reward<0.5 and turns>2'")
    parser.add_argument("--tokens", action="store_true", help="a line for each token")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page instead of printing")
    return parser.parse_args(arguments)


def show(options: argparse.Namespace) -> int:
    check_writable_file(options.html, "--html")
    if options.tokens and options.html:
        raise ConfigError("--tokens is for the terminal; megarl view makes a page with tokens")
    step = find_step(options.run, options.step)
    every = read_records(options.run, step)
    fitting = select_records(every, step, options)
    records = fitting[: options.show or None]
    title = f"{options.run}, step {step}: {len(records)} of {len(every)} rollouts"
    if options.where is not None:
        title = f"{options.run}, step {step}: {len(fitting)} of {len(every)} rollouts fit, {len(records)} shown"
    decode = load_decoder_or_default(options.run)
    if options.html:
        options.html.write_text(html_page(records, title, decode), encoding="utf-8")
        print(f"wrote {options.html}: {len(records)} of {len(every)} rollouts of step {step}")
    else:
        decoder = TokenDecoder(load_decoder(options.run)) if options.tokens else None
        print_rollouts(records, title, decode, Console(highlight=False, soft_wrap=True), decoder)
    return 0


def main(arguments: list[str]) -> int:
    return run_cli(lambda: show(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
