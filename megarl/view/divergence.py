"""Where two runs part: the first step, rollout and token that are not the same in both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megarl.view.rollout_files import Notes, flatten_lists, iter_groups, list_steps, open_parts
from megarl.view.run_data import RunData

_VOLATILE_PREFIXES = ("time/", "perf/", "memory/")
"""Beginnings of metrics that no two runs have alike."""


def find_divergence(one: RunData, other: RunData) -> dict[str, Any]:
    """{steps: how many both have, tokens: {step, number, token, ids} or None, metrics: {step, names} or None}; `token`
    is a place among all tokens of the rollout, `ids` are those there, -1 where one has ended."""
    notes = Notes()
    steps = sorted(set(list_steps(one.path, notes)) & set(list_steps(other.path, notes)))
    tokens = next(
        (found for step in steps if (found := _first_token_difference(one.path, other.path, step, notes))), None
    )
    return {"steps": len(steps), "tokens": tokens, "metrics": _first_metric_difference(one, other)}


def _first_token_difference(one: Path, other: Path, step: int, notes: Notes) -> dict[str, Any] | None:
    mine, theirs = _read_tokens(one, step, notes), _read_tokens(other, step, notes)
    for number in sorted(mine.keys() & theirs.keys()):
        a, b = mine[number], theirs[number]
        shared = min(len(a), len(b))
        unlike = np.flatnonzero(a[:shared] != b[:shared])
        if len(unlike) or len(a) != len(b):
            at = int(unlike[0]) if len(unlike) else shared
            ids = [int(ids[at]) if at < len(ids) else -1 for ids in (a, b)]
            return {"step": step, "number": number, "token": at, "ids": ids}
    return None


def _read_tokens(run_dir: Path, step: int, notes: Notes) -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    for part in open_parts(run_dir, step, notes):
        if "token_ids" not in part.names:
            continue
        for _, table in iter_groups(part, ("number", "token_ids"), notes):
            ids, ends = flatten_lists(table, "token_ids")
            for row, number in enumerate(table.column("number").to_pylist()):
                found[number] = ids[ends[row] : ends[row + 1]]
    return found


def _first_metric_difference(one: RunData, other: RunData) -> dict[str, Any] | None:
    for step in sorted(one.metrics.keys() & other.metrics.keys()):
        a, b = one.metrics[step], other.metrics[step]
        shared = [name for name in sorted(a.keys() & b.keys()) if not name.startswith(_VOLATILE_PREFIXES)]
        if unlike := [
            name for name in shared if a[name] != b[name] and not (a[name] != a[name] and b[name] != b[name])
        ]:
            return {"step": step, "names": unlike[:8]}
    return None
