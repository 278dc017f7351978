"""Modules for Megatron's local layer spec on a machine without Transformer Engine: attention, norm, replicated linear.

They replace Transformer Engine's TEDotProductAttention, TENorm and TELinear(parallel_mode="duplicated"). The local
spec's own modules do not support packed sequences or sequence parallelism, and do not sum the k_pos_emb gradient over
tensor parallel ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_latent_attention as mla
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.parallel.context_parallel import gather_context, zigzag

LENGTH_MULTIPLE = 32
"""Sequences whose lengths are equal after rounding up to a multiple of this share one attention call."""


class PackedAttention(MegatronModule):
    """Causal core attention on `scaled_dot_product_attention`, for GQA and MLA, sequence by sequence.

    This costs the sum of the squared lengths; one call with a block-diagonal mask would cost the square of the sum.
    Sequences of about the same length share a call, as one for each would cost more than its computation. With context
    parallelism every rank gathers all keys and values, and computes the two parts of each sequence that it has.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self" or attn_mask_type != AttnMaskType.causal:
            raise ValueError(f"only causal self attention is supported, not {attn_mask_type} {attention_type}")
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.dropout = config.attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return attention outputs, [T, heads * d_v].

        query: [T, heads, d]. key: [T, groups, d]. value: [T, groups, d_v]. Without `packed_seq_params` they are
        [s, b, heads, d] and so on, and the output is [s, b, heads * d_v].
        """
        if packed_seq_params is None:
            return self._attend(query, key, value)
        if self.config.context_parallel_size > 1:
            return self._attend_context_parallel(query, key, value, packed_seq_params.cu_seqlens_q)
        return self._attend_by_length(query, key, value, packed_seq_params.cu_seqlens_q.diff().long())

    def _attend_by_length(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Attend over stacks of sequences of equal rounded length. Causality hides their padding at the end."""
        rounded = (lengths + LENGTH_MULTIPLE - 1) // LENGTH_MULTIPLE * LENGTH_MULTIPLE
        order = rounded.argsort(stable=True)
        padded_starts = torch.empty_like(rounded)
        padded_starts[order] = rounded[order].cumsum(0) - rounded[order]
        starts = lengths.cumsum(0) - lengths
        shifts = torch.repeat_interleave(padded_starts - starts, lengths)
        positions = torch.arange(len(query), device=query.device) + shifts
        sizes, counts = rounded.unique(return_counts=True)
        stacks = list(zip(sizes.tolist(), counts.tolist(), strict=True))
        total = int(rounded.sum())

        def stacked(x: torch.Tensor) -> list[torch.Tensor]:  # each [size, sequences, heads, d]
            padded = x.new_zeros(total, *x.shape[1:]).index_copy(0, positions, x)
            parts = zip(padded.split([size * count for size, count in stacks]), stacks, strict=True)
            return [part.unflatten(0, (-1, size)).transpose(0, 1) for part, (size, _) in parts]

        outputs = [self._attend(*stack) for stack in zip(*map(stacked, (query, key, value)), strict=True)]
        return torch.cat([output.transpose(0, 1).flatten(0, 1) for output in outputs]).index_select(0, positions)

    def _attend_context_parallel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> torch.Tensor:
        cp, group = self.config.context_parallel_size, parallel_state.get_context_parallel_group()
        indices = zigzag(cu_seqlens, cp)
        key, value = (gather_context(x, indices, group, same_gradient=False) for x in (key, value))
        outputs, offset = [], 0
        for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            size = (stop - start) // (2 * cp)
            for part in (group.rank(), 2 * cp - 1 - group.rank()):
                end = start + (part + 1) * size
                q, k, v = query[offset : offset + size], key[start:end], value[start:end]
                outputs.append(self._attend(q[:, None], k[:, None], v[:, None])[:, 0])
                offset += size
        return torch.cat(outputs)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend with queries at the positions of the last keys."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, d]
        before = len(key) - len(query)
        mask = torch.ones(len(query), len(key), dtype=torch.bool).tril(before) if before else None
        dropout = self.dropout if self.training else 0.0
        output = F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return output.permute(2, 0, 1, 3).flatten(2)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight is marked so that its gradient is summed over sequence parallel ranks.

    With Megatron's `layernorm_zero_centered_gamma` it multiplies by 1 + weight, in fp32.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.zero_centered:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class DuplicatedLinear(torch.nn.Module):
    """A linear layer with a replicated weight, applied to the rank's part of the sequence."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, init_method: Any, bias: bool, **_: Any
    ) -> None:
        super().__init__()
        if bias:
            raise ValueError("DuplicatedLinear has no bias")
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map [..., input_size] to [..., output_size]. The second result, the bias, is None."""
        return F.linear(x, self.weight), None


def adapt_local_spec(spec: Any) -> Any:
    """Replace modules in a tree of Megatron's local layer specs by those above, in place, and return the tree."""
    # MLA recognises a replicated down projection only by this class.
    mla.TELinear = DuplicatedLinear
    _walk(spec, set())
    return spec


def _walk(node: Any, seen: set[int]) -> None:
    if id(node) in seen or isinstance(node, type):
        return
    seen.add(id(node))
    if isinstance(node, mla.MLASelfAttentionSubmodules):
        node.linear_q_down_proj = node.linear_kv_down_proj = DuplicatedLinear
    replacements = {DotProductAttention: PackedAttention, WrappedTorchNorm: RMSNorm}
    if isinstance(node, functools.partial):
        _walk(list(node.keywords.values()), seen)
    elif isinstance(node, list):
        for item in node:
            _walk(item, seen)
    elif dataclasses.is_dataclass(node):
        for name, value in vars(node).items():
            if isinstance(value, type) and value in replacements:
                setattr(node, name, replacements[value])
            else:
                _walk(value, seen)
