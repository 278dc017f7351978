"""What every worker is given: the configuration, this rank's place, the model's HF config, its chat form, the clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megarl.chat_format.chat_template import ChatTemplate
from megarl.checkpoint.manifest import Write, write_nothing
from megarl.config import Config
from megarl.observe.clock import Clock
from megarl.parallel.ranks import Job, Ranks
from megarl.types import Prompt, Rollout

if TYPE_CHECKING:
    from megarl.data.prompt_data import PromptLoader


class Offloadable(Protocol):
    """A model that can leave the device, and comes back when it is next asked for something."""

    def offload(self, weights: bool = True) -> int:
        """weights: whether those go, too. Returns how many bytes of the device are free then."""
        ...


class DeviceModels:
    """The models that are on the device, and leave it to the engines where `train.offload` says so."""

    def __init__(self) -> None:
        self._models: list[Offloadable] = []

    def add(self, model: Offloadable) -> None:
        self._models.append(model)

    def offload(self, pushed: Offloadable | None = None) -> None:
        """Send them to the host, but for the weights of the one that is about to be pushed."""
        for model in self._models:
            model.offload(weights=model is not pushed)


class RolloutListeners:
    """Who is told of each conversation as soon as it has ended, on the rank where it did."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Rollout], None]] = []

    def subscribe(self, who: Callable[[Rollout], None]) -> None:
        """who: is called in the thread of generation, which it must not keep."""
        self._listeners.append(who)

    def __call__(self, rollout: Rollout) -> None:
        for who in self._listeners:
            who(rollout)


@dataclass(frozen=True)
class Context:
    config: Config
    job: Job
    hf_config: dict[str, Any]
    chat: ChatTemplate
    clock: Clock
    run_dir: Path
    num_updates: Mapping[str, int]
    """Optimizer steps in the whole run by role, for its learning-rate schedule."""
    layouts: Mapping[str, Ranks | None] = field(default_factory=dict)
    """This rank's coordinates in the layout of each role that has a model on Megatron; None of one on other ranks."""
    role: str = ""
    """Which role the worker plays."""
    next_prompts: Callable[[int], Sequence[Sequence[Prompt]]] = lambda steps: ()
    """The prompts of so many steps after this one, as far as there are any."""
    models: DeviceModels = field(default_factory=DeviceModels)
    on_rollout_finished: RolloutListeners = field(default_factory=RolloutListeners)
    prompt_loader: PromptLoader[Any] | None = None
    """Of the prompts that steps are given."""
    log: Callable[[str], None] = lambda line: None
    """A line for the log, which one rank writes."""
    alarm: Callable[[str], None] = lambda line: None
    """One that must not be overlooked, likewise."""


class Worker:
    """Base of all roles. `start` may return while work goes on in the background, `ready` waits for it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.config = context.config
        self.job = context.job
        self.clock = context.clock
        self.step = 0

    def begin_step(self, step: int) -> None:
        """The flow is at this step, from 1: the one that begins, or after a resume the last that was done."""
        self.step = step

    def start(self) -> None:
        return None

    def wait_ready(self) -> None:
        return None

    def controls(self) -> Mapping[str, Callable[[Any], Any]]:
        """What of it may change while the run goes on, by key: what makes a value of what a user writes, or raises
        ConfigError; see `observe.control`."""
        return {}

    def set_control(self, key: str, value: Any) -> None:
        """One of these is to be so from here on; on all ranks at the same step."""
        return None

    def metrics(self) -> dict[str, float]:
        """Metrics of the step that only the worker can know."""
        return {}

    def save(self) -> Write:
        """What a checkpoint must keep of it as it is now, besides its model; asked of all ranks. It may be written
        while the worker already goes on, by each rank on its own."""
        return write_nothing

    def restore(self, folder: Path) -> None:
        """Go on with what was written, by as many ranks or others."""
        return None

    def close(self) -> None:
        return None
