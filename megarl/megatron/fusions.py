"""Which of Megatron's fused kernels are there, and are on: those of Apex. Transformer Engine's are on with its modules.

Megatron looks for each where it is used, and fails there if its field is on without it. So it is asked here what it has
found, and each is on where that is something. `model.megatron` has the last word, as with all fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from megatron.core.fusions import fused_layer_norm
from megatron.core.tensor_parallel import layers

from megarl.parallel import device

_SOFTMAX = "scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda"
"""Apex's modules that Megatron's FusedScaleMaskSoftmax imports when it is first called."""


def fused(values: Mapping[str, Any]) -> dict[str, bool]:
    """These fields of TransformerConfig, given the others. All are off without a GPU, where no test could try them.

    gradient_accumulation_fusion: a layer's product for its weights' gradient adds to the fp32 buffer, which saves a
    copy of the gradient; of the layers by Transformer Engine's own kernels, of the output layer by Apex's
    `fused_weight_gradient_mlp_cuda`, which Megatron asks for wherever the field is on.
    masked_softmax_fusion: in attention that is not Transformer Engine's, and not capped.
    persist_layer_norm: for LayerNorm, as Apex's is; Megatron's torch norm refuses the field. All families have RMSNorm.
    """
    there = device.has_cuda()
    plain = values.get("normalization") == "LayerNorm" and bool(fused_layer_norm.HAVE_PERSIST_LAYER_NORM)
    return {
        "gradient_accumulation_fusion": there and bool(layers._grad_accum_fusion_available),
        "masked_softmax_fusion": there and all(find_spec(name) is not None for name in _SOFTMAX),
        "persist_layer_norm": there and plain,
    }
