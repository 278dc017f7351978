"""Measure the memory of a model's states on this rank from its tensors, to check the estimates of `models.memory`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megarl.megatron.optimizer import state_tensors
from megarl.megatron.trainer_model import MegatronModel


def model_state_bytes(model: MegatronModel) -> dict[str, int]:
    """Return the bytes of `weights`, `gradients` and `optimizer` on this rank.

    Weights include the routers' expert biases. Gradients are Megatron's buffers, which pad parameters to multiples of
    64 elements. The optimizer's are this rank's moments, and master weights unless they are the model's own weights.
    """
    weights = list(model.local_params().values())
    buffers = [buffer for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    weight_storages = {tensor.untyped_storage().data_ptr() for tensor in weights}
    states = [tensor for tensor in state_tensors(model.optimizer) if tensor.dim()]  # without step counts
    return {
        "weights": _bytes(weights),
        "gradients": _bytes(buffer.grad_data for buffer in buffers),
        "optimizer": _bytes(tensor for tensor in states if tensor.untyped_storage().data_ptr() not in weight_storages),
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
