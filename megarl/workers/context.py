"""What every worker is given: the configuration, this rank's place, the model's HF config, its chat form, the clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.megatron.model import MegatronModel
from megarl.observe.clock import Clock
from megarl.parallel.ranks import Ranks
from megarl.rollout.chat import Chat


@dataclass(frozen=True)
class Context:
    config: Config
    ranks: Ranks
    hf_config: dict[str, Any]
    chat: Chat
    clock: Clock
    run_dir: Path
    total_updates: int
    """Optimizer steps of the whole run, for the learning-rate schedule."""
    models: list[MegatronModel] = field(default_factory=list)
    """Those on the device, which leave it to the engines where `train.offload` says so."""


class Worker:
    """Base of all roles. `start` may return while work goes on in the background, `ready` waits for it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.config = context.config
        self.ranks = context.ranks
        self.clock = context.clock

    def start(self) -> None:
        return None

    def ready(self) -> None:
        return None

    def close(self) -> None:
        return None
