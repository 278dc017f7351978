"""Every page: links lead somewhere, keys exist, Python compiles, errors are quoted as the code has them."""

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

from pages import COMING, COMING_KEYS, ROOT, anchors, blocks, links, pages, spans  # noqa: E402

from megarl.config import RENAMED_KEYS, Config  # noqa: E402

pytestmark = [pytest.mark.alone, pytest.mark.nightly]

PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages()]
SECTIONS = {field.name for field in fields(Config)}
FREE = ("model.megatron", "rollout.sglang", "train.ddp", "roles", "placement", "options", "expect", "critic.parallel")
"""Keys of others, and mappings of the reader's own."""
FREE += ("reward.weights", "guards.bands", "loss.options", "data.mixture_weights")
ENDS = {"py", "md", "yaml", "json", "jsonl", "safetensors", "parquet", "sh", "pt", "txt", "html"}
OBJECTS = {f"rollout.{name}" for name in ("prompt", "answer", "messages", "turns", "status", "update_weights")}
"""Of values and roles that have a section's name."""


@cache
def known() -> frozenset[str]:
    """Every key and every section, dotted."""

    def walk(value: Any, prefix: str) -> list[str]:
        result = []
        for field in fields(value):
            inner = getattr(value, field.name)
            result.append(prefix + field.name)
            if is_dataclass(inner):
                result += walk(inner, f"{prefix}{field.name}.")
        return result

    return frozenset(walk(Config(), ""))


def unknown(key: str) -> bool:
    if key in known() or key in COMING_KEYS or key.rpartition(".")[2] in ENDS:
        return False
    return not any(key == free or key.startswith(free + ".") for free in (*FREE, *OBJECTS))


def keys(span: str) -> list[str]:
    sections = "|".join(sorted(SECTIONS - {"algorithm"}))
    return re.findall(rf"(?<![\w./@-])((?:{sections})(?:\.[a-z][a-z_0-9]*)+)(?![\w(/])", span)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
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
    ours = text
    if page.name == "names.md":  # the other columns have the keys of others
        ours = "\n".join(re.findall(r"^\| (.*?) \|", text, re.MULTILINE))
    former = RENAMED_KEYS if page.name == "CHANGELOG.md" else {}
    wrong = [key for span in spans(ours) for key in keys(span) if unknown(key) and key not in former]
    for block in blocks(text):
        if block.language == "yaml" and block.title in ("config", "control"):
            tree = yaml.safe_load(block.text)
            wrong += [name for name in tree if name not in SECTIONS]
            for section, values in tree.items():
                if isinstance(values, dict) and is_dataclass(getattr(Config(), section)):
                    wrong += [f"{section}.{name}" for name in values if unknown(f"{section}.{name}")]
    assert not wrong, f"{page}: {wrong}"


def test_a_wrong_key_would_be_found() -> None:
    assert keys("train.nonsense=1 and rollout.tp") == ["train.nonsense", "rollout.tp"]
    assert unknown("train.nonsense") and not unknown("rollout.tp") and not unknown("model.megatron.fp8")


@pytest.mark.parametrize("page", PAGES)
def test_python_compiles(page: Path) -> None:
    for number, block in enumerate(blocks(page.read_text())):
        if block.language == "python":
            compile(block.text, f"{page}, block {number}", "exec")


@pytest.mark.parametrize("page", PAGES)
def test_files_that_it_names_are_there(page: Path) -> None:
    """As `configs/x.yaml`, `tools/x.py`, `docs/x.md`, from the top."""
    for span in spans(page.read_text()):
        if re.fullmatch(r"(configs|tools|launch|slurm|docs|megarl)/[a-z\d_./]+\.\w+", span) and span not in COMING:
            assert (ROOT / span).exists(), f"{page}: {span}"


@cache
def said() -> tuple[str, ...]:
    """Every text of the program, with a NUL where a value is put in."""
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


def in_the_code(quoted: str) -> bool:
    """Whether its parts between ` ... ` or `...` are in one text of the program, in this order."""
    parts = [re.escape(part) for part in re.split(r"\s?\.\.\.\s?", quoted) if part]
    pattern = re.compile(".*?".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in said())


def test_errors_are_quoted_as_they_are() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = [item for row in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) for item in re.findall(r"`([^`]+)`", row)]
    quoted = [item for item in quoted if " " in item]
    wrong = [item for item in quoted if not in_the_code(item)]
    assert not wrong, wrong
    assert len(quoted) > 20 and not in_the_code("a line that nobody says")


def test_every_page_is_linked_to_from_the_readme() -> None:
    """At once, or from a page that it links to."""
    seen, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in seen:
            continue
        seen.add(page)
        text = page.read_text()
        near = [page.parent / span for span in spans(text) if span.endswith(".md")]
        near += [ROOT / span for span in spans(text) if span.endswith(".md")]
        near += [ROOT / "megarl" / span for span in spans(text) if span.endswith(".md")]
        near += [page.parent / link.partition("#")[0] for link in links(text) if not re.match(r"[a-z]+:", link)]
        left += [item.resolve() for item in near if item.suffix == ".md" and item.is_file()]
    assert not set(pages()) - seen
