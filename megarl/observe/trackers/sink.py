"""What an adapter of a tracker is, what it is told of the run, and where it stands."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

PROJECT = "megarl"
"""Under which runs are listed, unless the tracker's own environment variable says another."""
COLUMNS = ("step", "prompt", "answer", "reward", "tokens", "status")
"""Of a table of rollouts."""

_ODD = re.compile(r"[^\w\-./ ]")
_LONGEST = 250
_SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|WEBHOOK|URI|URL)S?($|_)", re.I)
_IN_URL = re.compile(r"//[^/\s@]+@")

Row = tuple[Any, ...]


class Sink(Protocol):
    """A run of a tracker. Anything here may raise, and may take its time: it is called in a thread of its own."""

    appends: ClassVar[bool]
    """Whether what it was given stays, so that a step which is taken again must not be given twice."""
    id: str
    """By which it goes on with the run when that is resumed."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, text: str) -> None:
        """An alarm."""

    def table(self, step: int, rows: Sequence[Row]) -> None:
        """Rollouts, by `COLUMNS`."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Told:
    """What a tracker is told of a run when it is opened. first: the step of the first figures. id: that of its run so
    far, empty for a new one. config: without secrets."""

    run_dir: Path
    first: int = 0
    id: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name or PROJECT


class Standing:
    """How far a tracker is with a run, in `<run>/trackers/NAME.json`, so that a resumed run goes on there."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.id, self.step, self._names = "", -1, set[str]()
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            self.id, self.step, self._names = str(found["id"]), int(found["step"]), set(map(str, found["names"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # a new run, or a file that a crash cut short: then steps may be there twice

    def new(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Those of the figures that the tracker was not given yet: steps only go on."""
        if step < self.step:
            return {}
        return {name: value for name, value in values.items() if step > self.step or name not in self._names}

    def keep(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """That it has them, as the run `name`."""
        self._names = {*values} | (self._names if step == self.step else set())
        self.id, self.step = name, step
        self._file.parent.mkdir(exist_ok=True)
        partial = self._file.with_suffix(".tmp")
        text = json.dumps({"id": self.id, "step": self.step, "names": sorted(self._names)})
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._file)


def plain_name(name: str) -> str:
    """A metric's name as every tracker takes it: parts of letters, digits and `_-. `, with `/` between."""
    parts = [part.strip(" .") or "_" for part in _ODD.sub("_", name).split("/")]
    return "/".join(parts)[:_LONGEST].rstrip("/ .")


def without_secrets(text: str) -> str:
    """What a library says of a failure, in a line, without what this process's environment or a URL has of secrets."""
    line = " ".join(text.split())
    secrets = {value for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= 6}
    for secret in sorted(secrets, key=len, reverse=True):
        line = line.replace(secret, "***")
    return _IN_URL.sub("//***@", line)[:300]
