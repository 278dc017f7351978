"""Documentation pages: links, keys, files, Python blocks and quoted errors."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from pages import PLANNED, PLANNED_KEYS, ROOT, anchors, blocks, links, pages, spans  # noqa: E402

from megarl.config import RENAMED_KEYS, Config  # noqa: E402

pytestmark = [pytest.mark.alone, pytest.mark.nightly]

PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages()]
SECTIONS = {field.name for field in fields(Config)}
FREE_FORM = (
    "model.megatron",
    "rollout.sglang",
    "train.ddp",
    "roles",
    "placement",
    "options",
    "expect",
    "critic.parallel",
)
"""Sections with free-form keys."""
FREE_FORM += ("reward.weights", "guards.bands", "loss.options", "data.mixture_weights")
SUFFIXES = {"py", "md", "yaml", "json", "jsonl", "safetensors", "parquet", "sh", "pt", "txt", "html"}
ATTRIBUTES = {f"rollout.{name}" for name in ("prompt", "answer", "messages", "turns", "status", "update_weights")}
"""Attributes of objects named like a section."""


@cache
def known_keys() -> frozenset[str]:
    """Return all keys and sections, dotted."""

    def walk(value: Any, prefix: str) -> list[str]:
        result = []
        for field in fields(value):
            nested = getattr(value, field.name)
            result.append(prefix + field.name)
            if is_dataclass(nested):
                result += walk(nested, f"{prefix}{field.name}.")
        return result

    return frozenset(walk(Config(), ""))


def is_unknown(key: str) -> bool:
    if key in known_keys() or key in PLANNED_KEYS or key.rpartition(".")[2] in SUFFIXES:
        return False
    return not any(key == section or key.startswith(section + ".") for section in (*FREE_FORM, *ATTRIBUTES))


def find_keys(span: str) -> list[str]:
    sections = "|".join(sorted(SECTIONS - {"algorithm"}))
    return re.findall(rf"(?<![\w./@-])((?:{sections})(?:\.[a-z][a-z_0-9]*)+)(?![\w(/])", span)


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page: Path) -> None:
    text = page.read_text()
    for link in links(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page}: {link}"
        if anchor:
            result = anchors(target.read_text())
            assert anchor in result, f"{page}: {link}; there are {sorted(result)}"


@pytest.mark.parametrize("page", PAGES)
def test_keys_exist(page: Path) -> None:
    text = page.read_text()
    checked_text = text
    if page.name == "names.md":  # the other columns have keys of other projects
        checked_text = "\n".join(re.findall(r"^\| (.*?) \|", text, re.MULTILINE))
    former = RENAMED_KEYS if page.name == "CHANGELOG.md" else {}
    unknown = [key for span in spans(checked_text) for key in find_keys(span) if is_unknown(key) and key not in former]
    for block in blocks(text):
        if block.language == "yaml" and (block.title in ("config", "control") or block.title.endswith(".yaml")):
            tree = yaml.safe_load(block.text)
            unknown += [name for name in tree if name not in SECTIONS]
            for section, values in tree.items():
                if isinstance(values, dict) and is_dataclass(getattr(Config(), section)):
                    unknown += [f"{section}.{name}" for name in values if is_unknown(f"{section}.{name}")]
    assert not unknown, f"{page}: {unknown}"


def test_detects_unknown_keys() -> None:
    assert find_keys("train.nonsense=1 and rollout.tp") == ["train.nonsense", "rollout.tp"]
    assert is_unknown("train.nonsense") and not is_unknown("rollout.tp") and not is_unknown("model.megatron.fp8")


@pytest.mark.parametrize("page", PAGES)
def test_python_compiles(page: Path) -> None:
    for number, block in enumerate(blocks(page.read_text())):
        if block.language == "python":
            compile(block.text, f"{page}, block {number}", "exec")


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: Path) -> None:
    """Such as `configs/x.yaml`, `tools/x.py`, `docs/x.md`, relative to the repository."""
    for span in spans(page.read_text()):
        if re.fullmatch(r"(configs|tools|launch|slurm|docs|megarl)/[a-z\d_./]+\.\w+", span) and span not in PLANNED:
            assert (ROOT / span).exists(), f"{page}: {span}"


@cache
def program_texts() -> tuple[str, ...]:
    """Return every string of the code, with NUL for interpolated values."""
    result = []
    for folder in ("megarl", "launch", "tools"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix == ".sh":
                result.append(file.read_text())
            if file.suffix != ".py":
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                    result.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    result.append(node.value)
    return tuple(result)


def is_in_code(error: str) -> bool:
    """Whether one string of the code contains the parts between `...` in this order."""
    parts = [re.escape(part) for part in re.split(r"\s?\.\.\.\s?", error) if part]
    pattern = re.compile(".*?".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in program_texts())


def test_troubleshooting_quotes_existing_messages() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted_errors = [
        item for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) for item in re.findall(r"`([^`]+)`", row)
    ]
    quoted_errors = [item for item in quoted_errors if " " in item]
    unknown = [item for item in quoted_errors if not is_in_code(item)]
    assert not unknown, unknown
    assert len(quoted_errors) > 20 and not is_in_code("a line that nobody says")


def test_readme_reaches_every_page() -> None:
    """Directly or through other pages."""
    visited, pending = set(), [ROOT / "README.md"]
    while pending:
        page = pending.pop()
        if page in visited:
            continue
        visited.add(page)
        text = page.read_text()
        linked_pages = [page.parent / span for span in spans(text) if span.endswith(".md")]
        linked_pages += [ROOT / span for span in spans(text) if span.endswith(".md")]
        linked_pages += [ROOT / "megarl" / span for span in spans(text) if span.endswith(".md")]
        linked_pages += [page.parent / link.partition("#")[0] for link in links(text) if not re.match(r"[a-z]+:", link)]
        pending += [item.resolve() for item in linked_pages if item.suffix == ".md" and item.is_file()]
    assert not set(pages()) - visited
