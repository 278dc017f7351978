"""Stand-ins for kernels besides Transformer Engine's: gated delta nets (fla-core 0.6), sparse attention, AdamW on the
host.

Like `te_modules.py`: outputs of the same shapes, the same tensors saved for the backward pass, the larger work space of
the kernels, and no values.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

CHUNK = 64
"""Tokens of a chunk of the gated delta rule."""


# --- gated delta nets ---------------------------------------------------------------------------------------------


class _NormFunction(torch.autograd.Function):
    """l2norm: saves its output and the inverse norms."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        output = torch.empty_like(x)
        ctx.save_for_backward(output, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.empty_like(ctx.saved_tensors[0])


class _ConvolutionFunction(torch.autograd.Function):
    """causal_conv1d with its activation: saves its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight, bias)
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors
        return x.new_empty(x.shape), torch.empty_like(weight), None if bias is None else torch.empty_like(bias)


class _DeltaRuleFunction(torch.autograd.Function):
    """chunk_gated_delta_rule: saves q, k, v, beta, the summed decays and the inverted system of each chunk.

    Both passes compute the states before the chunks and what the tokens write. The rest of the work space is smaller.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        sums = torch.empty_like(g, dtype=torch.float32)
        system = k.new_empty(*k.shape[:-1], CHUNK)
        ctx.save_for_backward(q, k, v, sums, beta, system)
        ctx.decay_dtype = g.dtype
        output = torch.empty_like(v)
        _compute_states(k, v)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        q, k, v, sums, beta, _ = ctx.saved_tensors
        states = _compute_states(k, v)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        state_grads = _compute_states(k, v)
        del states, state_grads
        return *grads, torch.empty_like(sums, dtype=ctx.decay_dtype), torch.empty_like(beta)


def _compute_states(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Allocate what a pass over chunks needs: two tensors like keys and values, new values, a state for each chunk.

    Chunks of the last tokens of sequences are not filled, and there is one more of these for each sequence at most.
    """
    batch, tokens, heads, size = k.shape
    states = k.new_empty(batch, -(-tokens // CHUNK), heads, size, v.shape[-1])
    return torch.empty_like(k), torch.empty_like(v), torch.empty_like(v), states


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    output: torch.Tensor = _NormFunction.apply(x)
    return output


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """x: [1, T, channels]. weight: [channels, width]."""
    return _ConvolutionFunction.apply(x, weight, bias), None


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """q, k: [1, T, heads, key size]. v: [1, T, heads, value size]. g, beta: [1, T, heads]."""
    return _DeltaRuleFunction.apply(q, k, v, g, beta), None


# --- sparse attention ------------------------------------------------------------------------------------------------


class _SparseAttentionFunction(torch.autograd.Function):
    """TileLang's SparseMLA: saves its inputs, and computes its output again in the backward pass."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor, channels: int
    ) -> torch.Tensor:
        """[s, b, heads, d], [keys, b, 1, d] and [b, s, topk] -> [s, b, heads, channels]."""
        # With one sequence for each batch row the kernel's [b, s, ..] are views of these.
        ctx.channels = channels
        ctx.save_for_backward(query, key, indices, query.new_empty(query.shape[:-1], dtype=torch.bool))
        output, _ = _attend(query, channels)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        query, key, *_ = ctx.saved_tensors
        output, statistics = _attend(query, ctx.channels)
        delta = torch.empty_like(statistics)
        del output
        grads = torch.empty_like(query), torch.empty_like(key, dtype=torch.float32).to(key.dtype)
        del delta
        return *grads, None, None


def _attend(query: torch.Tensor, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(*query.shape[:-1], channels), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _choose_keys(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, index_topk: int, block_size: int
) -> torch.Tensor:
    """Return chosen keys, [b, s, topk] int32, for queries of [s, b, heads, d] and keys of [keys, b, d]."""
    rows, batch = q.shape[:2]
    scores = q.new_empty(min(block_size, rows), len(k), dtype=torch.float32)  # of a block of queries at a time
    del scores
    return q.new_empty(batch, rows, min(index_topk, len(k)), dtype=torch.int32)


def run_fused_qk_topk(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, index_topk: int, block_size: int, **_: Any
) -> tuple[torch.Tensor, None]:
    return _choose_keys(q, k, weights, index_topk, block_size), None


def run_fused_absorbed_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    topk_indices: torch.Tensor,
    softmax_scale: float,
    v_channels: int,
    topk_length: torch.Tensor | None = None,
) -> torch.Tensor:
    output: torch.Tensor = _SparseAttentionFunction.apply(query, key, topk_indices, v_channels)
    return output


# --- optimizer states on the host -------------------------------------------------------------------------------------


class HostAdamWStandIn(torch.optim.AdamW):
    """AdamW that updates nothing, so that the pages of its states stay untouched; hooks of a step run."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def install() -> None:
    """Let Megatron use these functions. Once per process, after `te_modules.install`."""
    from megatron.core import optimizer
    from megatron.core.ssm.gated_delta_net import common, gdn
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.experimental_attention_variant import dsa_kernels

    optimizer.CPUAdam = HostAdamWStandIn
    common.HAVE_FLA = True
    for module in (common, gdn):
        vars(module).update(causal_conv1d=causal_conv1d, chunk_gated_delta_rule=chunk_gated_delta_rule)
    common.l2norm = l2norm
    transformer_config._validate_dsa_kernel_backend_dependencies = lambda backend: None
    hooks = SimpleNamespace(
        run_fused_qk_topk=run_fused_qk_topk, run_fused_absorbed_sparse_attention=run_fused_absorbed_sparse_attention
    )
    dsa_kernels._load_backend = lambda config: None if config.dsa_kernel_backend == "none" else hooks
