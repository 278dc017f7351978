"""Find where two runs diverge: the first step, rollout and token that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megarl.observe.rollout_table import iter_table_rows
from megarl.view.rollout_files import Notes, iter_groups, list_steps, open_parts
from megarl.view.run_data import RunData

_VOLATILE_PREFIXES = ("time/", "perf/", "memory/")
"""Prefixes of metrics that differ between any two runs."""


def find_divergence(run: RunData, other: RunData) -> dict[str, Any]:
    """Return {steps, tokens, metrics} for the first differences between two runs.

    - steps: number of recorded steps that both have.
    - tokens: {step, number, token, ids} of the first differing token, or None. `token` is its index in the rollout,
      `ids` are both token ids, -1 if the rollout has ended.
    - metrics: {step, names} of the first differing metrics, or None.
    """
    notes = Notes()
    steps = sorted(set(list_steps(run.path, notes)) & set(list_steps(other.path, notes)))
    differences = (_first_token_difference(run.path, other.path, step, notes) for step in steps)
    tokens = next(filter(None, differences), None)
    return {"steps": len(steps), "tokens": tokens, "metrics": _first_metric_difference(run, other)}


def _first_token_difference(run_dir: Path, other_dir: Path, step: int, notes: Notes) -> dict[str, Any] | None:
    tokens_a, tokens_b = _read_tokens(run_dir, step, notes), _read_tokens(other_dir, step, notes)
    for number in sorted(tokens_a.keys() & tokens_b.keys()):
        a, b = tokens_a[number], tokens_b[number]
        shared = min(len(a), len(b))
        different = np.flatnonzero(a[:shared] != b[:shared])
        if len(different) or len(a) != len(b):
            index = int(different[0]) if len(different) else shared
            ids = [int(ids[index]) if index < len(ids) else -1 for ids in (a, b)]
            return {"step": step, "number": number, "token": index, "ids": ids}
    return None


def _read_tokens(run_dir: Path, step: int, notes: Notes) -> dict[int, np.ndarray]:
    return {
        row["number"]: row["token_ids"]
        for part in open_parts(run_dir, step, notes)
        if "token_ids" in part.names
        for _, table in iter_groups(part, ("number", "token_ids"), notes)
        for row in iter_table_rows(table)
    }


def _first_metric_difference(run: RunData, other: RunData) -> dict[str, Any] | None:
    for step in sorted(run.metrics.keys() & other.metrics.keys()):
        a, b = run.metrics[step], other.metrics[step]
        shared = [name for name in sorted(a.keys() & b.keys()) if not name.startswith(_VOLATILE_PREFIXES)]
        if different := [name for name in shared if not np.array_equal(a[name], b[name], equal_nan=True)]:
            return {"step": step, "names": different[:8]}
    return None
