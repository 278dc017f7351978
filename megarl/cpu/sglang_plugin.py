"""SGLang plug-in: secures the rendezvous of its processes, dequantises MXFP4, and completes its CPU path without AMX.

SGLang runs it in each process, through the entry point group `sglang.srt.plugins` in setup.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

import torch

from megarl.cpu import sglang_gated_delta_net, sglang_images, sglang_sparse_attention, sglang_speculative
from megarl.models import fp8, mxfp4
from megarl.models.int4 import Int4Matrix, dequantise
from megarl.parallel.gloo_devices import share_devices
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
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(scale * q k) v for one query per sequence, [n, heads, value dim], with grouped-query heads.

    query: [n, heads, dim].
    keys, values: the whole cache, [cache, kv heads, dim] and [cache, kv heads, value dim].
    slots: [n, at least max(lengths)], the cache slots of each sequence's tokens.
    lengths: [n] in tokens, at least 1.
    cap: if above 0, logits x become cap * tanh(x / cap).
    window: how many keys before its own a query sees; None for all.
    sinks: [heads], for each head the logit of a further key whose value is 0.
    """
    longest = int(lengths.max())
    rows = max(1, _MAX_ELEMENTS // max(1, longest * keys[0].numel()))
    kv_heads, place = keys.shape[1], torch.arange(longest)
    parts = []
    for q, cache_slots, length in zip(query.split(rows), slots.split(rows), lengths.split(rows), strict=True):
        valid = place < length[:, None]  # [n, longest]
        if window is not None:
            valid &= place >= length[:, None] - 1 - window
        cache_slots = cache_slots[:, :longest].long() * valid  # slot 0 is SGLang's padding and gets weight 0
        # index_select copies whole rows; indexing with several dimensions copies number by number, three times slower.
        k = keys.flatten(1).index_select(0, cache_slots.flatten())
        k = k.view(len(q), longest, *keys.shape[1:]).to(q.dtype)  # [n, longest, kv heads, dim]
        value_rows = cache_slots[:, None] * kv_heads + torch.arange(kv_heads)[:, None]  # [n, kv heads, longest]
        v = values.flatten(0, 1).index_select(0, value_rows.flatten())
        v = v.view(*value_rows.shape, -1).to(q.dtype)  # [n, kv heads, longest, value dim]
        grouped = q.reshape(len(q), kv_heads, -1, q.shape[-1])  # [n, kv heads, heads per kv head, dim]
        scores = cap_logits((grouped * scale) @ k.permute(0, 2, 3, 1), cap)
        weights = _softmax(scores.masked_fill(~valid[:, None, None], float("-inf")), sinks)
        parts.append((weights @ v).reshape(len(q), q.shape[1], v.shape[-1]))
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
    sinks: torch.Tensor | None = None,
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
        weights = _softmax(scores.masked_fill(~valid, float("-inf")), None if sinks is None else sinks[:, None])
        parts.append((weights @ v).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(parts)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of keys, the last dimension. sinks: logits of a further key, [heads, ...]."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).unflatten(0, scores.shape[-sinks.dim() - 2 : -sinks.dim()]).unsqueeze(-1)
    return torch.cat([scores, column.expand(*scores.shape[:-1], 1)], dim=-1).softmax(-1)[..., :-1]


def cap_logits(scores: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(scores / cap) if cap else scores


def register() -> None:
    """Bind stores to private addresses, share gloo's devices, seal pickles, patch how SGLang reads MXFP4, chooses
    dtypes and verifies drafts, and on a CPU complete its CPU path."""
    from sglang.srt.utils import is_cpu

    bind_store_addresses()
    share_devices()
    _patch_configs()
    _patch_dtypes()
    _patch_tool_calls()
    if SECRET_ENV in os.environ:
        seal_pickles()
    _patch_stacked_experts()
    _keep_int4_layout()
    sglang_sparse_attention.install_record()
    sglang_speculative.install_verification()
    sglang_images.install()
    if is_cpu():
        _patch_models()
        _patch_minimax()
        _patch_ling()
        _patch_image_processor()
        _patch_expert_parallel()
        _patch_int4_experts()
        _patch_fp8()
        _patch_attention()
        _patch_gpt_oss()
        sglang_sparse_attention.install()
        sglang_speculative.install()
        sglang_gated_delta_net.install()


def _patch_configs() -> None:
    """Read Qwen3-Next's and Qwen3.5's config.json as transformers does.

    SGLang's class reads the options of rotary embeddings at the top level only, where transformers 5 does not write
    them, and `full_attention_interval` without a default, where transformers writes `layer_types`.
    """
    from sglang.srt.configs.qwen3_next import Qwen3NextConfig

    init = Qwen3NextConfig.__init__

    def read_like_transformers(self: Any, **values: Any) -> None:
        rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
        values |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        types = values.get("layer_types") or ["linear_attention"] * 3 + ["full_attention"]
        values.setdefault("full_attention_interval", [*types, "full_attention"].index("full_attention") + 1)
        init(self, **values)

    Qwen3NextConfig.__init__ = read_like_transformers


def _patch_dtypes() -> None:
    """Give models the engine's dtype where they ask config.json for it, and ERNIE 4.5 its balancing bias in FP32.

    gpt-oss, Qwen3-Next and Ling 2 create some of their weights in the dtype of config.json, whatever the engine's.
    """
    from sglang.srt.configs import model_config
    from sglang.srt.models import ernie4

    resolve = model_config._get_and_verify_dtype

    def resolve_for_models(config: Any, dtype: str | torch.dtype) -> torch.dtype:
        config.dtype = resolve(config, dtype)
        return cast(torch.dtype, config.dtype)

    model_config._get_and_verify_dtype = resolve_for_models
    construct = ernie4.MoEGate.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        construct(self, *arguments, **options)
        self.e_score_correction_bias.data = self.e_score_correction_bias.data.float()

    ernie4.MoEGate.__init__ = init


def _patch_tool_calls() -> None:
    """Let GLM-4.7's parser be asked by /parse_function_call, whose tools lack a field that it reads."""
    from sglang.srt.managers import io_struct

    io_struct.Function.strict = False


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


def _patch_stacked_experts() -> None:
    """Complete how gpt-oss in bfloat16 loads its experts.

    SGLang 0.5.23 would leave those of MXFP4 folders unset, and copies whole stacks under expert parallelism and for
    redundant experts, too.
    """
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.models import gpt_oss

    canonicalize = gpt_oss._canonicalize_weights
    gpt_oss._canonicalize_weights = lambda config, weights: canonicalize(config, dequantised_stacks(weights))
    load_stack = FusedMoE.weight_loader_fused

    def load_local(
        self: Any, param: torch.Tensor, loaded_weight: torch.Tensor, weight_name: str, shard_id: str
    ) -> None:
        table = get_global_expert_location_metadata()
        if table is not None and len(loaded_weight) == table.num_logical_experts < table.num_physical_experts:
            loaded_weight = loaded_weight[table.physical_to_logical_map_cpu[self.layer_id]]
        if self.moe_ep_size > 1 and len(loaded_weight) == self.moe_ep_size * len(param):
            loaded_weight = loaded_weight.chunk(self.moe_ep_size)[self.moe_ep_rank]
        load_stack(self, param, loaded_weight, weight_name, shard_id)

    FusedMoE.weight_loader_fused = load_local


def dequantised_stacks(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Replace each pair of MXFP4 blocks and scales by the stack in bfloat16, [experts, columns, rows]."""
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        stack = name.removesuffix(mxfp4.BLOCKS_SUFFIX).removesuffix(mxfp4.SCALES_SUFFIX)
        if stack == name:
            yield name, tensor
        elif stack not in waiting:
            waiting[stack] = tensor
        else:
            parts = sorted((waiting.pop(stack), tensor), key=torch.Tensor.dim)
            yield stack, mxfp4.dequantise(parts[1], parts[0]).mT


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


def _patch_minimax() -> None:
    """Replace the Triton kernels of MiniMax-M2's norms of queries and keys, over all heads of all ranks."""
    from sglang.srt.models import minimax_m2

    def norm(self: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = torch.stack([x.float().square().mean(-1) for x in (q, k)])
        if self._world_size > 1:
            mean = minimax_m2.attn_tp_all_reduce(mean) / self._world_size
        factors = torch.rsqrt(mean + self._eps)[..., None]
        weights = (self._q_norm.weight.float(), self._k_norm.weight.float())
        queries, keys = (
            (x.float() * factor * weight).to(x.dtype)
            for x, factor, weight in zip((q, k), factors, weights, strict=True)
        )
        return queries, keys

    minimax_m2.MiniMaxM2QKRMSNorm._forward_naive = norm


def _patch_ling() -> None:
    """Scale the output of Ling 2's routed experts, as SGLang's kernels for GPUs do and its torch path does not."""
    from sglang.srt.models import bailing_moe

    forward = bailing_moe.BailingMoESparseMoeBlock._forward_router_experts

    def scaled(self: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        output: torch.Tensor = forward(self, *arguments, **options)
        is_scaled = self.topk.topk_config.apply_routed_scaling_factor_on_output
        return output if is_scaled else output * self.routed_scaling_factor

    bailing_moe.BailingMoESparseMoeBlock._forward_router_experts = scaled


def _patch_gpt_oss() -> None:
    """Accept the backend, which has sinks by `_patch_attention`, and keep sinks in the model's dtype, not in BF16."""
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.models import gpt_oss

    backends = model_hook.attention_backends_of
    # The module only compares them with lists of what SGLang has tested.
    model_hook.attention_backends_of = lambda settings: tuple(
        "triton" if name == "torch_native" else name for name in backends(settings)
    )

    construct = gpt_oss.GptOssAttention.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        construct(self, *arguments, **options)
        self.sinks.data = self.sinks.data.to(self.qkv_proj.weight.dtype)

    gpt_oss.GptOssAttention.__init__ = init


_UNUSED_KERNELS = "fused_qkvzba_split_reshape_cat_cpu", "fused_input_proj_cpu"
"""Operators that SGLang's file of Qwen3.5 looks up where it is imported, as by the processor of images."""


def _patch_image_processor() -> None:
    """Load a tokenizer and an image processor without torchvision, which the processor of videos would need."""
    from sglang.srt.utils.hf_transformers import processor

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError("this kernel of Qwen3.5 needs a CPU with AMX")

    for name in _UNUSED_KERNELS:
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
        if moe_runner_config.activation != "silu":
            raise NotImplementedError("expert parallelism on a CPU: SwiGLU experts only; set rollout.ep=1")
        activation = swiglu
        if moe_runner_config.gemm1_alpha is not None:
            activation = partial(
                clamped_swiglu, alpha=moe_runner_config.gemm1_alpha, limit=moe_runner_config.gemm1_clamp_limit
            )
        w13, w2 = cast(torch.Tensor, layer.w13_weight), cast(torch.Tensor, layer.w2_weight)
        b13, b2 = getattr(layer, "w13_weight_bias", None), getattr(layer, "w2_weight_bias", None)
        return local_experts(x, topk_output[0], topk_output[1], w13, w2, b13, b2, activation)

    fused_moe_native.moe_forward_native = masked


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Apply gpt-oss's activation to columns of gate and up in turn."""
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def local_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    activation: Callable[[torch.Tensor], torch.Tensor] = swiglu,
) -> torch.Tensor:
    """Return the weighted sum of each row's chosen experts, [n, hidden]. Negative ids are left out.

    x: [n, hidden]. weights, ids: [n, k]. w13: [experts, 2 * ffn, hidden], rows of gate and up in the order that
    `activation` expects, by default gate above up. w2: [experts, hidden, ffn]. b13, b2: biases, [experts, rows].
    """
    out = torch.zeros_like(x)
    for expert in range(w13.shape[0]):
        row, choice = (ids == expert).nonzero(as_tuple=True)
        if len(row) == 0:
            continue
        gate_up = _linear(x[row], w13[expert], None if b13 is None else b13[expert])
        y = _linear(activation(gate_up), w2[expert], None if b2 is None else b2[expert])
        out.index_add_(0, row, (y * weights[row, choice, None]).to(out.dtype))
    return out


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Apply a linear layer whose bias is FP32, whatever the weight's dtype."""
    y = torch.nn.functional.linear(x, weight)
    return y if bias is None else (y.float() + bias).to(y.dtype)


def _keep_int4_layout() -> None:
    """Leave INT4 experts as Triton's kernel has them when a weight update begins.

    SGLang then gives them the checkpoint's shapes, with which Marlin's class begins, and does not convert them back.
    """
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16TritonMoE

    CompressedTensorsWNA16TritonMoE.restore_weights_before_loading = lambda self, layer: None


def _patch_int4_experts() -> None:
    """Compute with INT4 experts, for which SGLang has Marlin's and Triton's kernels on a GPU only.

    The layer has its experts as for Triton (`moe_runner_backend`), so that weight syncs write the same bytes as there.
    """
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16TritonMoE as Scheme

    def apply_weights(self: Any, layer: torch.nn.Module, dispatch_output: Any) -> Any:
        weights, ids = dispatch_output.topk_output[:2]
        x = dispatch_output.hidden_states
        w13, w2 = (
            Int4Matrix(getattr(layer, f"{name}_weight_packed"), getattr(layer, f"{name}_weight_scale"))
            for name in ("w13", "w2")
        )
        return StandardCombineInput(hidden_states=local_int4_experts(x, weights, ids, w13, w2))

    dtypes = CompressedTensorsConfig.get_supported_act_dtypes
    # fp32, to compare engines exactly
    CompressedTensorsConfig.get_supported_act_dtypes = lambda self: [*dtypes(self), torch.float32]
    Scheme.apply_weights = apply_weights
    Scheme.create_moe_runner = lambda self, layer, config: setattr(self, "moe_runner_config", config)


def local_int4_experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w13: Int4Matrix, w2: Int4Matrix
) -> torch.Tensor:
    """Like `local_experts`, with a leading dimension of experts in both tensors of `w13` and `w2`.

    The weights are rounded to bfloat16 as in Triton's kernel, whatever the dtype of `x`.
    """
    chosen = [expert for expert in ids.unique().tolist() if expert >= 0]
    if not chosen:
        return torch.zeros_like(x)
    position = torch.full((len(w13.packed) + 1,), -1)  # the last entry is for ids of -1
    position[chosen] = torch.arange(len(chosen))

    def stack(experts: Int4Matrix) -> torch.Tensor:
        parts = (Int4Matrix(experts.packed[e], experts.scales[e].bfloat16()) for e in chosen)
        return torch.stack([dequantise(part, x.dtype) for part in parts])

    return local_experts(x, weights, position[ids.long()], stack(w13), stack(w2))


def _patch_fp8() -> None:
    """Compute with FP8 matrices in blocks of 128, for which SGLang has kernels for GPUs and AMX only.

    Parameters stay as the checkpoint has them, so that weight syncs write the same bytes as on a GPU. Activations are
    not quantised: on a GPU they are rounded to FP8, too.
    """
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
    from sglang.srt.models.deepseek_common import deepseek_weight_loader

    def apply_linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return _linear(x, fp8.dequantise(layer.weight, layer.weight_scale_inv).to(x.dtype), bias)

    def apply_experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
        weights, ids = dispatch_output.topk_output[:2]
        x = dispatch_output.hidden_states
        w13, w2 = (
            torch.stack([fp8.dequantise(*pair).to(x.dtype) for pair in zip(matrices, scales, strict=True)])
            for matrices, scales in (
                (layer.w13_weight, layer.w13_weight_scale_inv),
                (layer.w2_weight, layer.w2_weight_scale_inv),
            )
        )
        return StandardCombineInput(hidden_states=local_experts(x, weights, ids, w13, w2))

    for method in (Fp8LinearMethod, Fp8MoEMethod):
        method.process_weights_after_loading_block_quant = lambda self, layer: None
    Fp8LinearMethod.apply, Fp8MoEMethod.apply = apply_linear, apply_experts
    Fp8MoEMethod.create_moe_runner = lambda self, layer, config: setattr(self, "moe_runner_config", config)
    # Latent attention multiplies by parts of this matrix.
    deepseek_weight_loader.block_quant_to_tensor_quant = lambda weight, scale, block: (
        fp8.dequantise(weight, scale).bfloat16(),
        None,
    )


def _patch_attention() -> None:
    """Batch the backend's decode attention, which loops over sequences, and complete it.

    It ignores soft caps and has no sinks, and looks for the tokens of a layer with a window where the other layers have
    them, although SGLang may keep only a window of them in a cache of their own.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    sequential_decode = TorchNativeAttnBackend._run_sdpa_forward_decode
    plain_extend = TorchNativeAttnBackend._run_sdpa_forward_extend

    def record_layer(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(
            self: Any, q: Any, k: Any, v: Any, layer: Any, *rest: Any, sinks: torch.Tensor | None = None, **options: Any
        ) -> torch.Tensor:
            self.logit_cap, self.sinks = layer.logit_cap, sinks
            self.is_windowed = self.use_sliding_window_kv_pool and bool(
                self.token_to_kv_pool.layers_mapping[layer.layer_id][1]
            )
            return forward(self, q, k, v, layer, *rest, **options)

        return run

    def slots_of(self: Any, req_to_token: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        slots = req_to_token.index_select(0, requests)
        return self.token_to_kv_pool.translate_loc_from_full_to_swa(slots) if self.is_windowed else slots

    def decode(self: Any, *arguments: Any, scaling: float | None = None, **options: Any) -> torch.Tensor:
        query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens = arguments
        if encoder_lens is not None or scaling is None:
            return sequential_decode(self, *arguments, scaling=scaling, **options)
        slots, window = slots_of(self, req_to_token, req_pool_indices), options.get("sliding_window_size")
        caches = (k_cache, v_cache, slots, seq_lens)
        output.copy_(decode_attention(query, *caches, scaling, self.logit_cap, window, self.sinks))
        return output

    def extend(self: Any, *arguments: Any, scaling: float | None = None, **options: Any) -> torch.Tensor:
        if not self.logit_cap and self.sinks is None and not self.is_windowed:
            return plain_extend(self, *arguments, scaling=scaling, **options)
        query, output, k_cache, v_cache, req_to_token, requests, lengths, _, new_lengths, encoder_lens = arguments
        if encoder_lens is not None or scaling is None or not options["causal"]:
            raise NotImplementedError("soft caps, sinks and windows on a CPU: causal self attention only")
        slots, window = slots_of(self, req_to_token, requests), options.get("sliding_window_size")
        caches = (k_cache, v_cache, slots, lengths, new_lengths)
        output.copy_(extend_attention(query, *caches, scaling, self.logit_cap, window, self.sinks))
        return output

    TorchNativeAttnBackend._run_sdpa_forward_decode = decode
    TorchNativeAttnBackend._run_sdpa_forward_extend = extend
    TorchNativeAttnBackend.forward_extend = record_layer(TorchNativeAttnBackend.forward_extend)
    TorchNativeAttnBackend.forward_decode = record_layer(TorchNativeAttnBackend.forward_decode)
