"""Render the page: one offline HTML file, and files beside it for data that is loaded on demand.

Data comes in named blocks. Inline blocks are script elements of a type that browsers do not execute; others are scripts
`<name>.js` in a folder beside the page, or from the server, that pass the same JSON to the page. The page's scripts
treat all of it as text. Its content security policy admits only these scripts, by hash, and what they load themselves.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from megarl.observe.rollout_log import evaluation_folder
from megarl.utils.text import write_atomically
from megarl.view.column_codec import to_json
from megarl.view.divergence import find_divergence
from megarl.view.prompt_texts import PromptTexts
from megarl.view.rollout_details import Detail, TokenDecoder, load_decoder, read_details, tokenizer_folders
from megarl.view.rollout_files import Notes
from megarl.view.rollout_index import Index, IndexReader
from megarl.view.run_data import RunData, read_run, read_texts

SCRIPTS = (
    *("blocks", "elements", "query", "grid", "live", "curves", "phases", "search", "table", "tokens", "prompts"),
    *("compare", "configuration", "files", "main"),
)
"""MegaRL's scripts in load order."""
MAX_INLINE_BYTES = 12 << 20
"""Size limit of inline rollout indices; larger ones go to a file beside the page."""
MAX_INLINE_PROMPTS = 1 << 18
"""Size limit of inline beginnings of prompts, in characters; only one view needs them."""
TOKENS_PER_FILE = 50_000
DEFAULT_DETAILS = 20_000
"""Default number of rollouts whose tokens are written beside the page."""
EVALUATION_SHARE = 0.25
"""Share of those that evaluations get at most."""
EVALUATION_PREFIX = "eval-"
"""Prefix of the names of blocks about rollouts of evaluations."""
FILE_KINDS = ("tokens", "index", "prompts", f"{EVALUATION_PREFIX}tokens", f"{EVALUATION_PREFIX}index")
"""Beginnings of the names of files beside the page."""

SpanLoader = Callable[[Path], "Mapping[str, Any] | None"]
"""Loads the timeline of a run folder; None if it has none."""


class RunReaders(NamedTuple):
    """Cached readers of a run folder, for repeated loads."""

    training: IndexReader
    evaluation: IndexReader

    @staticmethod
    def create(path: Path) -> RunReaders:
        return RunReaders(IndexReader(path), IndexReader(evaluation_folder(path)))


def load(path: Path, load_spans: SpanLoader | None = None, readers: RunReaders | None = None) -> RunData:
    """Load a run folder with its rollouts and timeline. Raises ConfigError if it does not exist.

    Args:
        readers: of this folder.
    """
    run = read_run(path)
    readers = readers or RunReaders.create(path)
    run.index = readers.training.read()
    if evaluation_folder(path).is_dir():  # most runs have none
        run.evaluations = readers.evaluation.read()
        run.notes += run.evaluations.notes
    if len(run.index) and not tokenizer_folders(path):
        run.notes.append(f"{path}: there is no tokenizer at its model.path, nor an export; tokens are shown as numbers")
    if run.generates_rollouts:
        run.notes += run.index.notes
    run.spans = None if load_spans is None else load_spans(path)
    return run


