"""Sums over sequences, and statistics over the tokens of all ranks, bitwise equal everywhere, in little memory.

Each rank passes its own tokens. Only a few numbers or a histogram go through `all_reduce`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megarl.types import AllReduce, local_all_reduce

BLOCK = 1 << 16  # tokens processed at a time, to avoid [T] intermediates
DIGITS = ((20, 11), (10, 10), (0, 10))
"""Radix digits of the 31 bits below the sign in `kth_values`: (lowest bit, number of bits), most significant first."""


@dataclass(frozen=True)
class DiffStats:
    """Absolute difference of two columns over all action tokens."""

    largest: float
    p95: float  # smallest observed value that 95 % of the tokens (rounded up) do not exceed
    mean: float


def count_action_tokens(mask: torch.Tensor, all_reduce: AllReduce = local_all_reduce) -> int:
    """Count the action tokens of all ranks; `mask` [T] bool is this rank's share."""
    return int(all_reduce(torch.count_nonzero(mask)))


def token_mean(x: torch.Tensor, mask: torch.Tensor, all_reduce: AllReduce = local_all_reduce) -> float:
    """Return the mean of `x` [T] over all ranks' action tokens; 0 without any.

    `x` must be 0 where `mask` [T] is False. Computed in the dtype of `x`, with one rounding per rank.
    """
    x_sum, count = _reduce_sum_and_count(x.sum(), int(torch.count_nonzero(mask)), all_reduce)
    return float(x_sum / max(1, count))


def diff_stats(
    a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor, all_reduce: AllReduce = local_all_reduce
) -> DiffStats | None:
    """Return statistics of |a - b| over all ranks' action tokens; None without any. All [T]; values fp32."""
    difference = masked_select(a, mask).sub_(masked_select(b, mask)).abs_()
    difference_sum, count = _reduce_sum_and_count(difference.sum(), len(difference), all_reduce)
    if not count:
        return None
    p95, largest = kth_values(difference, (-(-count * 95 // 100), count), all_reduce)
    return DiffStats(largest, p95, float(difference_sum / count))


def kth_values(x: torch.Tensor, ks: tuple[int, ...], all_reduce: AllReduce = local_all_reduce) -> list[float]:
    """Return the exact k-th smallest value over all ranks for each of `ks`, counted from 1 as in `torch.kthvalue`.

    `x` [n] is this rank's share, fp32 and non-negative. The bit patterns of such numbers sort like the numbers: one
    histogram per digit locates the digit of the k-th value, and the next digit considers only values that share it.
    Three histograms of at most 2,048 entries per k go through `all_reduce`, but no values.
    """
    return batched_kth_values([x], [ks], all_reduce)[0]


def batched_kth_values(
    tensors: Sequence[torch.Tensor], ks: Sequence[tuple[int, ...]], all_reduce: AllReduce = local_all_reduce
) -> list[list[float]]:
    """`kth_values` of several tensors, each with its own `ks` (at least one in all), in the same collectives."""
    for x in tensors:
        if x.dtype != torch.float32:
            raise TypeError(f"kth_values reads the bits of fp32, not of {x.dtype}")
    queries = [(index, k) for index, tensor_ks in enumerate(ks) for k in tensor_ks]
    result_bits = [0] * len(queries)  # known high bits of each result, the others 0
    remaining_ks = [k for _, k in queries]  # rank of the result among the values that share its known bits
    # (tensor index, known bits) -> local values that share these bits
    shares = {(index, 0): x.view(torch.int32) for index, x in enumerate(tensors) if ks[index]}
    for shift, width in DIGITS:
        local_counts = torch.zeros(len(shares), 1 << width, dtype=torch.int64, device=tensors[0].device)
        for row, share in zip(local_counts, shares.values(), strict=True):
            for part in share.split(BLOCK):
                row += torch.bincount((part >> shift) & ((1 << width) - 1), minlength=1 << width)
        histograms = dict(zip(shares, all_reduce(local_counts), strict=True))
        next_shares: dict[tuple[int, int], torch.Tensor] = {}
        for i, (index, _) in enumerate(queries):
            prefix = (index, result_bits[i])
            cumulative = histograms[prefix].cumsum(0)
            digit = int(torch.searchsorted(cumulative, remaining_ks[i]))
            remaining_ks[i] -= int(cumulative[digit] - histograms[prefix][digit])
            result_bits[i] |= digit << shift
            if (index, result_bits[i]) not in next_shares:
                parts = shares[prefix].split(BLOCK)
                next_shares[index, result_bits[i]] = torch.cat(
                    [part[part >> shift == result_bits[i] >> shift] for part in parts]
                )
        shares = next_shares
    values = iter(torch.tensor(result_bits, dtype=torch.int32).view(torch.float32).tolist())
    return [[next(values) for _ in tensor_ks] for tensor_ks in ks]


def masked_select(x: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return `x[mask]` in the given dtype without allocating [T] indices."""
    result = x.new_empty(int(torch.count_nonzero(mask)), dtype=dtype or x.dtype)
    start = 0
    for part, part_mask in iter_blocks(x, mask):
        values = part.index_select(0, part_mask.nonzero().squeeze(1))
        result[start : start + len(values)] = values
        start += len(values)
    return result


def iter_blocks(*columns: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Iterate over views of [T] columns, `BLOCK` tokens at a time."""
    return zip(*(column.split(BLOCK) for column in columns), strict=True)


def _reduce_sum_and_count(local_sum: torch.Tensor, local_count: int, all_reduce: AllReduce) -> tuple[torch.Tensor, int]:
    # in fp64 because fp32 would round the count
    both = all_reduce(torch.stack([local_sum.double(), local_sum.new_tensor(local_count, dtype=torch.float64)]))
    return both[0].to(local_sum.dtype), int(both[1])


def sequence_sums(x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[T] -> [N]: sum over each sequence's tokens, sequentially and in the dtype of `x`."""
    lengths = cu_seqlens.diff().tolist()
    sums = x.new_zeros(len(lengths))
    zero_index = torch.zeros(max(lengths, default=0), dtype=torch.int64, device=x.device)
    for total, part in zip(sums.split(1), x.split(lengths), strict=False):  # empty `sums` still split into one part
        total.index_add_(0, zero_index[: len(part)], part)
    return sums
