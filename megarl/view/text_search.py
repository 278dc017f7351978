"""Search the text of recorded rollouts: what follows their prompt, answers and results of tools alike.

Nothing is indexed in advance. A search reads the conversations of one step after the other, the newest first, and ends
after a page of hits or a time limit; the next page continues from there. Columnar matching sorts out most rollouts
before their JSON is parsed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from megarl.utils import exact_json
from megarl.utils.text import one_line
from megarl.view.column_codec import finite_or_none
from megarl.view.query import Condition
from megarl.view.rollout_details import count_shared, format_message
from megarl.view.rollout_files import READ_ERRORS, Notes, iter_groups, open_parts, read_group
from megarl.view.rollout_index import Index

PAGE_HITS = 100
"""Hits per page."""
PAGE_S = 2.0
"""Seconds after which a page ends at the next step."""
CHARS_BEFORE, CHARS_AFTER = 60, 120
"""Characters of a snippet around its match."""
NEWEST, NEWEST_CHARS = 8, 300
"""Rollouts of `read_newest`, and characters of each."""
_PIECE = re.compile(r"[A-Za-z0-9]+(?: [A-Za-z0-9]+)*")
"""Text that is the same in a message and in its JSON."""


def search(
    run_dir: Path,
    index: Index,
    text: str,
    condition: Condition | None = None,
    after: tuple[int, int] | None = None,
    page_hits: int = PAGE_HITS,
    page_s: float = PAGE_S,
) -> dict[str, Any]:
    """Return a page of rollouts whose conversation after the prompt contains `text`, in any case.

    Args:
        index: the rollouts of `run_dir`.
        condition: search only rollouts that satisfy it.
        after: `next` of the previous page.

    Returns:
        - hits: [{step, number, count, role, before, match, after}], by descending step and ascending number; `count`
          matches, of which the first is shown with the text around it.
        - searched: number of rollouts that this page covers.
        - next: [step, number] of the last of them; None if there are no further ones.
        - notes: problems of reading.
    """
    deadline = time.monotonic() + page_s
    pattern = re.compile(re.escape(text), re.IGNORECASE)
    hits: list[dict[str, Any]] = []
    searched, notes, position = 0, Notes(), None if after is None else [*after]
    for step, numbers in _iter_steps(index, condition, after):
        if searched and (len(hits) >= page_hits or time.monotonic() > deadline):
            return {"hits": hits, "searched": searched, "next": position, "notes": list(notes)}
        step_hits = sorted(_search_step(run_dir, step, numbers, pattern, text, notes), key=lambda hit: hit["number"])
        has_room = len(hits) + len(step_hits) <= page_hits
        hits += step_hits[: page_hits - len(hits)]
        last = int(numbers[-1]) if has_room else hits[-1]["number"]
        searched += int(np.searchsorted(numbers, last, "right"))
        position = [step, last]
        if not has_room:
            return {"hits": hits, "searched": searched, "next": position, "notes": list(notes)}
    return {"hits": hits, "searched": searched, "next": None, "notes": list(notes)}


def _iter_steps(
    index: Index, condition: Condition | None, after: tuple[int, int] | None
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the steps, the newest first, with the ascending numbers of their rollouts that satisfy `condition`."""
    steps, numbers = index.columns["step"], index.columns["number"]
    for step in np.unique(steps)[::-1].tolist():
        if after is not None and step > after[0]:
            continue
        rows: Sequence[int] = range(int(np.searchsorted(steps, step)), int(np.searchsorted(steps, step, "right")))
        if after is not None and step == after[0]:
            rows = [row for row in rows if numbers[row] > after[1]]
        if condition is not None:
            rows = [row for row, values in zip(rows, index.iter_rows(rows), strict=True) if condition(values)]
        if len(rows):
            yield step, numbers[list(rows)]


def _search_step(
    run_dir: Path, step: int, numbers: np.ndarray, pattern: re.Pattern[str], text: str, notes: Notes
) -> Iterator[dict[str, Any]]:
    for part in open_parts(run_dir, step, notes):
        for group, table in iter_groups(part, ["number"], notes):
            mask = np.isin(table.column("number").to_numpy(), numbers)
            texts = read_group(part, group, ["number", "messages", "prompt_messages"], notes) if mask.any() else None
            if texts is None or "messages" not in texts.column_names:
                continue
            try:
                for row in _select_candidates(texts.filter(pa.array(mask)), text).to_pylist():
                    if (hit := _find_match(row, pattern)) is not None:
                        yield {"step": step, "number": row["number"], **hit}
            except (*READ_ERRORS, RecursionError) as error:
                notes.add(f"{part.path}: some rollouts cannot be searched: {one_line(error, 200)}")


def _select_candidates(table: pa.Table, text: str) -> pa.Table:
    """Return the rows whose JSON has the longest pieces of the text that JSON does not change."""
    for piece in sorted(_PIECE.findall(text), key=len)[-2:]:
        table = table.filter(pc.match_substring(table.column("messages"), piece, ignore_case=True))
    return table


def _find_match(row: dict[str, Any], pattern: re.Pattern[str]) -> dict[str, Any] | None:
    messages = exact_json.loads(row["messages"]) or []
    prompt = exact_json.loads(row.get("prompt_messages") or "[]")
    answer = messages[count_shared(messages, prompt) :]
    first: dict[str, Any] | None = None
    count = 0
    for message in map(format_message, answer):
        for match in pattern.finditer(message["text"]):
            count += 1
            if count == 1:
                begin, end = match.span()
                content = message["text"]
                first = {
                    "role": message["role"],
                    "before": ("…" if begin > CHARS_BEFORE else "") + content[max(0, begin - CHARS_BEFORE) : begin],
                    "match": match[0],
                    "after": content[end : end + CHARS_AFTER] + ("…" if end + CHARS_AFTER < len(content) else ""),
                }
    return None if first is None else {**first, "count": count}


def read_newest(run_dir: Path, index: Index, count: int = NEWEST) -> list[dict[str, Any]]:
    """Return {step, number, reward, status, text} of the first rollouts of the last step, where `text` is the end of
    the conversation. Rollouts that cannot be read are left out."""
    if not len(index):
        return []
    step = int(index.columns["step"][-1])
    begin = int(np.searchsorted(index.columns["step"], step))
    rows = range(begin, min(begin + count, len(index)))
    numbers = index.columns["number"][begin : begin + count]
    by_number = dict(zip(numbers.tolist(), index.iter_rows(rows), strict=True))
    newest, notes = [], Notes()
    for part in open_parts(run_dir, step, notes):
        for group, table in iter_groups(part, ["number"], notes):
            mask = np.isin(table.column("number").to_numpy(), numbers)
            texts = read_group(part, group, ["number", "messages"], notes) if mask.any() else None
            for row in [] if texts is None else texts.filter(pa.array(mask)).to_pylist():
                try:
                    messages = list(map(format_message, exact_json.loads(row.get("messages") or "[]")))
                except (*READ_ERRORS, RecursionError):
                    continue
                reward, status = (by_number[row["number"]][name] for name in ("reward", "status"))
                text = messages[-1]["text"][-NEWEST_CHARS:] if messages else ""
                entry = {"step": step, "number": row["number"], "status": status, "text": text}
                newest.append(entry | {"reward": finite_or_none(reward)})
    return sorted(newest, key=lambda entry: entry["number"])