def find_divergences(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Compare the first run with each other one."""
    return [find_divergence(runs[0], other) for other in runs[1:]]


def build_overview(runs: Sequence[RunData], divergences: list[dict[str, Any]], live: bool = False) -> dict[str, Any]:
    """Return the `overview` block, all that the first view needs. divergences: the runs' `find_divergences`."""
    return {"runs": [run.to_dict() for run in runs], "is_live": live, "divergences": divergences}


def render_page(blocks: Mapping[str, Any], folder: str, title: str) -> str:
    """Render the page. folder: relative URL, ending in a slash, of the files beside it."""
    style = _static("uPlot.min.css") + _static("style.css")
    scripts = [_static("uPlot.iife.min.js"), *(_static(f"{name}.js") for name in SCRIPTS)]
    hashes = " ".join(map(_hash, scripts))
    policy = (
        f"default-src 'none'; script-src {hashes} 'strict-dynamic'; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = {**blocks, "page": {"folder": folder, "title": title}}
    opening = '<script type="application/json" id="block-'
    parts = [f'{opening}{name}">{to_json(value)}</script>' for name, value in data.items()]
    head = f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n<title>{escape(title)}</title>'
    body = "\n".join([*parts, *(f"<script>{text}</script>" for text in scripts)])
    template = _static("page.html")
    return template.replace("<!--HEAD-->", f"{head}\n<style>{style}</style>").replace("<!--BODY-->", body)


def render_block(name: str, value: Any) -> str:
    """Render a script that passes a block to the page."""
    return f'megarl.receiveBlock("{name}", {to_json(value)});\n'


def write_page(runs: Sequence[RunData], file: Path, max_rollouts: int = DEFAULT_DETAILS) -> dict[str, int]:
    """Write the page, and its files into `<name>_files`.

    Args:
        max_rollouts: number of rollouts, over all runs, whose tokens are written.

    Returns:
        `page` and `beside`, bytes of the page and of its files, and `rollouts`, the number of rollouts with tokens.

    Raises:
        OSError: if they cannot be written.
    """
    folder = file.with_name(f"{file.stem}_files")
    folder.mkdir(exist_ok=True)
    for kind in FILE_KINDS:  # of the page that is overwritten
        for old_file in folder.glob(f"{kind}-*.js"):
            old_file.unlink()
    blocks: dict[str, Any] = {"overview": build_overview(runs, find_divergences(runs))}
    totals = {"beside": 0, "rollouts": 0}

    def write_beside(name: str, value: Any) -> None:
        totals["beside"] += _write(folder / f"{name}.js", render_block(name, value))

    for run_index, run in enumerate(runs):
        decoder, notes = TokenDecoder(load_decoder(run.path)), Notes()
        budget = max_rollouts // len(runs)
        num_evaluated = min(len(run.evaluations), int(budget * EVALUATION_SHARE))
        for prefix, run_dir, index, num_details in (
            ("", run.path, run.index, budget - num_evaluated),
            (EVALUATION_PREFIX, evaluation_folder(run.path), run.evaluations, num_evaluated),
        ):
            files_by_step: dict[str, list[list[int]]] = {}
            for step, numbers in select_rollouts(index, num_details).items():
                parts = split_into_files(read_details(run_dir, step, numbers, decoder, notes))
                for file_index, part in enumerate(parts):
                    write_beside(f"{prefix}tokens-{run_index}-{step}-{file_index}", part)
                    files_by_step.setdefault(str(step), []).append([detail["number"] for detail in part])
                    totals["rollouts"] += len(part)
            blocks[f"{prefix}files-{run_index}"] = files_by_step
            name, content = f"{prefix}index-{run_index}", index.to_dict()
            if sum(len(column["data"]) for column in content["columns"].values()) <= MAX_INLINE_BYTES // len(runs):
                blocks[name] = content
            else:
                write_beside(name, content)
        blocks["overview"]["runs"][run_index]["notes"] += [note for note in notes if note not in run.notes]
        blocks[f"texts-{run_index}"] = read_texts(run.path)
        name, texts = f"prompts-{run_index}", PromptTexts(run.path).read(run.index)
        if sum(map(len, texts)) <= MAX_INLINE_PROMPTS // len(runs):
            blocks[name] = texts
        else:
            write_beside(name, texts)
    if not any(folder.iterdir()):
        folder.rmdir()
    title = "MegaRL: " + ", ".join(run.name for run in runs)
    return {"page": _write(file, render_page(blocks, f"{quote(folder.name)}/", title)), **totals}


def select_rollouts(index: Index, max_rollouts: int) -> dict[int, set[int] | None]:
    """Select at most `max_rollouts` rollouts whose tokens are shown: their numbers by step, None for a whole step.

    If not all fit, select the whole last and first steps as far as possible, and an equal number of best and worst
    rollouts of each other step.
    """
    step, number, reward = (index.columns[name] for name in ("step", "number", "reward"))
    steps = sorted(set(step.tolist()))
    if len(index) <= max_rollouts:
        return dict.fromkeys(steps)
    step_rows = np.split(np.arange(len(index)), np.searchsorted(step, steps[1:]))  # the index is sorted by step
    rows = dict(zip(steps, step_rows, strict=True))
    chosen: dict[int, set[int] | None] = {}
    budget = max_rollouts
    for s in dict.fromkeys((steps[-1], steps[0])):
        if len(rows[s]) <= budget // 2:
            chosen[s] = None
            budget -= len(rows[s])
    others = [s for s in steps if s not in chosen]
    per_step = budget // max(1, len(others))
    for s in others:
        order = rows[s][np.argsort(reward[rows[s]], kind="stable")]
        num_best = per_step - per_step // 2
        selected = {*order[: per_step // 2], *order[max(0, len(order) - num_best) :]}
        if selected:
            chosen[s] = set(number[list(selected)].tolist())
    return dict(sorted(chosen.items()))


def split_into_files(details: Iterable[Detail]) -> Iterator[list[Detail]]:
    """Split into lists of about `TOKENS_PER_FILE` tokens."""
    part: list[Detail] = []
    tokens = 0
    for detail in details:
        part.append(detail)
        tokens += len(detail["token_ids"])
        if tokens >= TOKENS_PER_FILE:
            yield part
            part, tokens = [], 0
    if part:
        yield part


def _static(name: str) -> str:
    return (files("megarl.view") / "static" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _write(file: Path, text: str) -> int:
    write_atomically(file, text)
    return len(text.encode())
