"""What micro-batches and ranks report of a step, added up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import SupportsFloat


def summed(parts: Iterable[Mapping[str, SupportsFloat]]) -> dict[str, float]:
    """Figures by name, in the order of the parts, so that all who have the same parts have the same bits."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + float(value)
    return total
