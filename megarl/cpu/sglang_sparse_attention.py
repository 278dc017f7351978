"""DeepSeek sparse attention (DSA) in SGLang: a torch path without a GPU, and a compact record of the chosen keys.

SGLang's DSA backend consists of CUDA kernels. Here the indexer is a module of the same parameters; its keys are cached
in the model's dtype, beside the latents of the torch_native backend, and scores are computed in fp32. SGLang's kernels
instead quantise queries and keys to FP8, in blocks of 128 elements with power-of-two scales, after a Hadamard transform
that leaves products unchanged, and so choose other keys at the margin.

The record (`enable_return_indexer_topk`) comes as [tokens, layers with an indexer, topk] positions in the sequence, of
the tokens after the first `index_topk`, which see all keys; SGLang's own is of all tokens and layers, in int32.
"""

from __future__ import annotations

import os
import sys
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

_MAX_ELEMENTS = 1 << 23
"""Elements of keys gathered at once. Larger batches are processed in parts to bound memory."""
SHORT_INDICES = "MEGARL_SHORT_INDICES"
"""Environment variable, 1 if 16 bits suffice for the positions of a compact record."""


def score_keys(query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return an indexer's scores in fp32, [n, m].

    query: [n, heads, size]. keys: [m, size], or [n, m, size] with keys of each query. weights: [n, heads].
    """
    products = query.float() @ keys.float().transpose(-1, -2) * query.shape[-1] ** -0.5  # [n, heads, m]
    return (weights[:, None] @ torch.relu(products))[:, 0]


def top_keys(scores: torch.Tensor, last: torch.Tensor, topk: int) -> torch.Tensor:
    """Return the positions of the best keys up to `last`, [n, topk] int32; -1 where there are no more.

    scores: [n, m]. last: [n], each query's own position.
    """
    is_later = torch.arange(scores.shape[1]) > last[:, None]
    best = scores.masked_fill(is_later, -torch.inf).topk(min(topk, scores.shape[1]), dim=-1).indices
    best = best.masked_fill(best > last[:, None], -1).int()
    return F.pad(best, (0, topk - best.shape[1]), value=-1)


def sparse_attention(
    query: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, value_size: int, scale: float
) -> torch.Tensor:
    """Return absorbed latent attention over the chosen cache slots, [n, heads, value size].

    query: [n, heads, dim]. cache: [slots, dim]; a value is the first `value_size` elements. slots: [n, topk], -1 for
    none; at least one of each query is not.
    """
    parts = []
    rows = max(1, _MAX_ELEMENTS // (slots.shape[1] * cache.shape[1]))
    for q, chosen in zip(query.split(rows), slots.split(rows), strict=True):
        k = cache[chosen.clamp(min=0)].to(q.dtype)  # [n, topk, dim]
        scores = ((q * scale) @ k.transpose(1, 2)).masked_fill(chosen[:, None] < 0, -torch.inf)
        parts.append(scores.softmax(-1) @ k[..., :value_size])
    return torch.cat(parts)


def _requests(batch: Any) -> torch.Tensor:
    """Return the request of each token of a forward pass, as its row in the table of slots."""
    requests: torch.Tensor = batch.req_pool_indices
    mode: Any = getattr(batch, "forward_mode", None)
    has_windows = mode is None or mode.is_target_verify() or mode.is_draft_extend_v2()  # of speculative decoding
    if not has_windows and mode.is_extend():
        return torch.repeat_interleave(requests, batch.extend_seq_lens)
    return torch.repeat_interleave(requests, len(batch.out_cache_loc) // len(requests))


def install() -> None:
    """Make SGLang's DSA models run without a GPU."""
    _hide_sparse_backend()
    _replace_indexer()
    _patch_attention()


def _hide_sparse_backend() -> None:
    """Make SGLang set up DSA models like other MLA models, except the model itself.

    It would take attention backend, page size and cache from CUDA's DSA path.
    """
    from sglang.srt.configs import model_config as configs
    from sglang.srt.mem_cache import kv_cache_builder, kv_cache_configurator  # noqa: F401
    from sglang.srt.model_executor import pool_configurator  # noqa: F401
    from sglang.srt.models import deepseek_v2

    is_dsa = configs.is_deepseek_dsa
    # These assert or ask it of their own module.
    for name in (
        "get_dsa_index_topk",
        "get_dsa_index_n_heads",
        "get_dsa_index_head_dim",
        "dsa_layer_skips_topk",
        "get_num_indexer_layers",
    ):
        function = getattr(configs, name)
        bound = FunctionType(
            function.__code__, {**vars(configs), "is_deepseek_dsa": is_dsa}, name, function.__defaults__
        )
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("sglang.") and vars(module).get(name) is function:
                setattr(module, name, bound)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("sglang.") and vars(module).get("is_deepseek_dsa") is is_dsa:
            module.is_deepseek_dsa = lambda config: False  # type: ignore[attr-defined]
    vars(deepseek_v2)["is_deepseek_dsa"] = is_dsa


def _replace_indexer() -> None:
    from sglang.srt.layers.layernorm import LayerNorm
    from sglang.srt.layers.linear import ReplicatedLinear
    from sglang.srt.layers.rotary_embedding import get_rope_wrapper
    from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool
    from sglang.srt.models import deepseek_v2
    from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk
    from sglang.srt.utils import add_prefix

    class Indexer(torch.nn.Module):
        """The lightning indexer, with the parameters of SGLang's unfused one; see `megatron/sparse_attention.py`."""

        def __init__(
            self,
            hidden_size: int,
            index_n_heads: int,
            index_head_dim: int,
            rope_head_dim: int,
            index_topk: int,
            q_lora_rank: int,
            max_position_embeddings: int,
            rope_theta: float,
            rope_scaling: dict[str, Any] | None = None,
            is_neox_style: bool = True,
            prefix: str = "",
            quant_config: Any = None,
            **_: Any,
        ) -> None:
            super().__init__()
            self.heads, self.size, self.rope_size, self.topk = index_n_heads, index_head_dim, rope_head_dim, index_topk

            def linear(inputs: int, outputs: int, name: str, quantised: bool = True) -> ReplicatedLinear:
                options = {"quant_config": quant_config if quantised else None, "prefix": add_prefix(name, prefix)}
                return ReplicatedLinear(inputs, outputs, bias=False, **options)

            self.wq_b = linear(q_lora_rank, self.heads * self.size, "wq_b")
            self.wk = linear(hidden_size, self.size, "wk")
            self.weights_proj = linear(hidden_size, self.heads, "weights_proj", quantised=False)
            self.k_norm = LayerNorm(self.size)
            self.rotary_emb = get_rope_wrapper(
                rope_head_dim,
                rotary_dim=rope_head_dim,
                max_position=max_position_embeddings,
                base=rope_theta,
                rope_scaling=rope_scaling,
                is_neox_style=is_neox_style,
                device="cpu",
            )

        def forward(
            self,
            x: torch.Tensor,
            q_lora: torch.Tensor,
            positions: torch.Tensor,
            forward_batch: Any,
            layer_id: int,
            return_indices: bool = True,
        ) -> torch.Tensor | None:
            """Cache the tokens' keys and return the keys of each token, [n, topk] positions, -1 for none."""
            query = self.wq_b(q_lora)[0].unflatten(-1, (self.heads, self.size))
            key = self.k_norm(self.wk(x)[0])
            size = self.rope_size
            turned = self.rotary_emb(positions, query[..., :size].clone(), key[:, None, :size].clone())
            query = torch.cat([turned[0].reshape(len(key), self.heads, size), query[..., size:]], dim=-1)
            key = torch.cat([turned[1].reshape(len(key), size), key[:, size:]], dim=-1)
            cache = self._cache(get_token_to_kv_pool(), layer_id, key)
            cache[forward_batch.out_cache_loc] = key
            if not return_indices:
                return None
            weights = self.weights_proj(x)[0].float() * self.heads**-0.5
            table, requests = get_attn_backend().req_to_token_pool.req_to_token, _requests(forward_batch)
            chosen = query.new_full((len(query), self.topk), -1, dtype=torch.int32)
            if len(requests) == len(forward_batch.req_pool_indices):  # one token of each request
                self._choose_each(query, weights, positions, cache, table, requests, chosen)
            else:
                start = 0
                for request, count in zip(*requests.unique_consecutive(return_counts=True), strict=True):
                    rows = slice(start, start + int(count))
                    keys = cache[table[request, : int(positions[rows].max()) + 1].long()]
                    scores = score_keys(query[rows], keys, weights[rows])
                    chosen[rows] = top_keys(scores, positions[rows], self.topk)
                    start = rows.stop
            return maybe_capture_indexer_topk(layer_id, chosen)

        def _choose_each(
            self,
            query: torch.Tensor,
            weights: torch.Tensor,
            positions: torch.Tensor,
            cache: torch.Tensor,
            table: torch.Tensor,
            requests: torch.Tensor,
            chosen: torch.Tensor,
        ) -> None:
            longest = int(positions.max()) + 1 if len(positions) else 0
            step = max(1, _MAX_ELEMENTS // max(1, longest * max(self.size, self.heads)))
            for start in range(0, len(query), step):
                rows = slice(start, start + step)
                is_valid = torch.arange(longest) <= positions[rows, None]
                slots = table[requests[rows], :longest].long() * is_valid
                scores = score_keys(query[rows], cache[slots], weights[rows])
                chosen[rows] = top_keys(scores, positions[rows], self.topk)

        def _cache(self, pool: Any, layer_id: int, key: torch.Tensor) -> torch.Tensor:
            """Return the layer's index keys in the pool, [slots, size], allocated on first use."""
            caches = vars(pool).setdefault("_megarl_index_keys", {})
            if layer_id not in caches:
                caches[layer_id] = key.new_zeros(len(pool.get_key_buffer(layer_id)), self.size)
            cache: torch.Tensor = caches[layer_id]
            return cache

    deepseek_v2.Indexer = Indexer


def _patch_attention() -> None:
    """Let the torch_native backend attend to the keys of `topk_indices`, which it does not know."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    def sparse(forward: Any) -> Any:
        def run(
            self: Any,
            q: torch.Tensor,
            k: Any,
            v: Any,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            topk_indices: torch.Tensor | None = None,
            **options: Any,
        ) -> torch.Tensor:
            if topk_indices is None:
                dense: torch.Tensor = forward(self, q, k, v, layer, forward_batch, save_kv_cache, **options)
                return dense
            if save_kv_cache and k is not None:
                self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
            cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[:, 0]
            query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
            table = self.req_to_token_pool.req_to_token
            chosen = topk_indices.long()
            slots = table[_requests(forward_batch)[:, None], chosen.clamp(min=0)].long()
            slots = torch.where(chosen < 0, chosen, slots)
            return sparse_attention(query, cache, slots, layer.v_head_dim, layer.scaling).flatten(1)

        return run

    TorchNativeAttnBackend.forward_extend = sparse(TorchNativeAttnBackend.forward_extend)
    TorchNativeAttnBackend.forward_decode = sparse(TorchNativeAttnBackend.forward_decode)


def install_record() -> None:
    """Record the chosen keys compactly, on every device; see this module's docstring."""
    from sglang.srt.configs import model_config as configs
    from sglang.srt.managers.scheduler_components import batch_result_processor
    from sglang.srt.model_executor import model_runner
    from sglang.srt.runtime_context import get_exec, get_schedule
    from sglang.srt.state_capturer import indexer_topk
    from sglang.srt.state_capturer.base import BaseTopkCapturer

    class CompactCapturer(indexer_topk.IndexerTopkCapturer):  # type: ignore[misc]
        """SGLang's capturer with a row for each layer that has an indexer, and 2 bytes per position if they suffice."""

        def __init__(
            self, layers: list[int], is_short: bool, num_tokens: int, index_topk: int, running: int, device: str
        ) -> None:
            self.rows = {layer: row for row, layer in enumerate(layers)}
            self.num_indexer_layers, self.index_topk = len(layers), index_topk
            # Its own constructor asserts data parallel attention, but tensor parallel ranks all run the whole indexer.
            BaseTopkCapturer.__init__(
                self,
                num_tokens=num_tokens,
                max_batch_size=max(get_schedule().chunked_prefill_size, running),
                num_layers=len(layers),
                topk_size=-(-index_topk // 2) if is_short else index_topk,
                device=device,
                name="indexer_topk",
                device_topk_size=index_topk,
            )
            self.topk_size = index_topk
            if is_short:
                self.host_cache.buffer = self.host_cache.buffer.view(torch.int16)[..., :index_topk]

        def _get_local_slice(self, *args: Any) -> torch.Tensor:
            return super()._get_local_slice(*args).to(self.host_cache.buffer.dtype)  # keeps the lower bits

        def capture(self, layer_id: int, topk_indices: torch.Tensor) -> None:
            if layer_id in self.rows:
                super().capture(self.rows[layer_id], topk_indices)

    def create(
        *, model_config: Any, num_tokens: int, max_running_requests: int, device: str
    ) -> indexer_topk.IndexerTopkCapturer | None:
        hf = model_config.hf_text_config
        if not get_exec().features.enable_return_indexer_topk or not getattr(hf, "index_topk", None):
            return None
        skips = configs.dsa_layer_skips_topk
        layers = [layer for layer in range(hf.num_hidden_layers) if not skips(hf, layer)]
        return CompactCapturer(
            layers,
            os.environ.get(SHORT_INDICES) == "1",
            num_tokens,
            hf.index_topk,
            max_running_requests,
            device,
        )

    def collect(self: Any, req: Any) -> None:
        capturer = indexer_topk.get_global_indexer_capturer()
        if capturer is None or not req.return_indexer_topk:
            return
        length = len(req.origin_input_ids) + len(req.output_ids_through_stop)
        start = max(req.routed_experts_start_len or 0, capturer.index_topk)
        record = capturer.get_topk(req.kv.req_pool_idx, length, self.req_to_token_pool, min(start, length - 1))
        req.indexer_topk = record[: max(0, length - 1 - start)]

    run, initialize = model_runner.ModelRunner.forward, model_runner.ModelRunner.init_indexer_capturer

    def run_without_record_of_drafts(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run without the record in a draft model, which SGLang would write over the policy's."""
        capturer = indexer_topk.get_global_indexer_capturer()
        if capturer is None or not self.is_draft_worker:
            return run(self, *args, **kwargs)
        indexer_topk.set_global_indexer_capturer(None)
        try:
            return run(self, *args, **kwargs)
        finally:
            indexer_topk.set_global_indexer_capturer(capturer)

    model_runner.ModelRunner.forward = run_without_record_of_drafts
    model_runner.ModelRunner.init_indexer_capturer = lambda self: None if self.is_draft_worker else initialize(self)
    model_runner.create_indexer_capturer = create
    batch_result_processor.SchedulerBatchResultProcessor._maybe_collect_indexer_topk = collect
