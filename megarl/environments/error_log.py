"""A log of what goes wrong inside of tools and environments, of which the policy reads only a line; and how often."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OF_A_KIND = 10  # an untrained policy can do the same thing wrong a million times
_MOST_KINDS = 100


@dataclass(frozen=True)
class Calls:
    """Of a tool: how often it was called, how many calls failed inside of it, and what the first of those said."""

    called: int = 0
    failed: int = 0
    first: str = ""

    def __add__(self, other: Calls) -> Calls:
        return Calls(self.called + other.called, self.failed + other.failed, self.first or other.first)

    def __sub__(self, before: Calls) -> Calls:
        """What came since, of which `first` is that of all where it is the same."""
        failed = self.failed - before.failed
        return Calls(self.called - before.called, failed, self.first if failed else "")


class Notes:
    """A few of each kind. file: None for no log."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._noted: Counter[tuple[str, str]] = Counter()

    def write(self, name: str, arguments: Any, what: str, kind: str, said: str = "") -> None:
        """A log that cannot be written must not end the run."""
        self._noted[name, kind] += 1
        if self._file is None or self._noted[name, kind] > _OF_A_KIND or len(self._noted) > _MOST_KINDS:
            return
        last = "; no more of this kind are noted" if self._noted[name, kind] == _OF_A_KIND else ""
        with contextlib.suppress(OSError, TypeError, ValueError, RecursionError):
            call = json.dumps(arguments)[:1000]
            text = f"--- {time.strftime('%F %T')} {name} {call}: {what[:1000]}{last}\n{said.strip()}\n"
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8", errors="replace") as file:
                file.write(text)
