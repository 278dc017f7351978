"""SGLang plug-in that secures the rendezvous of its processes, and completes its CPU path for machines without AMX.

SGLang runs it in each process, through the entry point group `sglang.srt.plugins` in setup.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import torch

from megarl.cpu import sglang_images, sglang_speculative
from megarl.parallel.job_secret import SECRET_ENV, SealedPickle, seal_object_collectives
from megarl.parallel.rendezvous import bind_store_addresses

_MAX_ELEMENTS = 1 << 23
"""Elements of keys gathered at once. Larger batches are processed in parts to bound memory."""


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    cap: float = 0.0,
    window: int | None = None,
) -> torch.Tensor:
    """Return softmax(scale * q k) v for one query per sequence, [n, heads, value dim], with grouped-query heads.

    query: [n, heads, dim].
    keys, values: the whole cache, [cache, kv heads, dim] and [cache, kv heads, value dim].
    slots: [n, at least max(lengths)], the cache slots of each sequence's tokens.
    lengths: [n] in tokens, at least 1.
    cap: if above 0, logits x become cap * tanh(x / cap).
    window: how many keys before its own a query sees; None for all.
    """
    longest = int(lengths.max())
    rows = max(1, _MAX_ELEMENTS // max(1, longest * keys[0].numel()))
    parts = []
    for q, cache_slots, length in zip(query.split(rows), slots.split(rows), lengths.split(rows), strict=True):
        valid = torch.arange(longest) < length[:, None]  # [n, longest]
        if window is not None:
            valid &= torch.arange(longest) >= length[:, None] - 1 - window
        cache_slots = cache_slots[:, :longest].long() * valid  # slot 0 is SGLang's padding and gets weight 0
        k, v = keys[cache_slots].to(q.dtype), values[cache_slots].to(q.dtype)  # [n, longest, kv heads, dim]
        grouped = q.reshape(len(q), k.shape[2], -1, q.shape[-1])  # [n, kv heads, heads per kv head, dim]
        scores = cap_logits((grouped * scale) @ k.permute(0, 2, 3, 1), cap)
        weights = scores.masked_fill(~valid[:, None, None], float("-inf")).softmax(-1)
        parts.append((weights @ v.transpose(1, 2)).reshape(len(q), q.shape[1], v.shape[-1]))
    return torch.cat(parts)


def extend_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    new_lengths: torch.Tensor,
    scale: float,
    cap: float,
    window: int | None,
) -> torch.Tensor:
    """Return attention outputs of new tokens, [sum(new), heads, value dim].

    query: [sum(new), heads, dim], the last `new_lengths` [n] tokens of each sequence, one sequence after the other. For
    the other arguments see `decode_attention`.
    """
    parts = []
    for q, cache_slots, length in zip(query.split(new_lengths.tolist()), slots, lengths.tolist(), strict=True):
        k, v = (cache[cache_slots[:length].long()].to(q.dtype).transpose(0, 1)[:, None] for cache in (keys, values))
        grouped = q.unflatten(1, (len(k), -1)).permute(1, 2, 0, 3)  # [kv heads, heads per kv head, queries, dim]
        distance = torch.arange(length - len(q), length)[:, None] - torch.arange(length)
        valid = (distance >= 0) & (distance <= (length if window is None else window))
        scores = cap_logits((grouped * scale) @ k.transpose(-1, -2), cap)
        weights = scores.masked_fill(~valid, float("-inf")).softmax(-1)
        parts.append((weights @ v).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(parts)


def cap_logits(scores: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(scores / cap) if cap else scores


def register() -> None:
    """Bind stores to private addresses, seal pickles, and patch SGLang's CPU path on a CPU."""
    from sglang.srt.utils import is_cpu

    bind_store_addresses()
    if SECRET_ENV in os.environ:
        seal_pickles()
    sglang_images.install()
    if is_cpu():
        _patch_models()
        _patch_image_processor()
        _patch_expert_parallel()
        _patch_attention()
        sglang_speculative.install()


def seal_pickles() -> None:
    """Make the processes of a MegaRL engine reject foreign pickles instead of loading them.

    Tensor parallel ranks forward requests as pickles over gloo, whose ports have no authentication.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed import utils as stateless
    from sglang.srt.utils import common

    seal_object_collectives()
    for module in (common, parallel_state, stateless):
        vars(module)["pickle"] = SealedPickle(f"a pickle of {module.__name__}")


def _patch_models() -> None:
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
    from sglang.srt.model_executor import model_runner
    from sglang.srt.models.deepseek_common import attention_backend_handler as choice

    # DeepSeek's attention: SGLang registers no form for torch_native, and its fallback for prompts needs another
    # backend's kernel. The absorbed form (q and output multiplied into the latent space) needs only matrix products.
    choice.AttentionBackendRegistry.register("torch_native", lambda attn, batch: choice.AttnForwardMethod.MLA)

    scaled = factory.get_rope_cpu

    def rope(*arguments: Any) -> torch.nn.Module:
        """Support DeepSeek without rope_scaling (the sixth argument), which SGLang's CPU variant asserts."""
        has_scaling = len(arguments) > 5 and arguments[5]
        return scaled(*arguments) if has_scaling else factory.get_rope(*arguments[:8])

    factory.get_rope_cpu = rope

    # For AMX, SGLang pads MLP widths and heads per rank instead of repeating key-value heads. Ranks would then hold
    # other slices than on GPUs, which the tables in `models` describe.
    model_runner.adjust_config_with_unaligned_cpu_tp = lambda model_config, load_config, tp_size: model_config

    def allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, **_: Any) -> torch.Tensor:
        """Allocate host buffers, such as that for routed experts, without registering them with CUDA."""
        return torch.empty(dims, dtype=dtype, device=device)

    ALLOC_MEMORY_FUNCS["cpu"] = allocate


