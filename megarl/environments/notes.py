"""A log of what goes wrong inside of tools and environments, of which the policy reads only a line."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

_OF_A_KIND = 10  # an untrained policy can do the same thing wrong a million times
_MOST_KINDS = 100


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
