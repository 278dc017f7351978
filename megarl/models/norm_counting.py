"""Which parameters count in the norm of all gradients on which tensor parallel rank.

Megatron adds a parameter's gradient up on every tensor parallel rank where `tensor_model_parallel` is set, else on the
first alone. Its own layers set that as they are cut; Transformer Engine's do not always: grouped experts with EP or
expert TP are told of no parallelism, so where they are not marked, the experts of all ranks but the first drop out of
the norm, and gradients are clipped too little (NVIDIA/Megatron-LM#5916); a linear layer that each rank has whole is
marked nevertheless, so DeepSeek's down projections count TP times (ROCm/TransformerEngine#715). Neither raises
anything. How a parameter is cut says its family's table, so the table sets the mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from megarl.models.layout_algebra import Param, Replicated


def set_flags(named: Mapping[str, torch.Tensor], table: Iterable[Param]) -> list[str]:
    """Set `tensor_model_parallel` of the parameters (canonical name -> parameter) as their cuts are: of experts
    everywhere, for none is whole on two ranks that count it, of others where they are cut by TP. Returns the names of
    those that were marked otherwise before. It must be done before the optimizer is built, which copies the mark."""
    changed = []
    for param in table:
        tensor = named.get(param.megatron)
        if isinstance(tensor, torch.nn.Parameter):
            counts = param.expert is not None or not isinstance(param.sharding, Replicated)
            if bool(getattr(tensor, "tensor_model_parallel", False)) != counts:
                changed.append(param.megatron)
            tensor.tensor_model_parallel = counts  # type: ignore[attr-defined]
    return changed


def check_expert_flags(chunks: Sequence[torch.nn.Module]) -> None:
    """Raise RuntimeError, naming the parameter, where one of an expert that is trained would drop out of the norm or
    would be summed over the data parallel ranks of the dense layers, under whichever name a layer has it."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".mlp.experts." not in name or not parameter.requires_grad:
                continue
            if not getattr(parameter, "tensor_model_parallel", False):
                raise RuntimeError(
                    f"{name} is not marked tensor_model_parallel: its gradient would be left out of the norm on all "
                    "tensor parallel ranks but the first; the family's table does not know it (norm_counting.py)"
                )
            if getattr(parameter, "allreduce", True):
                raise RuntimeError(
                    f"{name} is marked as a dense parameter: its gradient would be summed over wrong ranks"
                )
