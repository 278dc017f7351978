"""What a model's states take on this rank, counted from the tensors that are there: the measure of `models.memory`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megarl.megatron.optimizer import state_tensors
from megarl.megatron.trainer_model import MegatronModel


def model_state_bytes(model: MegatronModel) -> dict[str, int]:
    """Bytes of `weights` (with the biases of routers), of Megatron's `gradients` buffers, whose parameters are padded
    to multiples of 64 elements, and of the `optimizer`: this rank's moments, and master weights where they are not the
    model's own."""
    weights = list(model.local_params().values())
    buffers = [buffer for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    own = {tensor.untyped_storage().data_ptr() for tensor in weights}
    states = [tensor for tensor in state_tensors(model.optimizer) if tensor.dim()]  # without counts of steps
    return {
        "weights": _bytes(weights),
        "gradients": _bytes(buffer.grad_data for buffer in buffers),
        "optimizer": _bytes(tensor for tensor in states if tensor.untyped_storage().data_ptr() not in own),
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
