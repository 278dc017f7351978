"""Where two runs part: the first step, rollout and token that are not the same in both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megarl.view.rollout_files import Notes, groups_of, lists_of, open_parts, steps_of
from megarl.view.run_data import RunData

_NOT_THE_SAME = ("time/", "perf/", "memory/")
"""Beginnings of metrics that no two runs have alike."""


def parting(one: RunData, other: RunData) -> dict[str, Any]:
    """{steps: how many both have, tokens: {step, number, token, ids} or None, metrics: {step, names} or None}; `token`
    is a place among all tokens of the rollout, `ids` are those there, -1 where one has ended."""
    notes = Notes()
    steps = sorted(set(steps_of(one.path, notes)) & set(steps_of(other.path, notes)))
    tokens = next((found for step in steps if (found := _first(one.path, other.path, step, notes))), None)
    return {"steps": len(steps), "tokens": tokens, "metrics": _first_metrics(one, other)}


def _first(one: Path, other: Path, step: int, notes: Notes) -> dict[str, Any] | None:
    mine, theirs = _tokens(one, step, notes), _tokens(other, step, notes)
    for number in sorted(mine.keys() & theirs.keys()):
        a, b = mine[number], theirs[number]
        shared = min(len(a), len(b))
        unlike = np.flatnonzero(a[:shared] != b[:shared])
        if len(unlike) or len(a) != len(b):
            at = int(unlike[0]) if len(unlike) else shared
            ids = [int(ids[at]) if at < len(ids) else -1 for ids in (a, b)]
            return {"step": step, "number": number, "token": at, "ids": ids}
    return None


def _tokens(run_dir: Path, step: int, notes: Notes) -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    for part in open_parts(run_dir, step, notes):
        if "token_ids" not in part.names:
            continue
        for _, table in groups_of(part, ("number", "token_ids"), notes):
            ids, ends = lists_of(table, "token_ids")
            for row, number in enumerate(table.column("number").to_pylist()):
                found[number] = ids[ends[row] : ends[row + 1]]
    return found


def _first_metrics(one: RunData, other: RunData) -> dict[str, Any] | None:
    for step in sorted(one.metrics.keys() & other.metrics.keys()):
        a, b = one.metrics[step], other.metrics[step]
        shared = [name for name in sorted(a.keys() & b.keys()) if not name.startswith(_NOT_THE_SAME)]
        if unlike := [
            name for name in shared if a[name] != b[name] and not (a[name] != a[name] and b[name] != b[name])
        ]:
            return {"step": step, "names": unlike[:8]}
    return None
