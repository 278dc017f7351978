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
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch.utils.checkpoint import checkpoint

from megarl.data.shared_prefixes import LENGTH_MULTIPLE, SharedAttention
from megarl.parallel.context_parallel import gather_context, zigzag

QUERIES_AT_ONCE = 512
"""Probabilities of only so many queries exist at a time where attention has a window, a sink or a cap."""


class PackedAttention(MegatronModule):
    """Causal core attention for GQA and MLA, sequence by sequence, with windows, sinks and a soft cap.

    This costs the sum of the squared lengths; one call with a block-diagonal mask would cost the square of the sum.
    Sequences of about the same length share a call, as one for each would cost more than its computation. With context
    parallelism every rank gathers all keys and values, and computes the two parts of each sequence that it has.

    Plain attention is torch's `scaled_dot_product_attention`. All else is computed in chunks of queries, which the
    backward pass recomputes.

    cap: if above 0, logits x become cap * tanh(x / cap). Transformer Engine's attention has none as of Megatron 0.19.2,
    so models with a cap use this class on GPUs, too.
    """

    softmax_offset: torch.nn.Parameter | None
    """The sink, [heads]: for each head the logit of a further key whose value is 0. Megatron's name for it."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        cap: float = 0.0,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self" or attn_mask_type != AttnMaskType.causal:
            raise ValueError(f"only causal self attention is supported, not {attn_mask_type} {attention_type}")
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.dropout = config.attention_dropout
        self.cap = cap
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] if has_window else None  # keys that a query sees before its own position
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))

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
        if (shared := getattr(packed_seq_params, "shared_prefixes", None)) is not None:
            return self._attend_shared(query, key, value, packed_seq_params.cu_seqlens_q, shared)
        if parallel_state.get_context_parallel_group().size() > 1:
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

    def _attend_shared(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        shared: SharedAttention,
    ) -> torch.Tensor:
        """Attend where sequences have keys in common."""
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            indices = zigzag(cu_seqlens, group.size())
            key, value = (gather_context(x, indices, group, same_gradient=False) for x in (key, value))
        outputs = []
        for call in shared.calls:
            q, k, v = (
                x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(0, 1)
                for x, rows in ((query, call.queries), (key, call.keys), (value, call.keys))
            )
            outputs.append(self._attend(q, k, v).transpose(0, 1).flatten(0, 1).index_select(0, call.outputs))
        return torch.cat(outputs).index_select(0, shared.order)

    def _attend_context_parallel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        cp = group.size()
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
        """Return attention outputs [s, b, heads * d_v].

        query: [s, b, heads, d], at the positions of the last s keys. key, value: [t, b, groups, d] and [.., d_v].
        """
        if self.cap or self.window is not None or self.softmax_offset is not None:
            return self._attend_in_chunks(query, key, value)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, d]
        before = len(key) - len(query)
        mask = torch.ones(len(query), len(key), dtype=torch.bool).tril(before) if before else None
        dropout = self.dropout if self.training else 0.0
        output = F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return output.permute(2, 0, 1, 3).flatten(2)

    def _attend_in_chunks(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        s, b, heads, d = query.shape
        t, _, groups, _ = key.shape
        q = query.reshape(s, b, groups, heads // groups, d).permute(1, 2, 3, 0, 4)  # [b, groups, heads per group, s, d]
        k, v = (x.permute(1, 2, 0, 3)[:, :, None] for x in (key, value))  # [b, groups, 1, t, d]
        sink = None if self.softmax_offset is None else self.softmax_offset.view(groups, -1, 1, 1)
        outputs = []
        for start in range(0, s, QUERIES_AT_ONCE):
            stop = min(s, start + QUERIES_AT_ONCE)
            key_stop = t - s + stop
            key_start = 0 if self.window is None else max(0, t - s + start - self.window)
            chunk = q[..., start:stop, :], k[..., key_start:key_stop, :], v[..., key_start:key_stop, :], sink
            options = {"use_reentrant": False, "preserve_rng_state": self.dropout > 0}
            outputs.append(checkpoint(self._attend_chunk, *chunk, **options))
        return torch.cat(outputs, dim=-2).permute(3, 0, 1, 2, 4).reshape(s, b, -1)

    def _attend_chunk(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sink: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend with queries [.., s, d] at the last positions of keys and values [.., t, d]. Logits are fp32."""
        logits = (query @ key.transpose(-1, -2)).float() * self.scale
        if self.cap:
            logits = self.cap * (logits / self.cap).tanh()
        s, t = logits.shape[-2:]
        distance = torch.arange(t - s, t, device=query.device)[:, None] - torch.arange(t, device=query.device)
        is_visible = distance >= 0
        if self.window is not None:
            is_visible &= distance <= self.window
        logits = logits.masked_fill(~is_visible, -torch.inf)
        if sink is not None:
            logits = torch.cat([logits, sink.float().expand(*logits.shape[:-1], 1)], dim=-1)
        weights = F.dropout(logits.softmax(-1)[..., :t], self.dropout, self.training)
        return weights.to(value.dtype) @ value

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sink for Megatron's distributed checkpoint, sharded by heads. Nothing else here has a state."""
        assert metadata is not None
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
        return sharded


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


def complete_sequential_experts(model: torch.nn.Module) -> None:
    """Give experts in sequence two properties that of Megatron's layers only the grouped experts have.

    They support `moe_mlp_glu_interleave_size`, and biases: Megatron adds that of the down projection in place to a
    view, which autograd rejects. Call this after adding adapters, whose outputs have the order of the weight's rows.
    """
    for experts in model.modules():
        if not isinstance(experts, SequentialMLP):
            continue
        size = experts.config.moe_mlp_glu_interleave_size
        for expert in experts.local_experts:
            if size:
                expert.linear_fc1.register_forward_hook(functools.partial(_separate_gate_and_up, size))
            if expert.linear_fc2.bias is not None:
                expert.linear_fc2.register_forward_hook(lambda _, __, output: (output[0].clone(), output[1]))


def _separate_gate_and_up(size: int, _: Any, __: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Forward hook of a linear layer: order output and bias as gate, then up. size: of the alternating runs."""
    return tuple(x.unflatten(-1, (-1, 2, size)).transpose(-3, -2).flatten(-3) for x in output)


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
