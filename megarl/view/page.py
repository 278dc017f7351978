"""The page: one HTML file that needs no network, and the files beside it with what is looked at later.

A block of data has a name. Those of the page are script elements of a type that no browser runs; others are scripts
`<name>.js` of a folder beside it, or of the server, which hand over the same JSON. All of it is text to the page's
scripts, which are the only ones that its policy lets run: by their hashes, and what they load themselves.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from megarl.view.column_codec import to_json
from megarl.view.divergence import find_divergence
from megarl.view.rollout_details import Detail, TokenDecoder, load_decoder, read_details, tokenizer_folders
from megarl.view.rollout_files import Notes
from megarl.view.rollout_index import Index, IndexReader, read_index
from megarl.view.run_data import RunData, read_run

SCRIPTS = ("blocks", "query", "curves", "phases", "table", "tokens", "prompts", "compare", "main")
"""Ours, in their order."""
MAX_INLINE_BYTES = 12 << 20
"""Bytes of rollouts' figures that the page has in itself; more are in a file beside it."""
TOKENS_PER_FILE = 50_000
DEFAULT_DETAILS = 20_000
"""Rollouts that have their tokens beside the page, unless something else is asked for."""

SpanLoader = Callable[[Path], "Mapping[str, Any] | None"]
"""What is drawn of a run's timeline."""


@dataclass
class LoadedRun:
    """A run as the page has it."""

    run: RunData
    index: Index
    spans: Mapping[str, Any] | None = None

    @property
    def notes(self) -> list[str]:
        return [*self.run.notes, *self.index.notes]


def load(path: Path, spans: SpanLoader | None = None, reader: IndexReader | None = None) -> LoadedRun:
    """reader: of this folder, where it is read again and again. Raises ConfigError where there is no folder."""
    run = read_run(path)
    index = read_index(path) if reader is None else reader.read()
    if len(index) and not tokenizer_folders(path):
        run.notes.append(f"{path}: there is no tokenizer at its model.path, nor an export; tokens are shown as numbers")
    return LoadedRun(run, index, None if spans is None else spans(path))


def find_divergences(runs: Sequence[LoadedRun]) -> list[dict[str, Any]]:
    """Of the first run and each other."""
    return [find_divergence(runs[0].run, other.run) for other in runs[1:]]


