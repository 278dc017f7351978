"""What the pages say: their commands, links, keys, code and quotations, for the tests beside this file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

COMING: set[str] = set()
"""Programs that a page may name before they are there. One that is there is held to what the pages say of it."""
COMING_KEYS: set[str] = set()


def pages() -> list[Path]:
    """Every page of the project, in order of its path."""
    result = ROOT.rglob("*.md")
    return sorted(p for p in result if not any(part[0] == "." or part == "runs" for part in p.relative_to(ROOT).parts))


class Block(NamedTuple):
    """A fenced block: the first word behind the fence, the rest of that line, its lines."""

    language: str
    title: str
    text: str


_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[Block]:
    result = []
    for head, body in _FENCE.findall(text):
        language, _, title = head.strip().partition(" ")
        result.append(Block(language, title, body))
    return result


def prose(text: str) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", text)


class Command(NamedTuple):
    """Words of a command, without variables that are set for it."""

    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """What is run: `-m megarl.train`, `tools/report.py`, `launch/quickstart.sh`, or a program's name."""
        words = list(self.words)
        if words[0].rpartition("/")[2].startswith("python"):
            words = words[1:]
            return f"-m {words[1]}" if words[0] == "-m" else words[0]
        if words[0] in ("bash", "sbatch"):
            return next((word for word in words[1:] if word.endswith(".sh")), words[0])
        return words[0]

    @property
    def arguments(self) -> list[str]:
        """What the program is given."""
        name = self.program.removeprefix("-m ")
        return list(self.words[self.words.index(name) + 1 :])


def commands(text: str) -> Iterator[Command]:
    """Of the shell's blocks, and of indented lines that begin as a command does."""
    events = [block.text for block in blocks(text) if block.language == "bash"]
    remaining = prose(text).replace("\\\n", " ")
    events += re.findall(r"^ {4}((?:[A-Z_]+=\S* )*(?:\.venv/bin/|bash |sbatch ).*)$", remaining, re.MULTILINE)
    events += re.findall(r"^\$ (.*)$", "\n".join(b.text for b in blocks(text) if not b.language), re.MULTILINE)
    for lines in events:
        for line in lines.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield Command(tuple(words))


def spans(text: str) -> list[str]:
    """What stands in single backticks."""
    return re.findall(r"`([^`\n]+)`", prose(text))


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(text))


def anchors(text: str) -> set[str]:
    """Names of the headings, as they are linked to."""
    result = set()
    for heading in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE):
        result.add(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    return result
