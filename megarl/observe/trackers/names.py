"""The trackers that `track.trackers` can name."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

from megarl.config import ConfigError
from megarl.observe.trackers.adapter import TrackerAdapter, TrackerRun


class TrackerInfo(NamedTuple):
    """title: as one says it. package: what it imports. cls: the adapter, in the module of its name."""

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
    """Raise ConfigError for a tracker whose package is not there, and for one that is named twice. Imports nothing."""
    for name in names:
        if list(names).count(name) > 1:
            raise ConfigError(f"track.trackers: {name} is named twice; name each tracker once")
        known = TRACKERS[name]
        try:
            there = importlib.util.find_spec(known.package) is not None
        except (ImportError, ValueError):
            there = False
        if not there:
            raise ConfigError(
                f"track.trackers: {name} is not installed; `{known.install_command}`, or take it out of the list"
            )


def open_adapter(name: str, told: TrackerRun) -> TrackerAdapter:
    """The adapter of that name at work on a run. Raises whatever its package does."""
    known = TRACKERS[name]
    sink: TrackerAdapter = getattr(importlib.import_module(f"megarl.observe.trackers.{name}"), known.class_name)(told)
    return sink
