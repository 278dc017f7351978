"""The run folder's control file: what a user may change while the run goes on.

    <run>/control.yaml        reward: {weights: {gsm8k: 0.4, model: 0.6}}

It is read at the beginning of each step by one rank, and holds on all of them from that step on. A key that it does not
have stays as it is, also where it had it before; so does everything where the file cannot be used, which is said once
for each state of the file. What it has set is in the checkpoint, so that a resume goes on with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megarl.config import ConfigError, plain_yaml

CONTROL_FILE = "control.yaml"


class Controllable(Protocol):
    """Has something that may change while the run goes on."""

    def controls(self) -> Mapping[str, Callable[[Any], Any]]:
        """By key, what makes a plain value of what the file says, or raises ConfigError."""
        ...

    def set_control(self, key: str, value: Any) -> None: ...


class ControlUpdate(NamedTuple):
    """What the file says: values by key, or what is wrong with it; and what tells its present state from others."""

    values: dict[str, Any]
    error: str = ""
    digest: str = ""


class Control:
    """Made on every rank, with those that it controls; `say`: a line for the log."""

    def __init__(self, run_dir: Path, controlled: Sequence[Controllable], say: Callable[[str], None]) -> None:
        self._file, self._log = run_dir / CONTROL_FILE, say
        self._keys = {key: (one, check) for one in controlled for key, check in one.controls().items()}
        self._applied: dict[str, Any] = {}
        """What the file has said, of all that has been taken from it."""
        self._last_digest = ""

    def read(self) -> ControlUpdate:
        """Where anything is wrong with the file it sets nothing."""
        data = b""
        try:
            if not self._file.exists():
                return ControlUpdate({})
            if not self._file.is_file():  # a pipe would be waited for
                what = "is a folder" if self._file.is_dir() else "is no regular file"
                raise ConfigError(f"{self._file} {what}; put a file of YAML there, or take it away")
            with self._file.open("rb") as file:
                data = file.read(plain_yaml.MAX_BYTES + 1)
            return ControlUpdate(self._parse(data), digest=_digest(data))
        except ConfigError as error:
            return ControlUpdate({}, str(error), _digest(data or str(error).encode()))
        except OSError as error:
            return ControlUpdate({}, f"{self._file} cannot be read: {error.strerror}", f"{error.errno}")

    def apply(self, step: int, orders: ControlUpdate) -> None:
        """At the beginning of a step, on all ranks: what the first of them has read."""
        for key, value in orders.values.items():
            if key not in self._applied or self._applied[key] != value:
                self._log(f"{CONTROL_FILE}, from step {step} on: {key}={value}")
                self._apply_value(key, value)
        if orders.error and orders.digest != self._last_digest:
            self._log(f"warning: {orders.error}; nothing is changed by it")
        self._last_digest = orders.digest

    def _parse(self, data: bytes) -> dict[str, Any]:
        """Raises ConfigError."""
        tree = plain_yaml.parse_bytes(data, str(self._file))
        if data and not data.endswith(b"\n"):
            raise ConfigError(f"{self._file} does not end with a line break: it may not be written to its end yet")
        if not isinstance(tree, dict | None):
            raise ConfigError(f"{self._file} holds a {type(tree).__name__}, not a mapping of sections")
        found = {}
        for section, content in (tree or {}).items():
            if not isinstance(content, dict):
                raise ConfigError(f"{self._file}: {section} must be a section of keys")
            for name, value in content.items():
                if (key := f"{section}.{name}") not in self._keys:
                    known = ", ".join(self._keys) or "nothing"
                    raise ConfigError(f"{self._file}: {key} cannot change while the run goes on (what can: {known})")
                try:
                    found[key] = self._keys[key][1](value)
                except ConfigError as error:
                    raise ConfigError(f"{self._file}: {error}") from None
        return found

    def _apply_value(self, key: str, value: Any) -> None:
        self._applied[key] = value
        self._keys[key][0].set_control(key, value)

    def state_dict(self) -> dict[str, Any]:
        """What has been set; plain JSON values."""
        return dict(self._applied)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was set, as far as it still fits what there is."""
        for key, value in state.items():
            try:
                known = self._keys[key][1](value)
            except (KeyError, ConfigError) as error:
                self._log(f"warning: {CONTROL_FILE} had set {key}={value}, which is no longer possible: {error}")
                continue
            self._log(f"as {CONTROL_FILE} has set it: {key}={known}")
            self._apply_value(key, known)


def _digest(data: bytes) -> str:
    return hashlib.blake2s(data).hexdigest()
