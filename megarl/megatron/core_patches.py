"""Patches of Megatron-Core 0.19.2 on every device; those for machines without a GPU are in `cpu/megatron_platform.py`.

`install()` runs once per process, on the import of `megarl.megatron`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


def install() -> None:
    _restore_pickled_name()
    rope_utils._apply_rotary_pos_emb_thd = apply_packed_rope
    random._get_share_storage = lambda: restore_storage
    MoEAlltoAllTokenDispatcher.combine_postprocess = _drop_probs(MoEAlltoAllTokenDispatcher.combine_postprocess)


def _drop_probs(combine_postprocess: Any) -> Any:
    """Return the last step of a dispatcher, which then forgets the router's probabilities.

    Their autograd graph leads to the input of a recomputed layer, and to its gradient. Megatron's dispatcher would keep
    both until the layer's next forward pass: 1.6 GB on Qwen3-30B with 48 layers and 4,096 tokens on each rank.
    """

    @functools.wraps(combine_postprocess)
    def combine_and_forget(dispatcher: MoEAlltoAllTokenDispatcher, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = combine_postprocess(dispatcher, tokens)
        dispatcher.probs = dispatcher.probs.new_empty(0)  # whose dtype is read
        return result

    return combine_and_forget


def _restore_pickled_name() -> None:
    """Give `torch.storage._load_from_bytes` its own name back.

    Megatron replaces it by a function that loads no classes. Engines refuse to unpickle it under Megatron's name.
    """
    load = torch.storage._load_from_bytes
    load.__module__, load.__name__, load.__qualname__ = "torch.storage", "_load_from_bytes", "_load_from_bytes"


def apply_packed_rope(
    t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *, cp_group: Any, **options: Any
) -> torch.Tensor:
    """Rotate packed sequences [T, heads, d] by their positions, like `rope_utils._apply_rotary_pos_emb_thd`.

    Megatron rotates sequence by sequence, with a dozen kernels for each in every layer, and waits for the device to
    read their lengths. This is one rotation of all tokens, without a wait.

    cu_seqlens: [sequences + 1], of the whole sequences over all context parallel ranks; its attribute
    `token_positions`, if any, has the positions of the rank's tokens, [T]. freqs: [longest, 1, 1, d'], or
    [cu_seqlens[-1], 1, 1, d'] for angles of each token of the pack. options: those of `_apply_rotary_pos_emb_bshd`.
    """
    known: torch.Tensor | None = getattr(cu_seqlens, "token_positions", None)
    if known is not None:
        positions = known
    else:
        positions = local_positions(cu_seqlens, cp_group.size(), cp_group.rank(), len(t))
    if known is None and len(freqs) == len(t) * cp_group.size():
        lengths = cu_seqlens.diff().long() // cp_group.size()
        positions = positions + torch.repeat_interleave(cu_seqlens[:-1], lengths, output_size=len(t))
    angles = freqs.index_select(0, positions)
    rotated: torch.Tensor = rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), angles, **options)
    return rotated.squeeze(1)


def local_positions(cu_seqlens: torch.Tensor, cp: int, rank: int, total: int) -> torch.Tensor:
    """Return the position in its sequence of each of a context parallel rank's tokens, [total] int64.

    A rank has parts `rank` and `2 cp - 1 - rank` of the 2 cp equal parts of each sequence.
    """
    lengths = cu_seqlens.diff().long() // cp
    starts = lengths.cumsum(0) - lengths
    row = torch.arange(total, device=cu_seqlens.device)
    offset = row - torch.repeat_interleave(starts, lengths, output_size=total)
    if cp == 1:
        return offset
    part = torch.repeat_interleave(lengths // 2, lengths, output_size=total)
    return torch.where(offset < part, rank * part + offset, (2 * cp - 2 - rank) * part + offset)


def restore_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Give `output` and all its views, whose storage the forward pass freed, the values of `recomputed`.

    Megatron compiles a C++ extension when a step first recomputes an output, by which both tensors share a storage.
    That needs a compiler on every node, and a lock that a killed rank leaves in the extensions' cache stops all later
    runs. Python can only copy, as Megatron-Core 0.16 did. It does not count as a change in place of the output.
    """
    target, source = output.untyped_storage(), recomputed.untyped_storage()
    target.resize_(source.size())
    target.copy_(source)
