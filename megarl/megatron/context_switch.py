"""Dynamic context parallelism: the context parallel groups of a micro-batch, in Megatron's globals and modules.

Megatron has the groups in globals of `parallel_state`, and its modules took them from there when they were built. With
`parallel.dynamic_cp` each micro-batch has its own. They are set for its forward pass, and again for its backward pass:
pipelines run other micro-batches in between, and recomputed layers read the groups once more. All other groups, such as
those of gradients and experts, stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet

from megarl.parallel.ranks import Ranks, set_context_groups


class ContextSwitch:
    """Switch of the context parallel size that a model's chunks compute with. Call within the model's `use_layout`."""

    def __init__(self, chunks: Sequence[torch.nn.Module], ranks: Ranks) -> None:
        self._groups, self._whole = ranks.context_groups, ranks.cp
        self._size = self._whole
        self._delta_nets: list[Any] = []
        self._attributes: list[tuple[Any, str, str]] = []
        """Owner and name of each attribute that is a group, and the field of `ContextGroups` it equals."""
        if not ranks.dynamic_cp:
            return
        whole = vars(self._groups[self._whole])
        owners: dict[int, Any] = {}
        for module in (module for chunk in chunks for module in chunk.modules()):
            collections = (value for value in vars(module).values() if isinstance(value, ProcessGroupCollection))
            owners |= {id(owner): owner for owner in (module, *collections)}
            if isinstance(module, GatedDeltaNet):
                self._delta_nets.append(module)
        for owner in owners.values():
            for name, value in vars(owner).items():
                self._attributes += [(owner, name, field) for field, group in whole.items() if value is group]

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Return to the largest size at the end of the block."""
        try:
            yield
        finally:
            self.set_size(self._whole)

    def set_size(self, size: int) -> None:
        """Compute with the groups of this size from now on. Communicates nothing."""
        groups = self._groups[size]
        set_context_groups(groups)
        if size == self._size:
            return
        self._size = size
        for owner, name, field in self._attributes:
            setattr(owner, name, getattr(groups, field))
        for delta_net in self._delta_nets:
            delta_net.feat_dim_split = [part * delta_net.cp_size // size for part in delta_net.feat_dim_split]
            delta_net.cp_size = size  # which divides the features

    def restore_in_backward(self, output: torch.Tensor) -> None:
        """Set the current size again when the backward pass reaches a chunk's output, and so its first layer."""
        size = self._size
        if output.requires_grad:
            output.register_hook(lambda _: self.set_size(size))
