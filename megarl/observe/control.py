"""Live settings: keys that the user may change while the run is going, through a file in the run folder.

    <run>/control.yaml        reward: {weights: {gsm8k: 0.4, model: 0.6}}

One rank reads the file at the start of each step; its values apply on all ranks from that step on. A key that is not in
the file, or no longer, keeps its value. If the file is invalid nothing changes, and a warning is logged once per
version of the file. Applied values are part of the checkpoint, so a resumed run keeps them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megarl.config import ConfigError, plain_yaml

CONTROL_FILE = "control.yaml"


class Controllable(Protocol):
    """A component with settings that may change during the run."""

    def controls(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return a parser per key: it converts a value from the file or raises ConfigError."""
        ...

    def set_control(self, key: str, value: Any) -> None: ...


class ControlUpdate(NamedTuple):
    """Values by key in the control file, or an error message and a digest of the content that has the error."""

    values: dict[str, Any]
    error: str = ""
    digest: str = ""


class Control:
    """Applies the control file to `controlled`. Created on every rank; `log` logs a line."""

    def __init__(self, run_dir: Path, controlled: Sequence[Controllable], log: Callable[[str], None]) -> None:
        self._file, self._log = run_dir / CONTROL_FILE, log
        self._keys = {
            key: (component, parse) for component in controlled for key, parse in component.controls().items()
        }
        self._applied: dict[str, Any] = {}
        """Values applied so far, as they are in the file."""
        self._last_digest = ""

    def read(self) -> ControlUpdate:
        """Read and parse the file. Any error in it rejects the whole file."""
        data = b""
        try:
            if not self._file.exists():
                return ControlUpdate({})
            if not self._file.is_file():  # reading a pipe would block
                problem = "is a folder" if self._file.is_dir() else "is not a regular file"
                raise ConfigError(f"{self._file} {problem}; put a YAML file there, or remove it")
            with self._file.open("rb") as file:
                data = file.read(plain_yaml.MAX_BYTES + 1)
            return ControlUpdate(self._parse(data))
        except ConfigError as error:
            return ControlUpdate({}, str(error), hashlib.blake2s(data or str(error).encode()).hexdigest())
        except OSError as error:
            return ControlUpdate({}, f"{self._file} cannot be read: {error.strerror}", f"{error.errno}")

    def apply(self, step: int, update: ControlUpdate) -> None:
        """Apply what the first rank has read. Called on all ranks at the start of a step."""
        for key, value in update.values.items():
            if key not in self._applied or self._applied[key] != value:
                self._log(f"{CONTROL_FILE}, from step {step} on: {key}={value}")
                self._apply_value(key, value)
        if update.error and update.digest != self._last_digest:
            self._log(f"warning: {update.error}; it changes nothing")
        self._last_digest = update.digest

    def _parse(self, data: bytes) -> dict[str, Any]:
        """Parse values by `section.key`. Raises ConfigError."""
        tree = plain_yaml.parse_bytes(data, str(self._file))
        if data and not data.endswith(b"\n"):
            raise ConfigError(f"{self._file} does not end with a line break: it may be incomplete")
        if not isinstance(tree, dict | None):
            raise ConfigError(f"{self._file} holds a {type(tree).__name__}, not a mapping of sections")
        values = {}
        for section, content in (tree or {}).items():
            if not isinstance(content, dict):
                raise ConfigError(f"{self._file}: {section} must be a section of keys")
            for name, value in content.items():
                if (key := f"{section}.{name}") not in self._keys:
                    allowed = ", ".join(self._keys) or "nothing"
                    raise ConfigError(f"{self._file}: {key} cannot change during a run (keys that can: {allowed})")
                try:
                    values[key] = self._keys[key][1](value)
                except ConfigError as error:
                    raise ConfigError(f"{self._file}: {error}") from None
        return values

    def _apply_value(self, key: str, value: Any) -> None:
        self._applied[key] = value
        self._keys[key][0].set_control(key, value)

    def state_dict(self) -> dict[str, Any]:
        """Return the applied values as plain JSON."""
        return dict(self._applied)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Reapply saved values; warn about those that are no longer valid."""
        for key, value in state.items():
            try:
                parsed = self._keys[key][1](value)
            except (KeyError, ConfigError) as error:
                self._log(f"warning: {CONTROL_FILE} had set {key}={value}, which is no longer possible: {error}")
                continue
            self._log(f"as {CONTROL_FILE} has set it: {key}={parsed}")
            self._apply_value(key, parsed)
