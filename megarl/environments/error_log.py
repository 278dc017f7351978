"""Log errors inside tools and environments, of which the policy reads only a line, and count them."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_PER_KIND = 10  # an untrained policy can repeat the same error a million times
_MAX_KINDS = 100


@dataclass(frozen=True)
class ToolCallStats:
    """A tool's calls, how many failed inside it, and the first error."""

    num_calls: int = 0
    num_failed: int = 0
    first_error: str = ""

    def __add__(self, other: ToolCallStats) -> ToolCallStats:
        return ToolCallStats(
            self.num_calls + other.num_calls, self.num_failed + other.num_failed, self.first_error or other.first_error
        )

    def __sub__(self, before: ToolCallStats) -> ToolCallStats:
        """Return the difference since `before`; `first_error` is kept if any call failed since."""
        failed = self.num_failed - before.num_failed
        return ToolCallStats(self.num_calls - before.num_calls, failed, self.first_error if failed else "")


class ErrorLog:
    """Logs the first few errors of each kind. `file` is None for no log."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._counts: Counter[tuple[str, str]] = Counter()

    def write(self, name: str, arguments: Any, what: str, kind: str, output: str = "") -> None:
        """Append an error. A log that cannot be written must not end the run."""
        self._counts[name, kind] += 1
        if self._file is None or self._counts[name, kind] > _MAX_PER_KIND or len(self._counts) > _MAX_KINDS:
            return
        suffix = "; further ones are not logged" if self._counts[name, kind] == _MAX_PER_KIND else ""
        with contextlib.suppress(OSError, TypeError, ValueError, RecursionError):
            call = json.dumps(arguments)[:1000]
            text = f"--- {time.strftime('%F %T')} {name} {call}: {what[:1000]}{suffix}\n{output.strip()}\n"
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8", errors="replace") as file:
                file.write(text)
