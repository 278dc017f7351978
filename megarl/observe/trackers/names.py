"""The trackers that `track.trackers` can name."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

from megarl.config import ConfigError
from megarl.observe.trackers.adapter import TrackerAdapter, TrackerRun


class TrackerInfo(NamedTuple):
    """A supported tracker.

    Args:
        title: display name.
        package: top-level package that it imports.
        class_name: adapter class in the module named like the tracker.
        install_command: shown if the package is missing.
    """

    title: str
    package: str
    class_name: str
    install_command: str


TRACKERS = {
    "tensorboard": TrackerInfo("TensorBoard", "tensorboard", "TensorBoard", "pip install tensorboard"),
    "wandb": TrackerInfo("W&B", "wandb", "Wandb", "pip install wandb"),
    "swanlab": TrackerInfo("SwanLab", "swanlab", "SwanLab", "pip install swanlab"),
    "mlflow": TrackerInfo("MLflow", "mlflow", "MLflow", "pip install mlflow-skinny"),
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is not installed or is named twice. Imports nothing."""
    for name in names:
        if list(names).count(name) > 1:
            raise ConfigError(f"track.trackers: {name} is named twice; name each tracker once")
        info = TRACKERS[name]
        try:
            is_installed = importlib.util.find_spec(info.package) is not None
        except (ImportError, ValueError):
            is_installed = False
        if not is_installed:
            raise ConfigError(
                f"track.trackers: {name} is not installed; run `{info.install_command}`, or remove it from the list"
            )


def open_adapter(name: str, run: TrackerRun) -> TrackerAdapter:
    """Open a tracker's adapter for a run. Raises whatever its package raises."""
    info = TRACKERS[name]
    adapter: TrackerAdapter = getattr(importlib.import_module(f"megarl.observe.trackers.{name}"), info.class_name)(run)
    return adapter
