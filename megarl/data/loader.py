"""The order of training items: curriculum keys, mixtures of data sets, and the resumable loader.

Several data sets are concatenated, or interleaved by weights: a repeating pattern assigns each position of the endless
stream to a data set, so that each has its share of every step to within two prompts. Each set then has its own epochs.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import operator
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from megarl.config import Config, ConfigError, DataConfig
from megarl.data.table import LazySequence, is_parquet, open_parquet, to_dicts

NESTED_COLUMNS = ("extra_info", "metadata", "extra")
"""Columns whose fields count as columns."""


def check_has_keys(keys: np.ndarray | None, column: str, files: Sequence[str]) -> None:
    """Raise ConfigError if no row of any file has a number in the column."""
    if keys is not None and np.isnan(keys).all():
        raise ConfigError(
            f"data.curriculum_key={column}: no row of {', '.join(files)} has a number in that column, or in a field of "
            f"that name in {', '.join(NESTED_COLUMNS)}; set it to an existing column, or leave it empty"
        )


def read_key(row: Mapping[str, Any], column: str, location: str) -> float:
    """Return the number in a column of a row, NaN if there is none. Raises ConfigError for other values."""
    value = next((value for value in _column_values(row, column) if value is not None), math.nan)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f"{location}: {column!r} is {str(value)[:80]!r}, which is not a number; data.curriculum_key={column} sorts "
            "rows by number, so write one, or null where it is unknown"
        )
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{location}: {column!r} overflows float64; write a smaller number") from None


def _column_values(row: Mapping[str, Any], column: str) -> Iterator[Any]:
    """Yield the values of a column, and of the fields of its name in `NESTED_COLUMNS`."""
    for fields in (row, *(row.get(name) for name in NESTED_COLUMNS)):
        if isinstance(fields, Mapping):
            yield fields.get(column)


def check_no_nan(file: Path, column: str) -> None:
    """Raise ConfigError, naming the row, if the column holds NaN, which `read_rows` returns as null.

    NaN may be a missing number or a failed division.
    """
    with contextlib.ExitStack() as stack:
        rows: Iterator[tuple[str, dict[str, Any]]]
        if is_parquet(file):
            table = stack.enter_context(open_parquet(file))
            names = [name for name in (column, *NESTED_COLUMNS) if name in table.schema_arrow.names]
            batches = table.iter_batches(columns=names, use_threads=False)
            rows = ((f"{file}, row {n}", row) for n, row in enumerate(chain.from_iterable(map(to_dicts, batches))))
        else:
            lines = stack.enter_context(file.open("rb"))
            rows = ((f"{file}:{n}", json.loads(line)) for n, line in enumerate(lines, 1) if b"NaN" in line)
        for location, row in rows:
            if any(isinstance(value, float) and math.isnan(value) for value in _column_values(row, column)):
                raise ConfigError(
                    f"{location}: {column!r} is NaN, by which data.curriculum_key={column} cannot sort rows; write a "
                    "number, or null where it is unknown"
                )


def sort_by_key(order: Sequence[int], keys: np.ndarray) -> list[int]:
    """Sort the items with known keys among the positions that they occupy in `order`. Stable.

    Items with unknown keys keep their positions.
    """
    result = np.asarray(order, dtype=np.int64).copy()
    positions = np.flatnonzero(~np.isnan(keys[result]))
    items = result[positions]
    result[positions] = items[np.argsort(keys[items], kind="stable")]
    return list(result.tolist())


Item = TypeVar("Item")

MAX_PATTERN_LENGTH = 10_000
"""Maximum length of the pattern. Weights that need a longer one are rounded to this length."""


@dataclass(frozen=True)
class ConcatDataset(LazySequence[Item]):
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

    def get(self, index: int) -> Item:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        starts = list(accumulate(self.sizes, initial=0))
        part = bisect_right(starts, index) - 1
        return self.parts[part][index - starts[part]]

    def select(self, indices: Sequence[int]) -> Sequence[Item]:
        """Return the items at these indices, in this order; lazily, unless all are in memory anyway."""
        if all(isinstance(part, list) for part in self.parts):
            return [self[index] for index in indices]
        return Subset(self, tuple(indices))


@dataclass(frozen=True)
class Subset(LazySequence[Item]):
    """Items selected by index, read on access."""

    items: Sequence[Item]
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    def get(self, index: int) -> Item:
        return self.items[self.indices[index]]

    def select(self, indices: Sequence[int]) -> Subset[Item]:
        return Subset(self.items, tuple(self.indices[index] for index in indices))


def name_datasets(paths: Sequence[str]) -> tuple[str, ...]:
    """Name each file by the shortest unique end of its path, without suffix; empty for a single file.

    Raises ConfigError for a file that is named twice.
    """
    if len(paths) < 2:
        return ("",) * len(paths)
    stems = [Path(path).with_suffix("").parts for path in paths]
    file_paths = [Path(path) for path in paths]
    if duplicates := [path for number, path in enumerate(file_paths) if path in file_paths[:number]]:
        raise ConfigError(f"data: {duplicates[0]} is named twice; use data.mixture_weights to sample it more often")
    for length in range(1, max(map(len, stems)) + 1):
        names = ["/".join(parts[-length:]).lstrip("/") for parts in stems]
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(path.lstrip("/") for path in paths)  # they differ in the suffix only


def check_files(data: DataConfig) -> None:
    """Raise ConfigError if weights do not match the files, or a file is named twice."""
    if data.mixture_weights and len(data.mixture_weights) != len(data.train):
        raise ConfigError(
            f"data.mixture_weights has {len(data.mixture_weights)} numbers, but data.train names {len(data.train)} "
            "files; give one for each"
        )
    round_weights(data.mixture_weights)
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
            f"data.mixture_weights={list(weights)}: {weights[counts.index(0)]:g} is less than one prompt in "
            f"{MAX_PATTERN_LENGTH}; raise it, or remove that data set"
        )
    return tuple(counts)


class Stream:
    """Maps a position to a data set and an item, as a pure function of the position, so a run can resume anywhere."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] = ()) -> None:
        """sizes: items of each set. Without weights all sets count as one."""
        self.sizes = tuple(sizes) if weights else (sum(sizes),)
        self.offsets = np.cumsum([0, *self.sizes]).tolist()
        self.pattern = build_pattern(weights)
        marks = self.pattern[:, None] == np.arange(len(self.sizes))
        self._cumulative_counts = np.pad(marks.cumsum(0), ((1, 0), (0, 0)))  # [length + 1, sets]

    def count_before(self, position: int) -> list[int]:
        """Return the number of items of each set before a position."""
        rounds, offset = divmod(position, len(self.pattern))
        return list((rounds * self._cumulative_counts[-1] + self._cumulative_counts[offset]).tolist())

    def locate(self, position: int) -> tuple[int, int, int]:
        """Return (set, its epoch, index within the epoch) of a position."""
        chosen = int(self.pattern[position % len(self.pattern)])
        return chosen, *divmod(self.count_before(position)[chosen], self.sizes[chosen])


