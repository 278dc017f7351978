"""Stands in for SGLang's compiled kernels on a CPU without AMX: the functions that SGLang calls there, in torch.

It must not define `torch.ops.sgl_kernel.convert_weight_packed`: SGLang probes for that operator to decide whether the
machine has AMX. Names of CUDA kernels must look absent, since callers guard them with `except ImportError`.
"""

from __future__ import annotations

from typing import Any

import torch

from megarl.cpu.sglang_gated_delta_net import OPERATORS
from megarl.cpu.sglang_speculative import (  # noqa: F401
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    build_tree_kernel_efficient_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

__version__ = "0.4.10"  # what SGLang 0.5.23 asks for

_MASK = 0xFFFFFFFF


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write `out_cache_loc`, laid end to end by request, into rows [start, end) of `req_to_token`. In place."""
    offset = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[offset : offset + end - start].to(req_to_token.dtype)
        offset += end - start


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = (word * 0xCC9E2D51) & _MASK
    word = ((word << 15) | (word >> 17)) & _MASK
    state = state ^ ((word * 0x1B873593) & _MASK)
    state = ((state << 13) | (state >> 19)) & _MASK
    return (state * 5 + 0xE6546B64) & _MASK


def _murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 x86_32 (Austin Appleby, public domain) of (seed, position, column): [n], [n], [m] -> [n, m]."""
    seeds = seed.to(torch.int64)[:, None]
    state = torch.zeros_like(seeds)
    for word in (seeds & _MASK, (seeds >> 32) & _MASK, positions.to(torch.int64)[:, None] & _MASK):
        state = _mix(state, word)
    state = _mix(state, col_indices.to(torch.int64)[None] & _MASK) ^ 16  # 16 bytes hashed
    state = state ^ (state >> 16)
    state = (state * 0x85EBCA6B) & _MASK
    state = state ^ (state >> 13)
    state = (state * 0xC2B2AE35) & _MASK
    return (state ^ (state >> 16)).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")
for _schema, _implementation in OPERATORS.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _implementation, "CPU")


def __getattr__(name: str) -> Any:
    if name.startswith("__") or not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in; see megarl/cpu/stubs")

    return missing