def build_overview(
    runs: Sequence[LoadedRun], live: bool = False, parted: Sequence[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """All that the first view needs. parted: the runs' `find_divergences`, where they are known."""
    return {
        "runs": [
            {**one.run.to_dict(), "notes": one.notes, "spans": one.spans, "rollouts": len(one.index)} for one in runs
        ],
        "live": live,
        "partings": find_divergences(runs) if parted is None else list(parted),
    }


def render_page(blocks: Mapping[str, Any], folder: str, title: str) -> str:
    """The whole page. folder: where files beside it lie, as a relative address that ends in a slash."""
    style = _static("uPlot.min.css") + _static("style.css")
    scripts = [_static("uPlot.iife.min.js"), *(_static(f"{name}.js") for name in SCRIPTS)]
    allowed = " ".join(map(_hash, scripts))
    rules = "; ".join(
        (
            "default-src 'none'",
            f"script-src {allowed} 'strict-dynamic'",
            f"style-src {_hash(style)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    data = {**blocks, "page": {"folder": folder, "title": title}}
    opening = '<script type="application/json" id="block-'
    parts = [f'{opening}{name}">{to_json(value)}</script>' for name, value in data.items()]
    head = f'<meta http-equiv="Content-Security-Policy" content="{escape(rules)}">\n<title>{escape(title)}</title>'
    body = "\n".join([*parts, *(f"<script>{text}</script>" for text in scripts)])
    template = _static("page.html")
    return template.replace("<!--HEAD-->", f"{head}\n<style>{style}</style>").replace("<!--BODY-->", body)


def render_block(name: str, value: Any) -> str:
    """A script that hands a block to the page."""
    return f'megarl.take("{name}", {to_json(value)});\n'


def write_page(
    runs: Sequence[LoadedRun],
    file: Path,
    details: int = DEFAULT_DETAILS,
    said: Callable[[str], None] = lambda text: None,
) -> dict[str, int]:
    """Write the page and its files into `<name>_files`. details: rollouts of all runs that get their tokens there.
    Returns bytes of the page and of the files, and how many rollouts have their tokens. Raises OSError."""
    folder = file.with_name(f"{file.stem}_files")
    folder.mkdir(exist_ok=True)
    for pattern in ("tokens-*.js", "index-*.js"):  # of the page that is written over
        for old in folder.glob(pattern):
            old.unlink()
    blocks: dict[str, Any] = {"overview": build_overview(runs)}
    beside, whole = 0, 0
    for number, one in enumerate(runs):
        chosen = select_rollouts(one.index, details // len(runs))
        words, notes = TokenDecoder(load_decoder(one.run.path)), Notes()
        places: dict[str, list[list[int]]] = {}
        for step, numbers in chosen.items():
            said(f"{one.run.name}: tokens of step {step}")
            parts = split_into_files(read_details(one.run.path, step, numbers, words, notes))
            for at, part in enumerate(parts):
                name = f"tokens-{number}-{step}-{at}"
                beside += _write(folder / f"{name}.js", render_block(name, part))
                places.setdefault(str(step), []).append([detail["number"] for detail in part])
                whole += len(part)
        blocks["overview"]["runs"][number]["notes"] += [note for note in notes if note not in one.notes]
        blocks[f"places-{number}"] = places
        name, content = f"index-{number}", one.index.to_dict()
        if sum(len(column["data"]) for column in content["columns"].values()) <= MAX_INLINE_BYTES // len(runs):
            blocks[name] = content
        else:
            beside += _write(folder / f"{name}.js", render_block(name, content))
    if not any(folder.iterdir()):
        folder.rmdir()
    title = "MegaRL: " + ", ".join(one.run.name for one in runs)
    return {
        "page": _write(file, render_page(blocks, f"{quote(folder.name)}/", title)),
        "beside": beside,
        "rollouts": whole,
    }


def select_rollouts(index: Index, most: int) -> dict[int, set[int] | None]:
    """Numbers of rollouts by step whose tokens are shown; None for all of a step. Where not all of a run may be: the
    last step and the first whole, as far as that goes, and of each other the same number of its best and worst."""
    step, number, reward = (index.columns[name] for name in ("step", "number", "reward"))
    steps = sorted(set(step.tolist()))
    if len(index) <= most:
        return dict.fromkeys(steps)
    rows = {one: rows_of for one, rows_of in zip(steps, _rows(step, steps), strict=True)}
    chosen: dict[int, set[int] | None] = {}
    left = most
    for one in dict.fromkeys((steps[-1], steps[0])):
        if len(rows[one]) <= left // 2:
            chosen[one] = None
            left -= len(rows[one])
    others = [one for one in steps if one not in chosen]
    each = left // max(1, len(others))
    for one in others:
        order = rows[one][np.argsort(reward[rows[one]], kind="stable")]
        kept = [*order[: each // 2], *order[len(order) - (each - each // 2) :]] if each < len(order) else order
        if len(kept):
            chosen[one] = set(number[list(kept)].tolist())
    return dict(sorted(chosen.items()))


def split_into_files(details: Iterable[Detail]) -> Iterator[list[Detail]]:
    """In parts of about `TOKENS_PER_FILE`."""
    part: list[Detail] = []
    tokens = 0
    for detail in details:
        part.append(detail)
        tokens += len(detail["ids"])
        if tokens >= TOKENS_PER_FILE:
            yield part
            part, tokens = [], 0
    if part:
        yield part


def _rows(step: np.ndarray, steps: list[int]) -> list[np.ndarray]:
    ends = [*np.searchsorted(step, steps).tolist(), len(step)]  # the index is in the order of steps
    return [np.arange(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def _static(name: str) -> str:
    return (files("megarl.view") / "static" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _write(file: Path, text: str) -> int:
    content = text.encode()
    partial = file.with_name(f".{file.name}.part")
    try:
        partial.write_bytes(content)
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return len(content)
