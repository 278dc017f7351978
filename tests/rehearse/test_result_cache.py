"""Remembered results of operations on `meta`, compared with those of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megarl.rehearse.result_cache import ResultCache

pytestmark = pytest.mark.alone

ATEN = torch.ops.aten


def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def layouts(result: Any) -> list[tuple[Any, ...]]:
    tensors = [result] if isinstance(result, torch.Tensor) else result
    return [
        (item.dtype, item.shape, item.stride(), item.storage_offset(), item.untyped_storage().nbytes())
        for item in tensors
    ]


class Counter:
    """An operation that counts its calls."""

    def __init__(self, func: Any) -> None:
        self.func, self.count = func, 0
        self.namespace, self._schema = func.namespace, func._schema

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.func(*args, **kwargs)


OPERATIONS: list[tuple[Any, Callable[[], tuple[Any, ...]], dict[str, Any]]] = [
    (ATEN.mul.Tensor, lambda: (meta(4, 1), meta(3, dtype=torch.bfloat16)), {}),
    (ATEN.cat.default, lambda: ([meta(2, 3), meta(5, 3)],), {}),
    (ATEN.mm.default, lambda: (meta(4, 8), meta(8, 2)), {}),
    (ATEN.native_layer_norm.default, lambda: (meta(4, 8), [8], meta(8), meta(8), 1e-5), {}),
    (ATEN._to_copy.default, lambda: (meta(6, 4).t(),), {"dtype": torch.float64}),
    (ATEN.zeros_like.default, lambda: (meta(6, 4).t(),), {"memory_format": torch.preserve_format}),
    (ATEN.sum.dim_IntList, lambda: (meta(3, 4, 5), [1], True), {}),
]


@pytest.mark.parametrize(("func", "make", "kwargs"), OPERATIONS, ids=[str(item[0]) for item in OPERATIONS])
def test_repeats_what_torch_returns(func: Any, make: Callable[[], tuple[Any, ...]], kwargs: dict[str, Any]) -> None:
    cache, counter = ResultCache(), Counter(func)
    results = [cache.call(counter, make(), kwargs) for _ in range(3)]
    assert counter.count == 1
    wanted = func(*make(), **kwargs)
    assert all(layouts(result) == layouts(wanted) for result in results)
    assert all(type(result) is type(wanted) for result in results)
    assert len({id(result) for result in results}) == 3


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (ATEN.view.default, (meta(4, 3), [12])),
        (ATEN._unsafe_view.default, (meta(4, 3), [12])),  # a view, although its schema does not say so
        (ATEN.add_.Tensor, (meta(4), meta(4))),
        (ATEN.mul.Tensor, (torch.ones(2), torch.ones(2))),
        (ATEN.sum.default, (torch.ones(2),)),
    ],
)
def test_runs_other_operations_every_time(func: Any, args: tuple[Any, ...]) -> None:
    cache, counter = ResultCache(), Counter(func)
    results = [cache.call(counter, args, {}) for _ in range(2)]
    assert counter.count == 2
    if args[0].is_meta:
        assert all(result.untyped_storage()._cdata == args[0].untyped_storage()._cdata for result in results)
    else:
        assert torch.equal(results[0], func(*args))


def test_tells_equal_arguments_of_other_types_apart() -> None:
    cache, integers = ResultCache(), meta(2, dtype=torch.int64)
    dtypes = [cache.call(ATEN.mul.Scalar, (integers, factor), {}).dtype for factor in (1, 1.0, True, 1)]
    assert dtypes == [torch.int64, torch.float32, torch.int64, torch.int64]
    sizes = [cache.call(ATEN.cat.default, ([meta(2, 3)] * count, dim), {}).shape for count, dim in ((2, 0), (2, 1))]
    assert sizes == [(4, 3), (2, 6)]
