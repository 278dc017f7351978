"""Attribute the log-prob differences of engine and trainer to their causes.

Causes are staleness, routing, truncated sampling, kernels, and the engine's cache.

    .venv/bin/python tools/mismatch.py RUN_DIR [--step N] [--worst N] [--json]

Analyses one step, by default the last one with log-probs of the trainer: `rollout.verify_weights_every` sets how often
it computes them if its loss does not need them. The table has a row per cause: tokens, |gap| in nats as mean, 99th
percentile and largest, and the share of the total gap. Below it is the gap between the engine's own log-probs of the
same token after the same tokens, with and without cached tokens; then the worst tokens, with the text before them.
megarl/observe/logprob_gap.py explains how causes are told apart, and which cannot be.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import ConfigError
from megarl.config.command_line import Parser, int_in_range, run_cli
from megarl.observe.logprob_gap import LogprobGaps, compare_twins, compute_gaps, find_worst, summarize_causes
from megarl.observe.rollout_log import is_complete, iter_rows, open_complete_parts, read_records, recorded_steps
from megarl.observe.rollout_table import Record
from megarl.view.rollout_details import Decode, load_decoder_or_default

CONTEXT_TOKENS = 12
"""Number of tokens to show before one of the worst."""
REMEDY = (
    "the trainer looks every rollout.verify_weights_every steps, and in every step where its loss needs it "
    "(run.num_update above 1, correction.kind); set rollout.verify_weights_every=1 to have it of all"
)


def has_trainer_logprobs(run: Path, step: int) -> bool:
    """Return whether a step's rollouts have log-probs of the trainer."""
    return any(
        row["trainer_logprobs"] is not None
        for part in open_complete_parts(run, step)
        for row in iter_rows(part, ["trainer_logprobs"])
    )


def find_step(run: Path, step: int | None) -> int:
    """Return the requested step, or the last one with log-probs of the trainer. Raises ConfigError."""
    if not run.is_dir():
        raise ConfigError(f"no run folder {run}; name one, such as runs/quickstart/run-1")
    steps = recorded_steps(run)
    if not steps:
        raise ConfigError(f"{run} has no recorded rollouts (track.save_rollouts writes them)")
    if step is not None:
        if step not in steps:
            raise ConfigError(f"{run} has no rollouts of step {step}; it has steps {steps[0]} to {steps[-1]}")
        if not has_trainer_logprobs(run, step):
            raise ConfigError(f"{run} has no log-probs of the trainer for step {step}: {REMEDY}")
        return step
    if len(steps) > 1 and not is_complete(run, steps[-1]):
        steps.pop()  # it is still being written
    for last in reversed(steps):
        if has_trainer_logprobs(run, last):
            return last
    raise ConfigError(f"{run} has no log-probs of the trainer, of any step: {REMEDY}")


def describe_tokens(records: Sequence[Record], gaps: LogprobGaps, worst: int, decode: Decode) -> list[dict[str, Any]]:
    """Describe the worst tokens, with their rollout's number, prompt and text."""
    descriptions = []
    for token in find_worst(gaps, worst):
        record, place = records[token.pop("record")], token["token"]
        ids = record.rollout.token_ids.tolist()
        about = {"rollout": record.number, "prompt": record.rollout.prompt.id, **token}
        descriptions.append(
            {**about, "text": decode([ids[place]]), "before": decode(ids[max(0, place - CONTEXT_TOKENS) : place])}
        )
    return descriptions


def escape_text(text: str) -> str:
    """Return the text in one line, without terminal control characters."""
    return json.dumps(text, ensure_ascii=False)[1:-1] if text.isprintable() else ascii(text)[1:-1]


def table(results: dict[str, Any]) -> list[str]:
    rows = [f"{'cause':<31}{'tokens':>10}{'mean':>11}{'p99':>11}{'largest':>11}{'share':>8}"]
    for row in results["causes"]:
        figures = "".join(f"{row[name]:>11.2e}" for name in ("mean", "p99", "largest"))
        share = f"{row['share']:>7.1%}" if row["name"] != "all" else ""
        rows.append(f"{row['name']:<31}{row['tokens']:>10,}{figures} {share}".rstrip())
    if results["twins"]:
        rows.append("\nthe engine against itself: the same token behind the same tokens, something before it was")
        for row in results["twins"]:
            figures = "".join(f"{row[name]:>11.2e}" for name in ("mean", "p99", "largest"))
            rows.append(f"{row['name']:<34}{row['tokens']:>7,}{figures}")
    for row in results["worst"]:
        rows.append(
            f"\nrollout {row['rollout']}, prompt {escape_text(row['prompt'])}, token {row['token']}: "
            f"gap {row['gap']:+.3e}, engine {row['engine']:.4f}, trainer {row['trainer']:.4f}: {row['cause']}"
            + (f", {row['staleness']} versions behind" if row["staleness"] else "")
            + (f", one of {row['choices']} words" if row["choices"] else "")
            + (f", {row['cached']} tokens cached" if row["cached"] > 0 else "")
        )
        rows.append(f"  {escape_text(row['before'])} >>{escape_text(row['text'])}<<")
    return rows


def decompose(options: argparse.Namespace) -> int:
    step = find_step(options.run, options.step)
    records = read_records(options.run, step, include_trainer_columns=True, exclude=["routing"])
    gaps = compute_gaps(records, step - 1)
    result: dict[str, Any] = {
        "run": str(options.run),
        "step": step,
        "tokens": len(gaps),
        "rollouts": len(records) - gaps.num_missing,
        "routing_measured": bool(np.isfinite(gaps.tokens["routing"]).any()),
        "not_finite": gaps.num_nonfinite,
        "causes": [dataclasses.asdict(cause) for cause in summarize_causes(gaps)],
        "twins": [dataclasses.asdict(cause) for cause in compare_twins(records, step - 1)],
        "worst": describe_tokens(records, gaps, options.worst, load_decoder_or_default(options.run))
        if options.worst
        else [],
    }
    if options.json:
        print(json.dumps(result))
        return 0
    print(f"{options.run}, step {step}: {result['tokens']:,} tokens of {result['rollouts']} rollouts")
    if not result["routing_measured"]:
        print(
            "routing was not measured apart, which is done with train.routing_replay in the first step and each "
            "rollout.verify_weights_every-th after it: with replay it is in none of these, without it is within them"
        )
    if gaps.num_nonfinite:
        print(f"{gaps.num_nonfinite} tokens are left out: a log-prob of theirs is not finite")
    print("\n".join(table(result)))
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--step", type=int_in_range(), help="which step (default: the last in which the trainer has looked)"
    )
    parser.add_argument("--worst", type=int_in_range(0), default=8, help="how many of the worst tokens (default 8)")
    parser.add_argument("--json", action="store_true", help="all of it as one object of JSON")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    return run_cli(lambda: decompose(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
