"""The configuration of each step: `stages` of the configuration, and keys that the user changes by hand during the run.

    <run>/control.yaml        reward: {weights: {gsm8k: 0.4, model: 0.6}}

One rank reads the file at the start of each step; its values apply on all ranks from that step on, in place of those of
all stages. A key that is not in the file, or no longer, keeps its value. If the file is invalid nothing changes, and a
warning is logged once per version of the file. Applied values are part of the checkpoint, so a resumed run keeps them.
`config/stages.py` lists the keys that may change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megarl.config import Config, ConfigError, plain_yaml
from megarl.config.stages import (
    PLANNED_KEYS,
    change_config,
    config_of_step,
    describe_stage,
    get_value,
    largest_config,
    list_leaves,
    nest,
    smallest_context,
)
from megarl.parallel.policy_configs import check_change

CONTROL_FILE = "control.yaml"


class Configurable(Protocol):
    """A component whose configuration may change between steps."""

    def check_config(self, config: Config) -> None:
        """Raise ConfigError for a configuration that the component cannot change to."""
        ...

    def set_config(self, config: Config) -> None: ...


class ControlUpdate(NamedTuple):
    """Values by key in the control file, or an error message and a digest of the content that has the error."""

    values: dict[str, Any]
    error: str = ""
    digest: str = ""


class Control:
    """Sets the configuration of each step on `components`. Created on every rank; `log` logs a line."""

    def __init__(
        self, run_dir: Path, config: Config, components: Sequence[Configurable], log: Callable[[str], None]
    ) -> None:
        self._file, self._log = run_dir / CONTROL_FILE, log
        self._config, self._components = config, components
        self._current = config
        """The configuration that the components have."""
        self._applied: dict[str, Any] = {}
        """Values of the control file applied so far, by key."""
        self._last_digest = ""

    def start(self, step: int) -> None:
        """Set the configuration of a step before it begins: the first one or, after resuming, the last completed."""
        self._set(self._config_of_step(step))

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
        """Set the configuration of a step, with what the first rank has read. Called on all ranks at its start."""
        staged = self._config_of_step(step)
        if staged != self._current:
            self._log(f"stage, from step {step} on: {describe_stage(self._current, staged)}")
        for key, value in update.values.items():
            if key not in self._applied or self._applied[key] != value:
                self._log(f"{CONTROL_FILE}, from step {step} on: {key}={value}")
                self._applied[key] = value
        if update.error and update.digest != self._last_digest:
            self._log(f"warning: {update.error}; it changes nothing")
        self._last_digest = update.digest
        if (config := self._config_of_step(step)) != self._current:
            self._set(config)

    def _config_of_step(self, step: int) -> Config:
        return change_config(config_of_step(self._config, step), nest(self._applied), "")

    def _set(self, config: Config) -> None:
        self._current = config
        for component in self._components:
            component.set_config(config)

    def _parse(self, data: bytes) -> dict[str, Any]:
        """Parse values by `section.key`. Raises ConfigError."""
        tree = plain_yaml.parse_bytes(data, str(self._file))
        if data and not data.endswith(b"\n"):
            raise ConfigError(f"{self._file} does not end with a line break: it may be incomplete")
        if not isinstance(tree, dict | None):
            raise ConfigError(f"{self._file} holds a {type(tree).__name__}, not a mapping of sections")
        values = list_leaves(tree or {})
        self._check(values, f"{self._file}: ")
        return values

    def _check(self, values: Mapping[str, Any], where: str) -> None:
        """Raise ConfigError for values that cannot apply from now on."""
        try:
            changed = change_config(self._current, nest(values), "")
            check_change(self._current, changed)
            for key in PLANNED_KEYS:
                if key in values and get_value(changed, key) > (most := get_value(largest_config(self._config), key)):
                    raise ConfigError(
                        f"{key}={values[key]} is above {most}, the largest value in the configuration, for which "
                        "memory is planned; restart the run with a larger one"
                    )
            if changed.rollout.max_context < (least := smallest_context(self._config)):
                raise ConfigError(
                    f"rollout.max_context={changed.rollout.max_context} is below {least}, up to which prompts were "
                    "loaded; restart the run with a smaller one"
                )
            for component in self._components:
                component.check_config(changed)
        except ConfigError as error:
            raise ConfigError(f"{where}{error}") from None

    def state_dict(self) -> dict[str, Any]:
        """Return the applied values as plain JSON."""
        return dict(self._applied)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved values, which `start` applies; warn about those that are no longer valid."""
        for key, value in state.items():
            try:
                self._check({key: value}, "")
            except ConfigError as error:
                self._log(f"warning: {CONTROL_FILE} had set {key}={value}, which is no longer possible: {error}")
                continue
            self._log(f"as {CONTROL_FILE} has set it: {key}={value}")
            self._applied[key] = value
