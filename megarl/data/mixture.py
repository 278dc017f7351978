"""Combine several data sets: concatenated, or interleaved by weights.

With weights, a repeating pattern assigns each position of the endless stream to a data set. Among the first n positions
each set has its share of n rounded down or up. A step therefore has each set's share to within two prompts, and exactly
if the share is a whole number. Each set has its own epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np

from megarl.config import ConfigError, DataConfig

Item = TypeVar("Item")

MAX_PATTERN_LENGTH = 10_000
"""Maximum length of the pattern. Weights that need a longer one are rounded to this length."""


@dataclass(frozen=True)
class ConcatDataset(Sequence[Item], Generic[Item]):
    """Concatenation of several data sets."""

    parts: tuple[Sequence[Item], ...]
    names: tuple[str, ...]
    """Unique names of the data sets; empty for a single one."""
    keys: np.ndarray | None = None
    """[items] float64: sort keys of a curriculum, NaN if unknown; None without one."""

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(part) for part in self.parts)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        for part in self.parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise AssertionError("sizes changed")

    def select(self, indices: Sequence[int]) -> Sequence[Item]:
        """Return the items at these indices, in this order; lazily, unless all are in memory anyway."""
        if all(isinstance(part, list) for part in self.parts):
            return [self[index] for index in indices]
        return Subset(self, tuple(indices))


@dataclass(frozen=True)
class Subset(Sequence[Item], Generic[Item]):
    """Items selected by index, read on access."""

    items: Sequence[Item]
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Subset[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Subset[Item]:
        if isinstance(index, slice):
            return Subset(self.items, self.indices[index])
        return self.items[self.indices[index]]


def name_datasets(paths: Sequence[str]) -> tuple[str, ...]:
    """Name each file by the shortest unique end of its path, without suffix; empty for a single file.

    Raises ConfigError for a file that is named twice.
    """
    if len(paths) < 2:
        return ("",) * len(paths)
    stems = [Path(path).with_suffix("").parts for path in paths]
    file_paths = [Path(path) for path in paths]
    if duplicates := [path for number, path in enumerate(file_paths) if path in file_paths[:number]]:
        raise ConfigError(f"data: {duplicates[0]} is named twice; what it should weigh more is said by data.weights")
    for length in range(1, max(map(len, stems)) + 1):
        names = ["/".join(parts[-length:]).lstrip("/") for parts in stems]
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(path.lstrip("/") for path in paths)  # they differ in the suffix only


def check_files(data: DataConfig) -> None:
    """Raise ConfigError if weights do not match the files, or a file is named twice."""
    if data.weights and len(data.weights) != len(data.train):
        raise ConfigError(
            f"data.weights has {len(data.weights)} numbers, but data.train names {len(data.train)} files; give one for "
            "each"
        )
    round_weights(data.weights)
    for paths in (data.train, data.eval):
        name_datasets(paths)


def build_pattern(weights: Sequence[float]) -> np.ndarray:
    """Return [length] int64: the data set of each position of the repeating pattern; [0] without weights.

    Among the first n positions, also of the repeated pattern, each set has `n * share` rounded down or up: a set may
    take its next position once `n * share` exceeds its count, and of the sets that may, the one with the earliest
    deadline does. Earliest-deadline-first meets all deadlines whenever a schedule exists, and fluid shares would meet
    them.
    """
    counts = round_weights(weights)
    total = sum(counts)
    num_taken, pattern = [0] * len(counts), np.zeros(total, dtype=np.int64)
    for position in range(total):
        # Set k: its next position, number num_taken[k] + 1, must be at least floor(num_taken[k] / share) and below
        # ceil((num_taken[k] + 1) / share), where share = counts[k] / total.
        eligible = [k for k, count in enumerate(counts) if num_taken[k] * total < count * (position + 1)]
        chosen = min(eligible, key=lambda k: (-(-(num_taken[k] + 1) * total // counts[k]), k))
        pattern[position] = chosen
        num_taken[chosen] += 1
    return pattern


def round_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the weights as the smallest integers of the same ratios.

    If their sum would exceed `MAX_PATTERN_LENGTH`, that many positions are distributed by largest remainder. Raises
    ConfigError for a weight that would then get none.
    """
    if not weights:
        return (1,)
    exact = [Fraction(str(weight)) for weight in weights]
    scale = np.lcm.reduce([fraction.denominator for fraction in exact], dtype=object)
    counts = [int(fraction * scale) for fraction in exact]
    divisor = int(np.gcd.reduce(counts, dtype=object))
    counts = [count // divisor for count in counts]
    if sum(counts) > MAX_PATTERN_LENGTH:
        quotas = [Fraction(count * MAX_PATTERN_LENGTH, sum(counts)) for count in counts]
        floors = [quota.numerator // quota.denominator for quota in quotas]
        by_remainder = sorted(range(len(quotas)), key=lambda k: (floors[k] - quotas[k], k))
        for k in by_remainder[: MAX_PATTERN_LENGTH - sum(floors)]:
            floors[k] += 1
        counts = floors
    if 0 in counts:
        raise ConfigError(
            f"data.weights={list(weights)}: {weights[counts.index(0)]:g} is less than one prompt in "
            f"{MAX_PATTERN_LENGTH}; raise "
            "it, or take that data set out"
        )
    return tuple(counts)


class Stream:
    """Maps a position to a data set and an item, as a pure function of the position, so a run can resume anywhere."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] = ()) -> None:
        """sizes: items of each set. Without weights all sets count as one."""
        self.sizes = tuple(sizes) if weights else (sum(sizes),)
        self.offsets = np.cumsum([0, *self.sizes]).tolist()
        self._pattern = build_pattern(weights)
        marks = self._pattern[:, None] == np.arange(len(self.sizes))
        self._cumulative_counts = np.concatenate(
            [np.zeros((1, len(self.sizes)), np.int64), marks.cumsum(0)]
        )  # [length + 1, sets]

    def count_before(self, position: int) -> list[int]:
        """Return the number of items of each set before a position."""
        rounds, offset = divmod(position, len(self._pattern))
        counts: list[int] = (rounds * self._cumulative_counts[-1] + self._cumulative_counts[offset]).tolist()
        return counts

    def locate(self, position: int) -> tuple[int, int, int]:
        """Return (set, its epoch, index within the epoch) of a position."""
        chosen = int(self._pattern[position % len(self._pattern)])
        return chosen, *divmod(self.count_before(position)[chosen], self.sizes[chosen])

    def describe(self) -> dict[str, Any]:
        """Return the values that a checkpoint must agree with."""
        return {"sizes": list(self.sizes), "shares": self._cumulative_counts[-1].tolist()}
