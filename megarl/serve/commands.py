"""Commands of clients, which rank 0 broadcasts to all ranks in the order of arrival."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.serve.tinker_wire import Example
from megarl.types.adam_settings import AdamSettings


@dataclass(frozen=True)
class Idle:
    """Nothing to do. Sent every few seconds, so that no rank waits longer than a collective may take."""


@dataclass(frozen=True)
class Stop:
    """End the service."""


@dataclass(frozen=True)
class CreateModel:
    """Start a model from the weights of `model.path`, or with `folder` from a saved checkpoint."""

    model_id: str
    folder: str = ""
    has_optimizer: bool = False
    """Whether the optimizer's state of the checkpoint is loaded, too."""


@dataclass(frozen=True)
class UnloadModel:
    model_id: str


@dataclass(frozen=True)
class ForwardBackward:
    """Add the gradient of a loss to the model's, or with `forward_only` only compute it."""

    model_id: str
    examples: tuple[Example, ...]
    loss: str
    options: dict[str, float]
    forward_only: bool


@dataclass(frozen=True)
class ForwardBackwardBatch:
    """Requests of clients with an adapter each, at most one of each client, which are executed together."""

    requests: tuple[ForwardBackward, ...]


@dataclass(frozen=True)
class OptimStep:
    model_id: str
    adam: AdamSettings


@dataclass(frozen=True)
class SaveModel:
    """Write a checkpoint to a new folder: of the whole state, or with `for_sampler` of the weights alone."""

    model_id: str
    folder: str
    for_sampler: bool


@dataclass(frozen=True)
class LoadModel:
    """Load a checkpoint of `SaveModel` with the whole state into an existing model."""

    model_id: str
    folder: str
    has_optimizer: bool


@dataclass(frozen=True)
class BeginSampling:
    """Sync the weights of a sampler's checkpoint to the engines, unless they have them, and wake these."""

    folder: str


Training = ForwardBackward | ForwardBackwardBatch | OptimStep
Command = Idle | Stop | CreateModel | UnloadModel | Training | SaveModel | LoadModel | BeginSampling
