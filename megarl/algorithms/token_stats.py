"""Figures of tokens of which each rank holds a share, and what such functions need to go through [T] in little memory.

Each rank gives the tokens that it holds and gets the figure of all ranks' tokens, the same bits everywhere: only a few
numbers or a histogram go through `total`. Where one rank holds everything, `alone` is the total.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megarl.types import AllReduce, local_all_reduce

BLOCK = 1 << 16
"""Tokens that are looked at together where a whole [T] column of intermediate results would be in the way."""

DIGITS = ((20, 11), (10, 10), (0, 10))
"""How `kth_values` reads the 31 bits below the sign: digits as (lowest bit, bits), the most significant first."""


@dataclass(frozen=True)
class DiffStats:
    """How far two numbers per token are apart, over all action tokens."""

    largest: float
    p95: float
    """The value that 95 % of the tokens (rounded up) do not exceed, one of theirs."""
    mean: float


def count_action_tokens(mask: torch.Tensor, total: AllReduce = local_all_reduce) -> int:
    """How many tokens of all are action tokens; `mask` [T] bool are those of this share."""
    return int(total(torch.count_nonzero(mask)))


def token_mean(x: torch.Tensor, mask: torch.Tensor, total: AllReduce = local_all_reduce) -> float:
    """The mean over the action tokens of all of `x` [T], which is 0 where `mask` [T] is False; 0 where there is none.

    Computed in the dtype of `x`, one rounding per share.
    """
    return _reduce_mean(x.sum(), int(torch.count_nonzero(mask)), total)


def diff_stats(
    one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor, total: AllReduce = local_all_reduce
) -> DiffStats | None:
    """|one - other| over the action tokens of all; None where there is no action token. All [T], the numbers fp32."""
    apart = masked_select(one, mask).sub_(masked_select(other, mask)).abs_()
    whole, count = _reduce_sum_and_count(apart.sum(), len(apart), total)
    if not count:
        return None
    p95, largest = kth_values(apart, (-(-count * 95 // 100), count), total)
    return DiffStats(largest, p95, float(whole / count))


def kth_values(x: torch.Tensor, ks: tuple[int, ...], total: AllReduce = local_all_reduce) -> list[float]:
    """The k-th smallest of all values for each of `ks`, counted from 1 as `torch.kthvalue` does, exactly.

    `x` [n] fp32, none of them negative, is this share of them. The bits of such numbers are ordered as the numbers are:
    one histogram per digit says where the k-th one's digit lies, and then only those that share it are looked at.
    Three histograms of at most 2,048 numbers per k go through `total`, and no value does.
    """
    return batched_kth_values([x], [ks], total)[0]


def batched_kth_values(
    several: Sequence[torch.Tensor], ks: Sequence[tuple[int, ...]], total: AllReduce = local_all_reduce
) -> list[list[float]]:
    """`kth_values` of each of several, with their own `ks`, of which there is at least one, in the same exchanges."""
    for x in several:
        if x.dtype != torch.float32:
            raise TypeError(f"kth_values reads the bits of fp32, not of {x.dtype}")
    asked = [(which, k) for which, own in enumerate(ks) for k in own]
    found = [0] * len(asked)  # the bits that are known, the others 0
    left = [k for _, k in asked]  # which one it is among those that share these bits
    # (which, known bits) -> the own ones of it that share these bits
    shares = {(which, 0): x.view(torch.int32) for which, x in enumerate(several) if ks[which]}
    for shift, width in DIGITS:
        counts = total(torch.stack([_histogram(share, shift, width) for share in shares.values()]))
        of_known = dict(zip(shares, counts, strict=True))
        sharing: dict[tuple[int, int], torch.Tensor] = {}
        for i, (which, _) in enumerate(asked):
            known = (which, found[i])
            reached = of_known[known].cumsum(0)
            digit = int(torch.searchsorted(reached, left[i]))
            left[i] -= int(reached[digit] - of_known[known][digit])
            found[i] |= digit << shift
            if (which, found[i]) not in sharing:
                parts = shares[known].split(BLOCK)
                sharing[which, found[i]] = torch.cat([part[part >> shift == found[i] >> shift] for part in parts])
        shares = sharing
    values = iter(torch.tensor(found, dtype=torch.int32).view(torch.float32).tolist())
    return [[next(values) for _ in own] for own in ks]


def masked_select(x: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`x[mask]` in a dtype, without the [T] of indices that picking all at once makes."""
    result = x.new_empty(int(torch.count_nonzero(mask)), dtype=dtype or x.dtype)
    start = 0
    for part, chosen in iter_blocks(x, mask):
        values = part.index_select(0, chosen.nonzero().squeeze(1))
        result[start : start + len(values)] = values
        start += len(values)
    return result


def iter_blocks(*columns: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of [T] columns, `BLOCK` tokens at a time."""
    return zip(*(column.split(BLOCK) for column in columns), strict=True)


def _reduce_mean(own_sum: torch.Tensor, own_count: int, total: AllReduce) -> float:
    whole, count = _reduce_sum_and_count(own_sum, own_count, total)
    return float(whole / max(1, count))


def _reduce_sum_and_count(own_sum: torch.Tensor, own_count: int, total: AllReduce) -> tuple[torch.Tensor, int]:
    """Sums in fp32 as those of one rank are, added up in fp64 with the counts, which fp32 would round."""
    both = total(torch.stack([own_sum.double(), own_sum.new_tensor(own_count, dtype=torch.float64)]))
    return both[0].to(own_sum.dtype), int(both[1])


def _histogram(bits: torch.Tensor, shift: int, width: int) -> torch.Tensor:
    counts = torch.zeros(1 << width, dtype=torch.int64, device=bits.device)
    for part in bits.split(BLOCK):
        counts += torch.bincount((part >> shift) & ((1 << width) - 1), minlength=1 << width)
    return counts
