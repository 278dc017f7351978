"""Megatron-Core 0.19.2's gated delta net (arXiv:2412.06464), with decays in fp32, and its layer specs.

On a GPU its kernels are those of flash-linear-attention (package fla-core); on a CPU, `cpu/flash_linear_attention.py`.
"""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.config import ConfigError
from megarl.cpu import flash_linear_attention, megatron_modules
from megarl.parallel import device


class DeltaNet(GatedDeltaNet):  # type: ignore[misc]
    """Megatron's gated delta net, except that exp(A_log) is computed in fp32, as transformers and SGLang do.

    Megatron refuses packed sequences if it is to be deterministic. The functions for CPUs always are.
    """

    def __init__(
        self, config: TransformerConfig, *args: Any, pp_layer_offset: int | None = None, **kwargs: Any
    ) -> None:
        if not device.has_cuda():
            config = copy(config)
            config.deterministic_mode = False
        super().__init__(config, *args, **kwargs)

    def _compute_g_and_beta(
        self, a_log: torch.Tensor, dt_bias: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return -a_log.float().exp() * F.softplus(alpha.float() + dt_bias.float()), beta.sigmoid()


class OutputNorm:
    """Builds the norm of the delta net's output, which multiplies by w where all other norms multiply by 1 + w.

    A class, because Megatron's `build_module` does not call functions.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float) -> Any:
        plain = copy(config)
        plain.layernorm_zero_centered_gamma = False
        if not device.has_cuda():
            return megatron_modules.RMSNorm(plain, hidden_size, eps)
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm(plain, hidden_size, eps)


def use_delta_nets(spec: Any, settings: TransformerConfig, vp_stage: int | None) -> None:
    """Replace the attention of this stage's layers that have a delta net, in a block spec of Megatron's."""
    if device.has_cuda():
        from megatron.core.extensions.transformer_engine import (
            TELayerNormColumnParallelLinear as in_proj,
        )
        from megatron.core.extensions.transformer_engine import (
            TERowParallelLinear as out_proj,
        )
        from megatron.core.ssm.gated_delta_net import common

        if not common.HAVE_FLA:
            raise ConfigError(
                "this model's gated delta nets need the package fla-core (flash-linear-attention) on a GPU: install it "
                "with `.venv/bin/pip install fla-core==0.6.0`"
            )
    else:
        flash_linear_attention.install()
        in_proj, out_proj = ColumnParallelLinear, RowParallelLinear
    first = get_transformer_layer_offset(settings, vp_stage=vp_stage)
    attention = ModuleSpec(DeltaNet, submodules=GatedDeltaNetSubmodules(in_proj, OutputNorm, out_proj))
    for number, layer in enumerate(spec.layer_specs):
        if settings.linear_attention_freq[first + number]:
            layer = deepcopy(layer)
            layer.submodules.self_attention = attention
            spec.layer_specs[number] = layer
