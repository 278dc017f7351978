"""A curriculum: first from the least to the greatest, then as ever."""

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


def test_by_hand() -> None:
    keys = np.array([3.0, NAN, 1.0, 2.0, NAN, 1.0])
    assert sort_by_key([0, 1, 2, 3, 4, 5], keys) == [2, 1, 5, 3, 4, 0]  # 1 and 4 stay; 2 and 5 as they were
    assert sort_by_key([5, 4, 3, 2, 1, 0], keys) == [5, 4, 2, 3, 1, 0]
    assert sort_by_key([1, 0], np.array([NAN, NAN])) == [1, 0]


@given(st.lists(st.none() | st.integers(0, 3)), st.randoms())
def test_known_ones_ascend_and_all_others_stay(values: list[int | None], draw: Any) -> None:
    keys = np.array([NAN if value is None else value for value in values], np.float64)
    order = list(range(len(values)))
    draw.shuffle(order)
    result = sort_by_key(order, keys)
    assert sorted(result) == sorted(order)
    known = [item for item in result if not math.isnan(keys[item])]
    before = [item for item in order if not math.isnan(keys[item])]
    assert known == sorted(before, key=lambda item: keys[item])  # which is stable
    assert [at for at, item in enumerate(result) if math.isnan(keys[item])] == [
        at for at, item in enumerate(order) if math.isnan(keys[item])
    ]


def loader(shuffle: bool = True, weights: tuple[float, ...] = (), order: str = "level") -> PromptLoader[str]:
    keys = np.array([3.0, 1.0, 2.0, 1.0, 5.0, 4.0, 6.0])
    return PromptLoader(ConcatDataset((list("abcd"), list("xyz")), ("m", "n"), keys), 1, 1, shuffle, weights, order)


def test_the_first_epoch_goes_by_it_and_later_ones_are_shuffled() -> None:
    first, second = ("".join(loader().next_items(14))[begin : begin + 7] for begin in (0, 7))
    assert first in ("bdcayxz", "dbcayxz") and sorted(second) == sorted(first) and second != first
    assert second == "".join(loader(order="").next_items(14))[7:]
    assert "".join(loader(shuffle=False).next_items(14)) == 2 * "bdcayxz"


def test_each_set_of_a_mixture_has_its_own() -> None:
    handed = loader(weights=(1, 1), shuffle=False).next_items(8)
    assert "".join(handed[::2]) == "bdca" and "".join(handed[1::2]) == "yxzy"


def test_a_checkpoint_of_another_order_is_refused() -> None:
    state = loader().state_dict()
    loader().load_state_dict(state)
    with pytest.raises(ConfigError, match="data.curriculum_key"):
        loader(order="").load_state_dict(state)


def test_numbers_are_found_in_columns_and_in_the_fields_of_extra_ones() -> None:
    assert read_key({"level": 2}, "level", "f") == 2.0
    assert read_key({"extra_info": {"level": 2.5}, "metadata": None}, "level", "f") == 2.5
    assert read_key({"metadata": {"level": -1}, "level": None}, "level", "f") == -1.0
    assert math.isnan(read_key({"extra": "x"}, "level", "f"))


@pytest.mark.parametrize("value", ["3", True, [1], {"a": 1}])
def test_what_is_no_number_is_named_with_its_row(value: Any) -> None:
    with pytest.raises(
        ConfigError, match="a.jsonl:7: 'level' is .*, which is not a number; data.curriculum_key=level .*null"
    ):
        read_key({"level": value}, "level", "a.jsonl:7")


def test_a_number_beyond_floats() -> None:
    with pytest.raises(ConfigError, match="a.jsonl:7: 'level' overflows float64"):
        read_key({"level": 10**400}, "level", "a.jsonl:7")


def test_a_column_that_no_row_has() -> None:
    with pytest.raises(
        ConfigError, match="data.curriculum_key=level: no row of a.jsonl, b.jsonl has a number in that column"
    ):
        check_has_keys(np.array([NAN]), "level", ("a.jsonl", "b.jsonl"))
    check_has_keys(np.array([NAN, 1.0]), "level", ("a.jsonl", "b.jsonl"))
    with pytest.raises(ConfigError, match="data.curriculum_key=level: this algorithm's items have no columns"):
        PromptLoader(list("ab"), 1, 1, order="level")


def test_nan_is_no_number_to_order_by(tmp_path: Path) -> None:
    lines, table, nested = tmp_path / "a.jsonl", tmp_path / "a.parquet", tmp_path / "b.parquet"
    lines.write_text('{"level": 1, "x": NaN}\n{"level": null}\n{"extra": {"level": NaN}}\n')
    pq.write_table(pa.table({"level": pa.array([1.0, None, NAN]), "x": pa.array([NAN, NAN, NAN])}), table)
    pq.write_table(pa.table({"extra_info": [{"level": 1.0}, {"level": NAN}]}), nested)
    for file, where in ((lines, "a.jsonl:3"), (table, "a.parquet, row 2"), (nested, "b.parquet, row 1")):
        check_no_nan(file, "another")
        with pytest.raises(ConfigError, match=f"{where}: 'level' is NaN, by which data.curriculum_key=level cannot"):
            check_no_nan(file, "level")
