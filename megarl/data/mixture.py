"""Several data sets as one: one after the other, or dealt out in shares.

In shares, which set the prompt at each place of the endless stream is from is a pattern that repeats itself. After any
number of prompts each set has given its share of them rounded down or up, so that a step has of it what its weight
says, to within two prompts, and exactly that where the share of a step is whole. Each set has epochs of its own.
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
"""Places of the longest pattern. Weights that need a longer one are rounded to one of that length."""


@dataclass(frozen=True)
class ConcatDataset(Sequence[Item], Generic[Item]):
    """The items of several data sets, one set after the other."""

    parts: tuple[Sequence[Item], ...]
    names: tuple[str, ...]
    """Of the sets, each once; empty for the only one."""
    keys: np.ndarray | None = None
    """[items] float64, what their order is by in a curriculum, NaN where unknown; None without one."""

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
        """Those of these numbers, in this order: read when asked for, unless all are in memory anyway."""
        if all(isinstance(part, list) for part in self.parts):
            return [self[index] for index in indices]
        return Subset(self, tuple(indices))


@dataclass(frozen=True)
class Subset(Sequence[Item], Generic[Item]):
    """Items by their numbers, read when they are asked for."""

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
    """What each of several files is called: the end of its path, as short as sets it apart from the others, without
    the suffix. Empty for a single one. Raises ConfigError for one that is named twice."""
    if len(paths) < 2:
        return ("",) * len(paths)
    whole = [Path(path).with_suffix("").parts for path in paths]
    full = [Path(path) for path in paths]
    if twice := [path for number, path in enumerate(full) if path in full[:number]]:
        raise ConfigError(f"data: {twice[0]} is named twice; what it should weigh more is said by data.weights")
    for length in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-length:]).lstrip("/") for parts in whole]
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(path.lstrip("/") for path in paths)  # they differ in the suffix


def check_files(data: DataConfig) -> None:
    """Raise ConfigError for weights that are not those of the files, and for a file that is named twice."""
    if data.weights and len(data.weights) != len(data.train):
        raise ConfigError(
            f"data.weights has {len(data.weights)} numbers, but data.train names {len(data.train)} files; give one for "
            "each"
        )
    round_weights(data.weights)
    for paths in (data.train, data.eval):
        name_datasets(paths)


def build_pattern(weights: Sequence[float]) -> np.ndarray:
    """[length] int64: the set that each place of the stream is of, over and over; all sets one as 0 without weights.

    Of any first n places, and so of a repeated pattern, each set has `n * share` rounded down or up: it may have its
    next place as soon as `n * share` exceeds what it had, and of those that may the one has it that must first (the
    earliest deadline, which keeps all of them if anything does, and shares of a fluid would).
    """
    counts = round_weights(weights)
    total = sum(counts)
    had, places = [0] * len(counts), np.zeros(total, dtype=np.int64)
    for place in range(total):
        # Set k: its next place, number had + 1, may be from floor(had / share) on and must be before ceil((had + 1) /
        # share), where share = count / total.
        may = [k for k, count in enumerate(counts) if had[k] * total < count * (place + 1)]
        chosen = min(may, key=lambda k: (-(-(had[k] + 1) * total // counts[k]), k))
        places[place] = chosen
        had[chosen] += 1
    return places


def round_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The weights as the smallest whole numbers of the same ratios, or where their sum would exceed `MAX_PATTERN_LENGTH` that many
    places shared out by largest remainder. Raises ConfigError for one that would then have none."""
    if not weights:
        return (1,)
    exact = [Fraction(str(weight)) for weight in weights]
    scale = np.lcm.reduce([one.denominator for one in exact], dtype=object)
    counts = [int(one * scale) for one in exact]
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
            f"data.weights={list(weights)}: {weights[counts.index(0)]:g} is less than one prompt in {MAX_PATTERN_LENGTH}; raise "
            "it, or take that data set out"
        )
    return tuple(counts)


class Stream:
    """Which item of which set is at a place, as a function of the place alone: a run goes on anywhere."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] = ()) -> None:
        """sizes: items of each set; without weights all of them are one."""
        self.sizes = tuple(sizes) if weights else (sum(sizes),)
        self.offsets = np.cumsum([0, *self.sizes]).tolist()
        self._pattern = build_pattern(weights)
        marks = self._pattern[:, None] == np.arange(len(self.sizes))
        self._cumulative_counts = np.concatenate(
            [np.zeros((1, len(self.sizes)), np.int64), marks.cumsum(0)]
        )  # [length + 1, sets]

    def count_before(self, place: int) -> list[int]:
        """How many of each set there are before a place."""
        rounds, rest = divmod(place, len(self._pattern))
        found: list[int] = (rounds * self._cumulative_counts[-1] + self._cumulative_counts[rest]).tolist()
        return found

    def locate(self, place: int) -> tuple[int, int, int]:
        """(set, its epoch, number within the epoch) of a place."""
        chosen = int(self._pattern[place % len(self._pattern)])
        return chosen, *divmod(self.count_before(place)[chosen], self.sizes[chosen])

    def describe(self) -> dict[str, Any]:
        """What a checkpoint must agree with."""
        return {"sizes": list(self.sizes), "shares": self._cumulative_counts[-1].tolist()}
