"""The kinds of engines, and what a job must know about a kind before and besides its engines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol, cast

import torch

from megarl.config import Config, ConfigError, plugins
from megarl.engine.engine_host import HostProcess
from megarl.engine.engine_protocol import Engine
from megarl.models.family import HFConfig
from megarl.reshard.plan.from_config import plan_for_layout
from megarl.reshard.plan.layout import EngineLayout
from megarl.reshard.plan.planner import ReshardPlan

BACKENDS = {
    "sglang": "megarl.engine.sglang.sglang_backend:SGLangBackend",
    "vllm": "megarl.engine.vllm.vllm_backend:VLLMBackend",
}
"""Kinds of engines that come with MegaRL, by the value of `rollout.engine`."""
NamedTensors = Sequence[tuple[str, torch.Tensor]]


class EngineBackend(Protocol):
    """One kind of engine. Its constructor takes no arguments, and no method starts a process except as stated."""

    title: str
    """Name in reports."""

    def check(self, hf: HFConfig, config: Config) -> None:
        """Raise ConfigError for settings that this kind of engine cannot have, or not with this model."""
        ...

    def check_sampling(self, config: Config) -> None:
        """Raise ConfigError if training could not compute the distribution that the engine samples from."""
        ...

    def check_installed(self) -> None:
        """Raise ConfigError if the engine is not installed, or cannot be on this machine."""
        ...

    def check_platform(self, config: Config) -> None:
        """Raise ConfigError if the engine is not installed, or if a setting is unsupported on this machine."""
        ...

    def layout(self, hf: HFConfig, config: Config) -> EngineLayout:
        """Return where the engines have which weights. Raises ConfigError for settings with which a weight sync would
        not find them."""
        ...

    def start_host(self, config: Config, threads: int = 0) -> HostProcess:
        """Start the process that starts this machine's engines. threads: as for `make_engine`."""
        ...

    def make_engine(
        self,
        config: Config,
        index: int = 0,
        *,
        label: str = "engine",
        keeps_weights: bool = False,
        threads: int = 0,
        first_rank: int = 0,
        nnodes: int = 1,
        node_rank: int = 0,
        dist_init_addr: str = "",
    ) -> Engine:
        """Return an engine that is not started.

        index: number of the engine among those of its role.
        label: with the index, names the engine in messages, and its log `<run.dir>/logs/engine_<index>.log`.
        keeps_weights: sleep with a copy of the weights on the host; otherwise a weight sync must follow each wake-up.
        threads: per tensor parallel rank on a CPU; 0 for its share of the cores. A shared host's value takes
        precedence.
        first_rank: the engine's first rank among those of this machine; rank r is on GPU r // parallel.ranks_per_gpu.
        nnodes, node_rank, dist_init_addr ("host:port"): for an engine across machines.
        """
        ...

    def pack_payload(self, tensors: NamedTensors) -> str:
        """Encode where tensors from `device.allocate_shared` are, for the engine rank on the same device. They must
        stay there until it has answered."""
        ...


def engine_backend(config: Config) -> EngineBackend:
    """Return the kind of engine that `rollout.engine` names. Raises ConfigError if it cannot be loaded."""
    return _load(config.rollout.engine)


@cache
def _load(name: str) -> EngineBackend:
    target = BACKENDS.get(name, name)
    if ":" not in target:
        raise ConfigError(f"rollout.engine={name}: no such engine; set it to {', '.join(BACKENDS)}, or to module:name")
    try:
        return cast(EngineBackend, plugins.load(target, "rollout.engine")())
    except ConfigError:
        raise
    except Exception as error:  # the fork's constructor
        raise ConfigError(f"rollout.engine={name}: {plugins.format_error(error)}") from error


def plan_from_config(hf: HFConfig, config: Config, adapters: bool = False) -> ReshardPlan:
    """Plan the weight sync from the actor's ranks to the engines', as placed by `placement`, or that of the adapters
    alone. Raises ConfigError."""
    return plan_for_layout(hf, config, engine_backend(config).layout(hf, config), adapters)
