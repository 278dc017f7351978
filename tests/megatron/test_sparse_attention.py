"""Sparse attention: Megatron's own module, which GPUs have, with replay, against transformers; and records of keys."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from check_parity import misses  # noqa: E402

from megarl.models.sparse_indices import IndexShape, check_record, positions, select  # noqa: E402


@pytest.mark.parametrize(
    "layout",
    ["dsa", *(pytest.param(layout, marks=pytest.mark.nightly) for layout in ("tp=2,dsa", "cp=2,dsa", "pp=2,dsa"))],
)
def test_megatron_module_matches_transformers(
    layout: str, run_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    models = "deepseek_v32:actor glm_moe_dsa:actor"
    for result in run_ranks(2 if "=" in layout else 1, "tests/megatron/ranks_layout.py", layout, models, str(tmp_path)):
        for model, numbers in result.items():
            assert numbers.pop("indices effect") > 0.1
            assert numbers.pop("indices same keys") < 1e-5  # it sums over keys in the order of the record
            assert not misses(numbers), (model, {name: numbers[name] for name in misses(numbers)})


def test_selects_rows_and_layers_of_a_record() -> None:
    record = torch.tensor([[[1, 40000], [2, 3]], [[4, 5], [65534, 6]]]).to(torch.int16)
    keys = select(record, torch.tensor([1, -1, 0]), (1,))
    assert keys.tolist() == [[[65534, 6]], [[-1, -1]], [[2, 3]]] and keys.dtype == torch.int32
    assert positions(record)[0, 0].tolist() == [1, 40000]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([[[0, 1]], [[3, 2]]], ""),
        ([[[0, 1]], [[4, 2]]], "token 3 in layer 5 are not 2 different tokens up to itself"),
        ([[[1, 1]]], "token 2 in layer 5 are not 2 different"),
        ([[[0]]], "are of 1 layers with 1 keys a token, the trainer's model has 1 with 2"),
    ],
)
def test_checks_a_record(rows: list[Any], problem: str) -> None:
    shape, record = IndexShape(layers=(5,), topk=2, is_short=True), torch.tensor(rows, dtype=torch.int16)
    if not problem:
        check_record(record, shape)
        return
    with pytest.raises(ValueError, match=problem):
        check_record(record, shape)
