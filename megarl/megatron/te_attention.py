"""Transformer Engine's attention where sequences of a micro-batch have keys in common (`data/shared_prefixes.py`), or
where micro-batches have different context parallel sizes (`parallel.dynamic_cp`)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.parallel.context_parallel import gather_context, zigzag

_LAST_QUERIES_CAUSAL = SimpleNamespace(name="padding_causal_bottom_right")
"""Transformer Engine's mask for queries at the positions of the last keys, which Megatron's AttnMaskType lacks."""


class SharedPrefixAttention(TEDotProductAttention):  # type: ignore[misc]
    """Gathers the keys and values that each sequence sees, and attends with fewer queries than keys.

    With context parallelism every rank then gathers all keys and values, and Transformer Engine's own is off. Where
    nothing is in common, Transformer Engine's has the group of the micro-batch.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        shared = getattr(packed_seq_params, "shared_prefixes", None)
        group = parallel_state.get_context_parallel_group()
        cp, is_context_parallel = group.size(), self.config.context_parallel_size > 1
        if shared is None:
            if is_context_parallel and packed_seq_params is not None:  # the last micro-batch may have had another group
                groups = {"cp_group": group} if cp > 1 else {"local_cp_size": 1}
                packed_seq_params = replace(packed_seq_params, **groups)
        else:
            if cp > 1:
                places = zigzag(packed_seq_params.cu_seqlens_q, cp)
                key, value = (gather_context(x, places, group, same_gradient=False) for x in (key, value))
            key, value = (x.index_select(0, shared.key_rows) for x in (key, value))
            attn_mask_type, packed_seq_params = (
                _LAST_QUERIES_CAUSAL,
                PackedSeqParams(
                    qkv_format="thd",
                    cu_seqlens_q=shared.cu_queries,
                    cu_seqlens_kv=shared.cu_keys,
                    max_seqlen_q=shared.max_queries,
                    max_seqlen_kv=shared.max_keys,
                    local_cp_size=1 if is_context_parallel else None,
                ),
            )
        output: torch.Tensor = super().forward(
            query, key, value, attention_mask, attn_mask_type, packed_seq_params=packed_seq_params, **options
        )
        return output