_QWEN3_5_KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_qkvzba_split_reshape_cat_cpu",
    "fused_input_proj_cpu",
)
"""Operators that SGLang's file of Qwen3.5 looks up when its processor of images, which names the model, is imported."""


def _patch_image_processor() -> None:
    """Load a tokenizer and an image processor without torchvision, which the processor of videos would need."""
    from sglang.srt.utils.hf_transformers import processor

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError("a kernel of Qwen3.5 has no stand-in on a CPU without AMX")

    for name in _QWEN3_5_KERNELS:
        if not hasattr(torch.ops.sgl_kernel, name):
            setattr(torch.ops.sgl_kernel, name, missing)

    class Processor:
        def __init__(self, folder: str, options: dict[str, Any]) -> None:
            from transformers import AutoTokenizer
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            self.tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            self.image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

        @staticmethod
        def from_pretrained(folder: str, *_: Any, trust_remote_code: bool = False, **__: Any) -> Processor:
            return Processor(folder, {"trust_remote_code": trust_remote_code})

    processor.AutoProcessor = Processor


def _patch_expert_parallel() -> None:
    """Support expert parallelism, in which experts on other ranks have id -1, which SGLang's torch path cannot count.

    SGLang sums over ranks anyway.
    """
    from sglang.srt.layers.moe import fused_moe_native

    forward = fused_moe_native.moe_forward_native

    def masked(layer: torch.nn.Module, x: torch.Tensor, topk_output: Any, moe_runner_config: Any) -> torch.Tensor:
        if layer.moe_ep_size == 1:
            return forward(layer, x, topk_output, moe_runner_config)
        is_plain_swiglu = moe_runner_config.activation == "silu" and moe_runner_config.gemm1_alpha is None
        if not is_plain_swiglu or hasattr(layer, "w13_weight_bias"):
            raise NotImplementedError(
                "expert parallelism on a CPU: SwiGLU experts without biases only; set rollout.ep=1"
            )
        w13, w2 = cast(torch.Tensor, layer.w13_weight), cast(torch.Tensor, layer.w2_weight)
        return local_experts(x, topk_output[0], topk_output[1], w13, w2)

    fused_moe_native.moe_forward_native = masked


def local_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of each row's chosen SwiGLU experts, [n, hidden]. Negative ids are left out.

    x: [n, hidden]. weights, ids: [n, k]. w13: [experts, 2 * ffn, hidden], gate above up. w2: [experts, hidden, ffn].
    """
    out = torch.zeros_like(x)
    for expert in range(w13.shape[0]):
        row, choice = (ids == expert).nonzero(as_tuple=True)
        if len(row) == 0:
            continue
        gate, up = torch.nn.functional.linear(x[row], w13[expert]).chunk(2, dim=-1)
        y = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2[expert])
        out.index_add_(0, row, (y * weights[row, choice, None]).to(out.dtype))
    return out


def _patch_attention() -> None:
    """Batch the backend's decode attention, which loops over sequences, and apply the soft cap that it ignores."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    sequential_decode = TorchNativeAttnBackend._run_sdpa_forward_decode
    uncapped_extend = TorchNativeAttnBackend._run_sdpa_forward_extend

    def record_cap(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(self: Any, q: Any, k: Any, v: Any, layer: Any, *rest: Any, **options: Any) -> torch.Tensor:
            self.logit_cap = layer.logit_cap
            return forward(self, q, k, v, layer, *rest, **options)

        return run

    def decode(self: Any, *arguments: Any, scaling: float | None = None, **options: Any) -> torch.Tensor:
        query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens = arguments
        if encoder_lens is not None or scaling is None:
            return sequential_decode(self, *arguments, scaling=scaling, **options)
        slots, window = req_to_token[req_pool_indices], options.get("sliding_window_size")
        output.copy_(decode_attention(query, k_cache, v_cache, slots, seq_lens, scaling, self.logit_cap, window))
        return output

    def extend(self: Any, *arguments: Any, scaling: float | None = None, **options: Any) -> torch.Tensor:
        if not self.logit_cap:
            return uncapped_extend(self, *arguments, scaling=scaling, **options)
        query, output, k_cache, v_cache, req_to_token, requests, lengths, _, new_lengths, encoder_lens = arguments
        if encoder_lens is not None or scaling is None or not options["causal"]:
            raise NotImplementedError("a soft cap on a CPU: causal self attention only")
        slots, window = req_to_token[requests], options.get("sliding_window_size")
        caches = (k_cache, v_cache, slots, lengths, new_lengths)
        output.copy_(extend_attention(query, *caches, scaling, self.logit_cap, window))
        return output

    TorchNativeAttnBackend._run_sdpa_forward_decode = decode
    TorchNativeAttnBackend._run_sdpa_forward_extend = extend
    TorchNativeAttnBackend.forward_extend = record_cap(TorchNativeAttnBackend.forward_extend)
    TorchNativeAttnBackend.forward_decode = record_cap(TorchNativeAttnBackend.forward_decode)