class PromptLoader(Generic[Item]):
    """Deals out prompts endlessly, in a shuffled order per epoch that only the seed determines.

    A batch may span two epochs, so that every prompt comes once per epoch. Items may be of any type: they are only
    indexed, and only when they are dealt out.

    weights: of the data sets in a `ConcatDataset`, which then have their own epochs. order: column of their sort keys,
    which order each set's first epoch, and without shuffling all epochs. file_sizes: bytes of the prompt files, as part
    of the fingerprint.
    """

    def __init__(
        self,
        prompts: Sequence[Item],
        prompts_per_step: int,
        seed: int,
        shuffle: bool = True,
        weights: Sequence[float] = (),
        order: str = "",
        file_sizes: Sequence[int] = (),
    ) -> None:
        if not len(prompts):
            raise ConfigError("there are no prompts to train on")
        joined = prompts if isinstance(prompts, ConcatDataset) else ConcatDataset((prompts,), ("",))
        if weights and len(weights) != len(joined.parts):
            raise ConfigError(
                f"data.mixture_weights has {len(weights)} numbers, but there are {len(joined.parts)} data sets"
            )
        if order and joined.keys is None:
            raise ConfigError(
                f"data.curriculum_key={order}: this algorithm's items have no columns to sort by; remove it"
            )
        self._prompts, self._per_step = joined, prompts_per_step
        self._seed, self._shuffle, self._file_sizes = seed, shuffle, tuple(file_sizes)
        self._stream = Stream(joined.sizes, weights)
        self._names = joined.names if weights else ("",)
        self._keys = joined.keys if order else None
        self._samples = 0  # prompts dealt out since the beginning
        self._last: Sequence[Item] = []  # the batch dealt out last
        self._orders: dict[tuple[int, int], list[int]] = {}  # by set and epoch: order of the set's prompts
        self._forks: dict[str, PromptLoader[Item]] = {}
        self._render: Callable[[Item], Item] | None = None

    def fork(self, name: str, render: Callable[[Item], Item] | None = None) -> PromptLoader[Item]:
        """Return a loader of the same items in the same order, with a position of its own, which is part of the state
        of this one.

        name: of the fork in that state. render: applied to each item that the fork deals out.
        """
        other = copy.copy(self)
        other._last, other._orders, other._forks, other._render = [], {}, {}, render
        self._forks[name] = other
        return other

    @staticmethod
    def from_config(items: Sequence[Item], config: Config) -> PromptLoader[Item]:
        """Create the loader of a configuration."""
        data, seed = config.data, config.run.seed
        sizes = [file.stat().st_size for file in map(Path, data.train) if file.is_file()]
        return PromptLoader(
            items, data.prompts_per_step, seed, data.shuffle, data.mixture_weights, data.curriculum_key, sizes
        )

    def next_batch(self) -> Sequence[Item]:
        """Return the next `prompts_per_step` prompts."""
        return self.next_items(self._per_step)

    def next_items(self, count: int) -> Sequence[Item]:
        """Return the next `count` items."""
        self._last = self.items_at(self._samples, count)
        self._samples += count
        return self._last

    @property
    def position(self) -> int:
        """Number of items dealt out since the beginning."""
        return self._samples

    def items_at(self, start: int, count: int) -> Sequence[Item]:
        """Return the `count` items from position `start` on, without dealing them out."""
        indices = []
        for position in range(start, start + count):
            chosen, epoch, number = self._stream.locate(position)
            indices.append(self._stream.offsets[chosen] + self._epoch_order(chosen, epoch)[number])
        items = self._prompts.select(indices)
        return items if self._render is None else [self._render(item) for item in items]

    def is_last_batch(self, prompts: Sequence[Item]) -> bool:
        """Return whether these prompts end the last batch, so that `next_items` continues after them."""
        last = self._last[-len(prompts) :] if prompts else []
        return 0 < len(prompts) == len(last) and all(map(operator.is_, prompts, last))

    def epoch_metrics(self) -> dict[str, float]:
        """Return how often the prompts were dealt out: `data/epoch`, or `data/epoch/<set>` for each set."""
        counts = zip(self._names, self._stream.count_before(self._samples), self._stream.sizes, strict=True)
        return {f"data/epoch/{name}".rstrip("/"): count / size for name, count, size in counts}

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position as plain values. A loader that loads them continues with the same batch."""
        forks = {name: other._samples for name, other in self._forks.items()}
        return {"samples": self._samples, "fingerprint": self.fingerprint} | ({"forks": forks} if forks else {})

    def load_state_dict(self, state: dict[str, Any], forced: bool = False) -> None:
        """Restore a saved position. Raises ConfigError if it was saved with other prompts, unless forced."""
        self.check(state, forced)
        self._samples = int(state["samples"])
        self._last = []
        for name, other in self._forks.items():  # a checkpoint of an earlier version has none
            other._samples, other._last = int(state.get("forks", {}).get(name, self._samples)), []

    def check(self, state: dict[str, Any], forced: bool = False) -> None:
        """Raise the error that `load_state_dict` would raise."""
        if state.get("fingerprint") != self.fingerprint and not forced:
            raise ConfigError(
                "the checkpoint was written with other training prompts than these; restore data.train, "
                "data.mixture_weights and data.curriculum_key, or start a new run.dir, or continue anyway with "
                "run.resume=forced"
            )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the data and their shares.

        Covers the number of items, up to 1,000 evenly spaced items, as some are slow to index, and the sizes of the
        files. A change in other rows of a larger file that keeps its size is not detected.
        """
        count = len(self._prompts)
        digest = hashlib.sha256(str(count).encode())
        for place in range(min(count, 1000)):
            digest.update(repr(self._prompts[place * count // min(count, 1000)]).encode())
        digest.update(repr(self._file_sizes).encode())
        if len(self._stream.sizes) > 1:
            shares = self._stream.count_before(len(self._stream.pattern))
            digest.update(repr({"sizes": list(self._stream.sizes), "shares": shares}).encode())
        if self._keys is not None:
            digest.update(self._keys.tobytes())
        return digest.hexdigest()

    def _epoch_order(self, chosen: int, epoch: int) -> list[int]:
        """Return the order of a set in an epoch. The last two are cached, because a batch may span both."""
        if (order := self._orders.get((chosen, epoch))) is None:
            start, size = self._stream.offsets[chosen], self._stream.sizes[chosen]
            order = list(range(size))
            if self._shuffle:
                set_suffix = f"/{chosen}" if len(self._stream.sizes) > 1 else ""
                random.Random(f"{self._seed}/{epoch}{set_suffix}").shuffle(order)
            if self._keys is not None and (epoch == 0 or not self._shuffle):
                order = sort_by_key(order, self._keys[start : start + size])
            for other in [key for key in self._orders if key[0] == chosen and abs(key[1] - epoch) > 1]:
                del self._orders[other]
            self._orders[chosen, epoch] = order
        return order
