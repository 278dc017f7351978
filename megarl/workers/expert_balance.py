"""The load of the engines' experts, and the placement that balances it (`reshard/plan/expert_placement.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.checkpoint.manifest import Entry, Write, write_hashed
from megarl.config import Config, ConfigError
from megarl.models.family import HFConfig
from megarl.models.routing import RoutingShape, routing_shape
from megarl.reshard.plan.expert_placement import Placement, imbalance, initial_placement, place_experts
from megarl.types import Comm, Rollout

FILE = "expert_placement"
"""Name of the file in a checkpoint, without its ending."""
MIN_GAIN = 0.02
"""Experts move if that lowers the imbalance, in the mean over layers, at least by this share of a rank's mean load. The
noise of sampling gives gains below it, while each move costs a weight sync that sends and verifies everything."""


class ExpertBalance:
    """The placement of a policy's experts in its engines, the same in all of them and on all ranks.

    comm: of all ranks of the job. policy: name of a policy besides the first.
    """

    def __init__(self, hf: HFConfig, config: Config, comm: Comm, policy: str = "") -> None:
        self._shape = routing_shape(hf, config.model.megatron)
        self._comm, self._ep = comm, config.rollout.ep
        self._every = config.rollout.rebalance_experts_every
        self._file = f"{FILE}_{policy}.json" if policy else f"{FILE}.json"
        num_slots = self._shape.num_experts + config.rollout.num_redundant_experts
        self.placements: dict[int, Placement] = dict.fromkeys(
            range(self._shape.num_layers),
            initial_placement(self._shape.num_experts, num_slots),
        )
        """Layer of the decoder -> the expert in each slot, see `EngineLayout.experts`."""
        self.metrics: dict[str, float] = {}
        self._local_load = torch.zeros(len(self._shape.moe_layers), self._shape.num_experts, dtype=torch.int64)
        """[MoE layers, experts] tokens of this rank's rollouts since the last weight sync."""
        self._load = self._local_load.clone()
        """[MoE layers, experts] tokens of all ranks' rollouts since the experts were last placed."""

    def count(self, rollouts: Iterable[Rollout]) -> None:
        """Count the tokens that the policy sampled in these rollouts. Not collective."""
        for rollout in rollouts:
            if rollout.routing is not None:
                self._local_load += count_tokens(rollout, self._shape)

    def rebalance(self, step: int) -> None:
        """Add up the load of all ranks and, in every N-th step, place the experts anew. Collective.

        All experts stay where they are if moving them would lower the mean imbalance by less than `MIN_GAIN`.
        """
        load = self._comm.all_reduce(self._local_load)
        self._local_load = torch.zeros_like(load)
        self._load = self._load + load
        self.metrics = {"rollout/expert_imbalance": self._mean_imbalance(load)} if load.any() else {}
        if step % self._every or not self._load.any():
            return
        self.placements = self._broadcast(self._place(self._load.tolist()) if self._comm.rank == 0 else None)
        self.metrics["rollout/expert_imbalance_placed"] = self._mean_imbalance(self._load)
        self._load.zero_()

    def _place(self, load: list[list[int]]) -> dict[int, Placement]:
        """Return the placements for the load [MoE layers, experts] in tokens; the present ones if those do as well."""
        placements, gains = dict(self.placements), []
        for layer, tokens in zip(self._shape.moe_layers, load, strict=True):
            current = self.placements[layer]
            placement = place_experts(tokens, len(current), self._ep)
            gains.append(imbalance(tokens, current, self._ep) - imbalance(tokens, placement, self._ep))
            if gains[-1] > 0:
                placements[layer] = placement
        return placements if np.mean(np.maximum(gains, 0)) >= MIN_GAIN else self.placements

    def _broadcast(self, value: Any) -> Any:
        """Return rank 0's value. Collective."""
        return self._comm.all_gather_objects(value if self._comm.rank == 0 else None)[0]

    def _mean_imbalance(self, load: torch.Tensor) -> float:
        """Return the mean over layers of the largest load of a rank over the mean. load: [MoE layers, experts]."""
        rows = zip(self._shape.moe_layers, load.tolist(), strict=True)
        return float(np.mean([imbalance(tokens, self.placements[layer], self._ep) for layer, tokens in rows]))

    def save(self) -> Write:
        """Return a function that writes the placement and the load that was measured for the next one."""
        content = {"ep": self._ep, "placements": list(self.placements.items()), "load": self._load.tolist()}
        data, is_writer = json.dumps(content).encode(), self._comm.rank == 0

        def write(folder: Path) -> dict[Path, Entry]:
            path = folder / self._file
            return {path: write_hashed(path, lambda stream: stream.write(data))[1]} if is_writer else {}

        return write

    def restore(self, folder: Path) -> None:
        """Restore what `save` has written, if it fits the engines: after a change of `rollout.ep` or of the number of
        copies, the experts start in order. Rank 0 reads the file. Collective. Raises ConfigError, on all ranks, for a
        file that this program has not written."""
        content = self._broadcast(_read(folder / self._file) if self._comm.rank == 0 else None)
        if isinstance(content, str):
            raise ConfigError(content)
        if content is None:  # the run did not place experts before
            return
        ep, placements, load = content
        if load.shape == self._load.shape:
            self._load = load
        has_same_slots = [len(experts) for experts in placements.values()] == list(map(len, self.placements.values()))
        if ep == self._ep and placements.keys() == self.placements.keys() and has_same_slots:
            self.placements = placements


def _read(path: Path) -> tuple[int, dict[int, Placement], torch.Tensor] | str | None:
    """Return `rollout.ep`, placements and load of a file; None if there is none, and what is wrong with a bad one."""
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        placements = {int(layer): tuple(map(int, experts)) for layer, experts in content["placements"]}
        return int(content["ep"]), placements, torch.tensor(content["load"], dtype=torch.int64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path} is not of this program ({type(error).__name__}: {error})"


def count_tokens(rollout: Rollout, shape: RoutingShape) -> torch.Tensor:
    """Return how many of the tokens that the policy sampled each expert has processed, [MoE layers, experts] int64.

    They are decoded one at a time, which is what an engine spends its time on; prompts and observations are often
    found in its prefix cache.
    """
    assert rollout.routing is not None
    lengths = [len(turn.token_ids) for turn in rollout.turns]
    is_action = torch.from_numpy(np.repeat([turn.is_action for turn in rollout.turns], lengths))
    chosen = rollout.routing[is_action[: len(rollout.routing)]].long()  # [tokens, MoE layers, topk]
    layers, experts = len(shape.moe_layers), shape.num_experts
    chosen += experts * torch.arange(layers)[:, None]
    return torch.bincount(chosen.flatten(), minlength=layers * experts).view(layers, experts)
