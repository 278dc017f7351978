"""Weighted mixtures of data sets: exact shares, complete epochs per data set, and resumption anywhere."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import ConfigError
from megarl.data.loader import (
    MAX_PATTERN_LENGTH,
    ConcatDataset,
    PromptLoader,
    Stream,
    Subset,
    build_pattern,
    name_datasets,
    round_weights,
)

pytestmark = pytest.mark.alone

SETS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=2, max_size=6)
"""(items, weight) of each data set."""


def concat_datasets(sizes: list[int], keys: np.ndarray | None = None) -> ConcatDataset[str]:
    """Concatenate data sets of these sizes; item `0.1` is number 1 of data set 0."""
    parts = tuple([f"{number}.{item}" for item in range(size)] for number, size in enumerate(sizes))
    return ConcatDataset(parts, tuple(f"set{number}" for number in range(len(sizes))), keys)


def loader(sets: list[tuple[int, int]], per_step: int = 3, seed: int = 1, **kwargs: Any) -> PromptLoader[str]:
    sizes, weights = [size for size, _ in sets], [weight for _, weight in sets]
    return PromptLoader(concat_datasets(sizes), per_step, seed, weights=weights, **kwargs)


def test_build_pattern_by_hand() -> None:
    assert build_pattern([2, 1, 1]).tolist() == [0, 1, 0, 2]
    assert build_pattern([0.7, 0.2, 0.1]).tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 2]
    assert build_pattern([1.5]).tolist() == build_pattern([]).tolist() == [0]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_every_pattern_prefix_has_rounded_shares(weights: list[int]) -> None:
    pattern = build_pattern(weights)
    counts = np.zeros(len(weights), np.int64)
    for count, chosen in enumerate(pattern.tolist(), 1):
        counts[chosen] += 1
        for number, weight in enumerate(weights):
            expected_count = Fraction(count * weight, sum(weights))
            assert expected_count.__floor__() <= counts[number] <= expected_count.__ceil__()
    assert [Fraction(int(prompt_loader), len(pattern)) for prompt_loader in counts] == [
        Fraction(prompt_loader, sum(weights)) for prompt_loader in weights
    ]


@given(SETS, st.integers(1, 20), st.integers(0, 5))
def test_steps_have_the_shares_of_the_weights(sets: list[tuple[int, int]], rounds: int, steps: int) -> None:
    """Shares are exact where the weights divide the step, and within two items otherwise."""
    total = sum(weight for _, weight in sets)
    prompt_loader = loader(sets, per_step=rounds * total)
    for _ in range(steps):
        assert Counter(item[0] for item in prompt_loader.next_batch()) == {
            str(number): rounds * weight for number, (_, weight) in enumerate(sets)
        }
    prompt_loader = loader(sets, per_step=rounds)
    for _ in range(steps):
        result = Counter(item[0] for item in prompt_loader.next_batch())
        assert all(abs(result[str(n)] - rounds * weight / total) < 2 for n, (_, weight) in enumerate(sets))


@given(SETS, st.integers(0, 60), st.integers(1, 7), st.booleans())
@settings(max_examples=50)
def test_each_dataset_has_epochs_of_its_own(sets: list[tuple[int, int]], count: int, seed: int, shuffle: bool) -> None:
    prompt_loader = loader(sets, seed=seed, shuffle=shuffle)
    items = prompt_loader.next_items(count)
    for number, (size, _) in enumerate(sets):
        dataset_items = [item for item in items if item.startswith(f"{number}.")]
        assert prompt_loader.epoch_metrics()[f"data/epoch/set{number}"] == len(dataset_items) / size
        for start in range(0, len(dataset_items), size):
            epoch = dataset_items[start : start + size]
            assert len(set(epoch)) == len(epoch)
            assert shuffle or epoch == [f"{number}.{item}" for item in range(len(epoch))]


@given(SETS, st.integers(0, 60))
@settings(max_examples=50)
def test_resumes_anywhere_with_the_same_items(sets: list[tuple[int, int]], count: int) -> None:
    full = list(loader(sets).next_items(count + 30))
    prompt_loader = loader(sets)
    prompt_loader.next_items(count)
    state = json.loads(json.dumps(prompt_loader.state_dict()))
    assert state["samples"] == count
    resumed = loader(sets)
    resumed.load_state_dict(state)
    assert list(resumed.items_at(count, 6)) == full[count : count + 6] and resumed.position == count
    assert list(resumed.items_at(0, count)) == full[:count]
    assert list(resumed.next_items(30)) == full[count:] and list(prompt_loader.next_items(30)) == full[count:]


def test_fork_has_the_same_order_and_a_position_of_its_own() -> None:
    sets = [(4, 1), (5, 3)]
    first, order = loader(sets), list(loader(sets).next_items(12))
    fork = first.fork("b", lambda item: (*item, "rendered"))
    first.next_items(7)
    batch = fork.next_items(3)
    assert batch == [(*item, "rendered") for item in order[:3]]
    assert fork.is_last_batch(batch) and not first.is_last_batch(batch)
    resumed = loader(sets)
    other = resumed.fork("b")
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert (list(resumed.next_items(2)), list(other.next_items(2))) == (order[7:9], order[3:5])
    resumed.load_state_dict({**loader(sets).state_dict(), "samples": 6})  # of a run without forks
    assert list(other.next_items(2)) == order[6:8]


def test_checkpoint_with_other_weights_raises() -> None:
    state = loader([(4, 1), (5, 3)]).state_dict()
    loader([(4, 2), (5, 6)]).load_state_dict(state)  # the same shares
    for sets in ([(4, 1), (5, 2)], [(5, 3), (4, 1)], [(4, 1), (6, 3)]):
        with pytest.raises(ConfigError, match="other training prompts.*data.mixture_weights"):
            loader(sets).load_state_dict(state)
    with pytest.raises(ConfigError, match="other training prompts"):
        PromptLoader(concat_datasets([4, 5]), 3, 1).load_state_dict(state)


def test_files_without_weights_are_one_dataset() -> None:
    prompt_loader = PromptLoader(concat_datasets([3, 4]), 7, seed=1)
    separate = PromptLoader([*concat_datasets([3, 4])], 7, seed=1)
    assert prompt_loader.next_batch() == separate.next_batch() and prompt_loader.state_dict() == separate.state_dict()
    assert prompt_loader.epoch_metrics() == {"data/epoch": 1.0}


def test_round_weights() -> None:
    assert round_weights([0.5, 0.25, 0.25]) == (2, 1, 1) and round_weights([30, 20]) == (3, 2)
    assert round_weights([0.1, 0.2]) == (1, 2) and round_weights([1e-6, 2e-6]) == (1, 2)
    rounded = round_weights([0.33333, 0.33333, 0.33334])
    assert sum(rounded) == MAX_PATTERN_LENGTH and rounded == (3333, 3333, 3334)
    with pytest.raises(
        ConfigError, match=r"data.mixture_weights=\[1, 1e-05\]: 1e-05 is less than one prompt in 10000; raise"
    ):
        round_weights([1, 1e-5])


def test_weight_count_must_match_datasets() -> None:
    with pytest.raises(ConfigError, match="data.mixture_weights has 3 numbers, but there are 2 data sets"):
        PromptLoader(concat_datasets([3, 4]), 1, 1, weights=[1, 2, 3])


def test_dataset_names_are_short_and_unique() -> None:
    assert name_datasets([]) == () and name_datasets(["data/a.parquet"]) == ("",)
    assert name_datasets(["x/a.parquet", "x/b.jsonl"]) == ("a", "b")
    assert name_datasets(["gsm8k/train.parquet", "math/train.parquet"]) == ("gsm8k/train", "math/train")
    assert name_datasets(["/d/x/train.jsonl", "train.jsonl"]) == ("x/train", "train")
    assert name_datasets(["x/a.jsonl", "x/a.parquet"]) == ("x/a.jsonl", "x/a.parquet")
    with pytest.raises(ConfigError, match="x/a.jsonl is named twice; .*data.mixture_weights"):
        name_datasets(["x/a.jsonl", "y.jsonl", "x/./a.jsonl"])


def test_concat_dataset_indexing() -> None:
    items = concat_datasets([2, 0, 3])
    assert len(items) == 5 and list(items) == ["0.0", "0.1", "2.0", "2.1", "2.2"] == items[:]
    assert items[-1] == "2.2" and items[1:4:2] == ["0.1", "2.1"]
    with pytest.raises(IndexError):
        items[5]


def test_items_are_read_on_access() -> None:
    reads = []

    class Slow(tuple):  # type: ignore[type-arg]
        def __getitem__(self, index: Any) -> Any:
            reads.append(index)
            return super().__getitem__(index)

    prompt_loader = PromptLoader(ConcatDataset((Slow("abcdef"),), ("",)), 4, seed=1, shuffle=False)
    batch = prompt_loader.next_batch()
    assert isinstance(batch, Subset) and len(batch) == 4 and not reads
    assert batch[2] == "c" and reads == [2] and list(batch[1:3]) == ["b", "c"] and reads == [2, 1, 2]


def test_stream_locates_far_positions_directly() -> None:
    stream = Stream((3, 5), (1, 2))
    position = 3 * 10**15
    assert stream.count_before(position) == [10**15, 2 * 10**15]
    assert stream.locate(position) == (1, 2 * 10**15 // 5, 0)
