"""What a model's states take on this rank, counted from the tensors that are there: the measure of `models.memory`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megarl.megatron.model import MegatronModel


def held_bytes(model: MegatronModel) -> dict[str, int]:
    """Bytes of `weights` (with the biases of routers), of Megatron's `gradients` buffers, whose parameters are padded
    to multiples of 64 elements, and of the `optimizer`: this rank's moments, and master weights where they are not the
    model's own."""
    weights = list(model.local_params().values())
    buffers = [buffer for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    own = {tensor.untyped_storage().data_ptr() for tensor in weights}
    masters: list[torch.Tensor] = []
    moments: list[torch.Tensor] = []
    for part in model.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups if part.buffers else ():
            for master in group["params"]:
                masters += [master] if master.untyped_storage().data_ptr() not in own else []
                state = part.optimizer.state[master]
                moments += [state["exp_avg"], state["exp_avg_sq"]]
    return {
        "weights": _bytes(weights),
        "gradients": _bytes(buffer.grad_data for buffer in buffers),
        "optimizer": _bytes([*masters, *moments]),
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
