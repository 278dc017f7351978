"""Set the flags that decide on which tensor parallel ranks a parameter counts in the gradient norm.

Megatron adds a parameter's gradient to the norm on every tensor parallel rank if `tensor_model_parallel` is set, else
on the first rank only. Transformer Engine's layers do not always set it according to their sharding: grouped experts
lack it, so gradients are clipped too little (NVIDIA/Megatron-LM#5916), as do attention sinks (#7452), and replicated
linear layers have it (ROCm/TransformerEngine#715). The family's table defines each parameter's sharding, so the table
sets the flag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from megarl.models.layout_algebra import Param, Replicated


def set_flags(params: Mapping[str, torch.Tensor], table: Iterable[Param]) -> list[str]:
    """Set `tensor_model_parallel` according to each parameter's sharding, and return the names that changed.

    It is set for all experts, as no two counting ranks hold the same expert parameter, and for other parameters if TP
    shards them. Call this before building the optimizer, which copies the flag.

    params: parameters by canonical name.
    """
    changed = []
    for param in table:
        tensor = params.get(param.megatron)
        if isinstance(tensor, torch.nn.Parameter):
            counts = param.expert is not None or not isinstance(param.sharding, Replicated)
            if bool(getattr(tensor, "tensor_model_parallel", False)) != counts:
                changed.append(param.megatron)
            tensor.tensor_model_parallel = counts  # type: ignore[attr-defined]
    return changed


def check_expert_flags(chunks: Sequence[torch.nn.Module]) -> None:
    """Raise RuntimeError, naming the parameter, if a trained expert parameter has wrong flags.

    It would drop out of the gradient norm, or be summed over the data parallel ranks of the dense layers. Looks at
    local names, so that parameters missing in the table are found too.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".mlp.experts." not in name or not parameter.requires_grad:
                continue
            if not getattr(parameter, "tensor_model_parallel", False):
                raise RuntimeError(
                    f"{name} is not marked tensor_model_parallel: its gradient would be left out of the norm on all "
                    "tensor parallel ranks but the first; the family's table lacks it (norm_counting.py)"
                )
            if getattr(parameter, "allreduce", True):
                raise RuntimeError(
                    f"{name} is marked as a dense parameter: its gradient would be summed over wrong ranks"
                )
