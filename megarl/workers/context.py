"""The `Context` that every worker receives, and the base class `Worker`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megarl.chat_format.chat_template import ChatTemplate
from megarl.checkpoint.manifest import Write, write_nothing
from megarl.config import Config
from megarl.observe.clock import Clock
from megarl.parallel.ranks import Job, Ranks
from megarl.types import Rollout

if TYPE_CHECKING:
    from megarl.data.loader import PromptLoader
    from megarl.workers.engines import Engines


class Offloadable(Protocol):
    """A model that can be offloaded to the host, and is onloaded on its next use."""

    def offload(self, weights: bool = True) -> int:
        """Offload states, and the weights if `weights`. Returns the number of device bytes freed."""
        ...


class DeviceModels:
    """The models on the device, which `train.offload` offloads while engines use it."""

    def __init__(self) -> None:
        self._models: list[Offloadable] = []

    def add(self, model: Offloadable) -> None:
        self._models.append(model)

    def offload(self, synced: Offloadable | None = None) -> None:
        """Offload all models, except the weights of `synced`, the model of the next weight sync."""
        for model in self._models:
            model.offload(weights=model is not synced)


class RolloutListeners:
    """Callbacks for each finished conversation, on the rank where it finished."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Rollout], None]] = []

    def subscribe(self, callback: Callable[[Rollout], None]) -> None:
        """Add a callback. It runs in the generation thread and must not block."""
        self._listeners.append(callback)

    def __call__(self, rollout: Rollout) -> None:
        for listener in self._listeners:
            listener(rollout)


@dataclass(frozen=True)
class Context:
    config: Config
    """The run's configuration; for a role with engines besides `rollout`, that of `policy_configs.policy_config`."""
    job: Job
    hf_config: dict[str, Any]
    chat: ChatTemplate
    clock: Clock
    run_dir: Path
    num_updates: Mapping[str, int]
    """Optimizer steps of the whole run by role, for the learning-rate schedule."""
    layouts: Mapping[str, Ranks | None] = field(default_factory=dict)
    """This rank's coordinates in the layout of each role with a Megatron model; None if the role is on other ranks."""
    role: str = ""
    """The role of the worker."""
    models: DeviceModels = field(default_factory=DeviceModels)
    on_rollout_finished: RolloutListeners = field(default_factory=RolloutListeners)
    engines: dict[str, Engines] = field(default_factory=dict)
    """The engines of each role, as far as they have been built; one object for all workers."""
    takes_turns: bool = False
    """Whether the role's engines share ranks with a role that must have the device while they do not generate."""
    shared_ranks: frozenset[int] = frozenset()
    """Ranks of the role's engines that also have a model, or engines of another role."""
    prompt_loader: PromptLoader[Any] | None = None
    """Loader of the training prompts, in the tokens of the role's policy."""
    log: Callable[[str], None] = lambda line: None
    """Logs a line. Only one rank writes it."""
    alarm: Callable[[str], None] = lambda line: None
    """Raises an alarm. Only one rank writes it."""


class Worker:
    """Base class of all workers. `start` may return while work continues in the background; `wait_ready` waits for
    it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.config = context.config
        self.job = context.job
        self.clock = context.clock
        self.step = 0

    def begin_step(self, step: int) -> None:
        """Set the current step, counted from 1: the one that starts or, after resuming, the last completed one."""
        self.step = step

    def start(self) -> None:
        return None

    def wait_ready(self) -> None:
        return None

    def check_config(self, config: Config) -> None:
        """Raise ConfigError for a configuration that the worker cannot change to during the run."""
        return None

    def set_config(self, config: Config) -> None:
        """Set the configuration of the next step; called on all ranks. Only keys of `config/stages.py` change."""
        self.config = config

    def metrics(self) -> dict[str, float]:
        """Return the worker's own metrics of the step."""
        return {}

    def save(self) -> Write:
        """Return a function that writes the worker's current state, without its model, into a checkpoint.

        Called on all ranks. Each rank may write on its own while the worker continues.
        """
        return write_nothing

    def restore(self, folder: Path) -> None:
        """Restore a saved state, also one that a different number of ranks has written."""
        return None

    def close(self) -> None:
        return None
