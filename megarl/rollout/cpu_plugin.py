"""SGLang's plug-in: what its CPU path lacks on a machine without AMX. It runs in each of SGLang's processes.

SGLang finds it through the entry point group `sglang.srt.plugins` that setup.py declares.
"""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    """Complete SGLang's CPU path; does nothing where SGLang runs on a GPU."""
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        return
    _absorb_mla()
    _mask_foreign_experts()


def _absorb_mla() -> None:
    """DeepSeek's attention on the torch_native backend.

    No choice is registered for that backend, and the one that SGLang falls back to for prompts needs a kernel of
    another backend. The absorbed form (q and output multiplied into the latent space) is plain matrix products.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as choice

    choice.AttentionBackendRegistry.register("torch_native", lambda attn, batch: choice.AttnForwardMethod.MLA)


def _mask_foreign_experts() -> None:
    """Expert parallelism: the dispatcher marks choices of experts that live on another rank with id -1.

    SGLang's torch path counts tokens by scattering to the expert id, which fails for -1. Such choices are computed
    with local expert 0 and weight 0, and the sum over ranks, which SGLang takes anyway, adds the right ones.
    """
    from sglang.srt.layers.moe import fused_moe_native

    forward = fused_moe_native.moe_forward_native

    def masked(layer: torch.nn.Module, x: torch.Tensor, topk_output: Any, moe_runner_config: Any) -> torch.Tensor:
        weights, ids, logits = topk_output
        local = ids >= 0
        topk_output = type(topk_output)(weights * local, ids * local, logits)
        return forward(layer, x, topk_output, moe_runner_config)

    fused_moe_native.moe_forward_native = masked
