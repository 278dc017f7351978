"""Figures of all tokens of a batch, of which each rank has a part; `total` adds up the parts, see `types.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Total = Callable[[torch.Tensor], torch.Tensor]


def mean(values: torch.Tensor, mask: torch.Tensor, total: Total) -> float:
    """Of `values`, [T] and 0 outside of `mask`, over the tokens of the mask; 0 where there are none."""
    return float(total(values.sum()) / total(mask.sum()).clamp(min=1))


@dataclass(frozen=True)
class Spread:
    largest: float
    percentile: float
    mean: float


def spread(values: torch.Tensor, percent: int, total: Total) -> Spread | None:
    """Stand-in."""
    if not len(values):
        return None
    return Spread(
        float(values.max()), float(values.kthvalue(-(-len(values) * percent // 100)).values), float(values.mean())
    )
