"""Parse documentation pages: commands, links, code blocks, quotations and anchors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megarl.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]

PLANNED: set[str] = set()
"""Programs that a page may name before they exist."""
PLANNED_KEYS: set[str] = set()


def pages() -> list[Path]:
    """Return every page of the project, sorted by path."""
    result = ROOT.rglob("*.md")
    return sorted(p for p in result if not any(part[0] == "." or part == "runs" for part in p.relative_to(ROOT).parts))


class Block(NamedTuple):
    """A fenced block: language, the rest of the opening line, and the text."""

    language: str
    title: str
    text: str


_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[Block]:
    result = []
    for info, body in _FENCE.findall(text):
        language, _, title = info.strip().partition(" ")
        result.append(Block(language, title, body))
    return result


def files(text: str) -> dict[str, str]:
    """Return the files that a page shows: blocks with a file name after the language."""
    named = [(block.title.rpartition(" ")[2], block.text) for block in blocks(text)]
    return {name: content for name, content in named if "." in name}


def prose(text: str) -> str:
    """Return the page without its fenced blocks."""
    return _FENCE.sub("", text)


class Command(NamedTuple):
    """The words of a command, without leading variable assignments."""

    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """`-m megarl.train`, also of `megarl train`, `tools/bench.py`, `launch/quickstart.sh`, or a program's name."""
        words = list(self.words)
        if self.megarl_command:
            return f"-m {COMMANDS[self.megarl_command].module}"
        if words[0].rpartition("/")[2].startswith("python"):
            words = words[1:]
            return f"-m {words[1]}" if words[0] == "-m" else words[0]
        if words[0] in ("bash", "sbatch"):
            return next((word for word in words[1:] if word.endswith(".sh")), words[0])
        return words[0]

    @property
    def megarl_command(self) -> str:
        """`train` of `.venv/bin/megarl train my.yaml`; empty for another program."""
        first, second = (*self.words, "", "")[:2]
        return second if first.rpartition("/")[2] == "megarl" and second in COMMANDS else ""

    @property
    def arguments(self) -> list[str]:
        if self.megarl_command:
            return list(self.words[2:])
        name = self.program.removeprefix("-m ")
        return list(self.words[self.words.index(name) + 1 :])


def commands(text: str) -> Iterator[Command]:
    """Yield commands of bash blocks, of indented command lines and of `$` lines."""
    sources = [block.text for block in blocks(text) if block.language == "bash"]
    body_text = prose(text).replace("\\\n", " ")
    sources += re.findall(r"^ {4}((?:[A-Z_]+=\S* )*(?:\.venv/bin/|bash |sbatch ).*)$", body_text, re.MULTILINE)
    sources += re.findall(r"^\$ (.*)$", "\n".join(b.text for b in blocks(text) if not b.language), re.MULTILINE)
    for lines in sources:
        for line in lines.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield Command(tuple(words))


def spans(text: str) -> list[str]:
    """Return the texts in single backticks."""
    return re.findall(r"`([^`\n]+)`", prose(text))


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(text))


def anchors(text: str) -> set[str]:
    """Return the link anchors of the headings."""
    result = set()
    for heading in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE):
        result.add(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    return result
