"""Call reward functions on rows of a data set, as a run calls them, and print what they return.

    megarl try-reward my_reward:right --data my.jsonl [--rows 5] [--answer TEXT]

The answer is TEXT, in which {ground_truth} stands for the row's, or else the row's column `response` or `answer`. A row
without one is tried with its ground truth as the answer and with an empty answer, which a reward should tell apart. A
rollout is one turn without token ids: no model is loaded. Exits with 1 if a call fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from megarl.config import ConfigError
from megarl.config.command_line import Parser, int_in_range, run_cli
from megarl.config.keys import DataConfig, RewardConfig

if TYPE_CHECKING:
    from megarl.types import Prompt, Reward, Rollout

ANSWER_COLUMNS = ("response", "answer")
MAX_CELL = 60
"""Characters of a text in the table."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__, prog="megarl try-reward")
    parser.add_argument("functions", nargs="+", metavar="[verl:|trl:]module:name", help="as in reward.functions")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help=".jsonl or .parquet, as in data.train")
    parser.add_argument("--rows", type=int_in_range(), default=5, metavar="N", help="the first N (default %(default)s)")
    parser.add_argument("--answer", metavar="TEXT", help="the answer to every row")
    parser.add_argument("--prompt-key", default=DataConfig.prompt_key, metavar="COLUMN", help="data.prompt_key")
    parser.add_argument("--label-key", default=DataConfig.label_key, metavar="COLUMN", help="data.label_key")
    return parser.parse_args(arguments)


def list_answers(prompt: Prompt, answer: str | None) -> dict[str, str]:
    """Return the answers to try, by their origin: `given`, a column, or `ground truth` and `empty`.

    Raises ConfigError for a row that has none.
    """
    if answer is not None:
        return {"given": answer.replace("{ground_truth}", str(prompt.ground_truth))}
    for column in ANSWER_COLUMNS:
        if isinstance(text := prompt.extra.get(column), str):
            return {column: text}
    if prompt.ground_truth is None:
        raise ConfigError(
            f"{prompt.id} has neither a ground truth nor a column {' or '.join(ANSWER_COLUMNS)}: pass --answer"
        )
    return {"ground truth": str(prompt.ground_truth), "empty": ""}


def build_rollout(prompt: Prompt, answer: str) -> Rollout:
    """Return a conversation in which the policy answers the prompt in one turn, without token ids."""
    import numpy as np

    from megarl.types import Rollout, Turn

    no_ids = np.zeros(0, np.int32)
    messages = (*prompt.messages, {"role": "assistant", "content": answer})
    return Rollout(prompt, (Turn(no_ids), Turn(no_ids, is_action=True)), messages=messages)


def read_cases(options: argparse.Namespace) -> Iterator[tuple[str, str, Rollout]]:
    """Yield (location, origin of the answer, rollout) of the first rows."""
    from megarl.data.datasets import iter_prompts

    rows = iter_prompts(options.data, options.prompt_key, options.label_key)
    for location, prompt in islice(rows, options.rows):
        for origin, answer in list_answers(prompt, options.answer).items():
            yield location, origin, build_rollout(prompt, answer)


def format_reward(reward: Reward) -> str:
    """Format the total, and the parts if any: `1 (words 12)`."""
    from megarl.types.reward_values import sum_reward

    parts = ", ".join(f"{name} {value:g}" for name, value in reward.parts.items())
    return f"{sum_reward(reward):g}" + (f" ({parts})" if parts else "")


def describe_separation(name: str, pairs: Sequence[tuple[float, float]]) -> str:
    """Return a sentence on how often a function prefers the ground truth. pairs: rewards of (truth, empty)."""
    preferred = sum(truth > empty for truth, empty in pairs)
    line = f"{name} gives the ground truth more than the empty answer in {preferred} of {len(pairs)} rows"
    if preferred == len(pairs):
        return line
    return f"{line}; it may expect a format, which --answer 'The answer is {{ground_truth}}' can write"


def run(options: argparse.Namespace) -> int:
    from megarl.rewards.functions import check_truths, load_functions
    from megarl.rewards.reward_process import score
    from megarl.types import RewardFailure
    from megarl.types.reward_values import sum_reward

    functions = load_functions(options.functions)
    cases = list(read_cases(options))
    if not cases:
        raise ConfigError(f"{options.data} holds no prompts")
    rows = ((location, rollout.prompt) for location, _, rollout in cases)
    messages = check_truths(functions, dict(rows).items(), str(options.data))
    results = score([rollout for _, _, rollout in cases], functions, RewardConfig().timeout)
    table = Table("row", "ground truth", "answer", *functions, box=box.SIMPLE_HEAD)
    failures: dict[str, int] = {}
    for (location, origin, rollout), verdicts in zip(cases, results, strict=True):
        cells = []
        for name, verdict in verdicts.items():
            if isinstance(verdict, RewardFailure):
                cells.append("failed")
                failures[f"{name}: {verdict.reason}"] = failures.get(f"{name}: {verdict.reason}", 0) + 1
            else:
                cells.append(format_reward(verdict))
        texts = (str(rollout.prompt.ground_truth), f"{origin}: {rollout.answer}" if rollout.answer else origin)
        table.add_row(location, *map(shorten, texts), *cells)
    console = Console(highlight=False, markup=False)
    console.print(table)
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for (_, origin, _), first, second in zip(cases, results, results[1:], strict=False):
        for name, values in pairs.items():
            truth, empty = first[name], second[name]
            if origin != "ground truth" or isinstance(truth, RewardFailure) or isinstance(empty, RewardFailure):
                continue
            values.append((sum_reward(truth), sum_reward(empty)))
    messages += [describe_separation(name, values) for name, values in pairs.items() if values]
    messages += [f"error: {reason} ({count} of {len(cases)} answers)" for reason, count in failures.items()]
    for message in messages:
        console.print(message, soft_wrap=True)
    return int(bool(failures))


def shorten(text: str) -> str:
    """Return one line of at most `MAX_CELL` characters."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_CELL else line[: MAX_CELL - 3] + "..."


def main(arguments: Sequence[str]) -> int:
    return run_cli(lambda: run(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
