"""Curriculum order: the first epoch ascends by a key, later ones are shuffled."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config import ConfigError
from megarl.data.loader import (
    ConcatDataset,
    PromptLoader,
    check_has_keys,
    check_no_nan,
    read_key,
    sort_by_key,
)

pytestmark = pytest.mark.alone

NAN = math.nan


def test_sort_by_key_by_hand() -> None:
    keys = np.array([3.0, NAN, 1.0, 2.0, NAN, 1.0])
    assert sort_by_key([0, 1, 2, 3, 4, 5], keys) == [2, 1, 5, 3, 4, 0]  # 1 and 4 keep their positions; 2 and 5 tie
    assert sort_by_key([5, 4, 3, 2, 1, 0], keys) == [5, 4, 2, 3, 1, 0]
    assert sort_by_key([1, 0], np.array([NAN, NAN])) == [1, 0]


@given(st.lists(st.none() | st.integers(0, 3)), st.randoms())
def test_sort_by_key_sorts_known_keys_and_keeps_nan_in_place(values: list[int | None], draw: Any) -> None:
    keys = np.array([NAN if value is None else value for value in values], np.float64)
    order = list(range(len(values)))
    draw.shuffle(order)
    result = sort_by_key(order, keys)
    assert sorted(result) == sorted(order)
    with_key = [item for item in result if not math.isnan(keys[item])]
    before = [item for item in order if not math.isnan(keys[item])]
    assert with_key == sorted(before, key=lambda item: keys[item])  # a stable sort
    assert [position for position, item in enumerate(result) if math.isnan(keys[item])] == [
        position for position, item in enumerate(order) if math.isnan(keys[item])
    ]


def loader(shuffle: bool = True, weights: tuple[float, ...] = (), order: str = "level") -> PromptLoader[str]:
    keys = np.array([3.0, 1.0, 2.0, 1.0, 5.0, 4.0, 6.0])
    return PromptLoader(ConcatDataset((list("abcd"), list("xyz")), ("m", "n"), keys), 1, 1, shuffle, weights, order)


def test_first_epoch_is_sorted_and_later_ones_shuffled() -> None:
    first, second = ("".join(loader().next_items(14))[start : start + 7] for start in (0, 7))
    assert first in ("bdcayxz", "dbcayxz") and sorted(second) == sorted(first) and second != first
    assert second == "".join(loader(order="").next_items(14))[7:]
    assert "".join(loader(shuffle=False).next_items(14)) == 2 * "bdcayxz"


def test_each_dataset_of_a_mixture_is_sorted() -> None:
    items = loader(weights=(1, 1), shuffle=False).next_items(8)
    assert "".join(items[::2]) == "bdca" and "".join(items[1::2]) == "yxzy"


def test_checkpoint_with_another_curriculum_raises() -> None:
    state = loader().state_dict()
    loader().load_state_dict(state)
    with pytest.raises(ConfigError, match="data.curriculum_key"):
        loader(order="").load_state_dict(state)


def test_read_key_looks_in_columns_and_extra_fields() -> None:
    assert read_key({"level": 2}, "level", "f") == 2.0
    assert read_key({"extra_info": {"level": 2.5}, "metadata": None}, "level", "f") == 2.5
    assert read_key({"metadata": {"level": -1}, "level": None}, "level", "f") == -1.0
    assert math.isnan(read_key({"extra": "x"}, "level", "f"))


@pytest.mark.parametrize("value", ["3", True, [1], {"a": 1}])
def test_non_numeric_key_raises_with_its_row(value: Any) -> None:
    with pytest.raises(
        ConfigError, match="a.jsonl:7: 'level' is .*, which is not a number; data.curriculum_key=level .*null"
    ):
        read_key({"level": value}, "level", "a.jsonl:7")


def test_key_beyond_float64_raises() -> None:
    with pytest.raises(ConfigError, match="a.jsonl:7: 'level' overflows float64"):
        read_key({"level": 10**400}, "level", "a.jsonl:7")


def test_missing_key_column_raises() -> None:
    with pytest.raises(
        ConfigError, match="data.curriculum_key=level: no row of a.jsonl, b.jsonl has a number in that column"
    ):
        check_has_keys(np.array([NAN]), "level", ("a.jsonl", "b.jsonl"))
    check_has_keys(np.array([NAN, 1.0]), "level", ("a.jsonl", "b.jsonl"))
    with pytest.raises(ConfigError, match="data.curriculum_key=level: this algorithm's items have no columns"):
        PromptLoader(list("ab"), 1, 1, order="level")


def test_nan_key_raises(tmp_path: Path) -> None:
    lines, table, nested = tmp_path / "a.jsonl", tmp_path / "a.parquet", tmp_path / "b.parquet"
    lines.write_text('{"level": 1, "x": NaN}\n{"level": null}\n{"extra": {"level": NaN}}\n')
    pq.write_table(pa.table({"level": pa.array([1.0, None, NAN]), "x": pa.array([NAN, NAN, NAN])}), table)
    pq.write_table(pa.table({"extra_info": [{"level": 1.0}, {"level": NAN}]}), nested)
    for file, location in ((lines, "a.jsonl:3"), (table, "a.parquet, row 2"), (nested, "b.parquet, row 1")):
        check_no_nan(file, "another")
        with pytest.raises(ConfigError, match=f"{location}: 'level' is NaN, by which data.curriculum_key=level cannot"):
            check_no_nan(file, "level")
