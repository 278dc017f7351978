"""Results of operations on `meta`, remembered: their shapes depend on the arguments' shapes alone.

torch computes many of them in Python. A layer of a rehearsed step has the same shapes in every micro-batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class _Layout(NamedTuple):
    """A new tensor: sizes and strides in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def create(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


class ResultCache:
    """Runs operations on `meta`, each only once for equal arguments.

    Views, operations that write to an argument, and those that return memory of an argument run every time.
    """

    def __init__(self) -> None:
        self._results: dict[Any, tuple[Any, list[_Layout]]] = {}
        self._is_pure: dict[Any, bool] = {}
        """Whether an operation is one of those that may be remembered."""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation, as `func(*args, **kwargs)`."""
        is_pure = self._is_pure.get(func)
        if is_pure is None:
            is_pure = self._is_pure[func] = _returns_new_tensors(func)
        if not is_pure:
            return func(*args, **kwargs)
        key: list[Any] = [func]
        tensors: list[torch.Tensor] = []
        if not (_add_to_key(key, tensors, args) and _add_to_key(key, tensors, kwargs)):
            return func(*args, **kwargs)
        known = self._results.get(tuple(key))
        if known is None:
            result = func(*args, **kwargs)
            layouts = self._describe(func, result, tensors)
            if layouts is not None:
                self._results[tuple(key)] = type(result), layouts
            return result
        kind, layouts = known
        created = [layout.create() for layout in layouts]
        return created[0] if issubclass(kind, torch.Tensor) else kind(created)

    def _describe(self, func: Any, result: Any, arguments: list[torch.Tensor]) -> list[_Layout] | None:
        """Return what a result consists of; None unless these are dense tensors on `meta` that share no memory."""
        tensors = [result] if isinstance(result, torch.Tensor) else result
        if not isinstance(tensors, list | tuple) or not all(type(item) is torch.Tensor for item in tensors):
            return None
        storages = {item.untyped_storage()._cdata for item in tensors}
        if len(storages) < len(tensors) or storages & {item.untyped_storage()._cdata for item in arguments}:
            self._is_pure[func] = False
            return None
        layouts = [_Layout(tuple(item.shape), item.stride(), item.dtype) for item in tensors]
        for item, layout in zip(tensors, layouts, strict=True):
            if not item.is_meta or item.storage_offset() or item.layout != torch.strided:
                return None
            if layout.create().untyped_storage().nbytes() != item.untyped_storage().nbytes():
                return None
        return layouts


def _returns_new_tensors(func: Any) -> bool:
    """Return whether by its schema an operation of torch neither writes to its arguments nor returns views of them."""
    schema = func._schema
    return (
        func.namespace == "aten"
        and not schema.is_mutable
        and all(item.alias_info is None for item in (*schema.arguments, *schema.returns))
    )


def _add_to_key(key: list[Any], tensors: list[torch.Tensor], value: Any) -> bool:
    """Add all that the layout of a result can depend on to a key; return whether it is known."""
    if isinstance(value, torch.Tensor):
        if not value.is_meta or value.layout != torch.strided:
            return False
        tensors.append(value)
        key += (value.dtype, value.shape, value.stride())
    elif isinstance(value, list | tuple):
        key.append(len(value))
        return all(_add_to_key(key, tensors, item) for item in value)
    elif isinstance(value, dict):
        key.append(tuple(value))
        return all(_add_to_key(key, tensors, item) for item in value.values())
    elif value is None or isinstance(value, int | float | str | torch.dtype | torch.device | torch.layout):
        key += (type(value), value)  # 1, 1.0 and True are equal
    elif isinstance(value, torch.memory_format):
        key.append(value)
    else:
        return False
    return True
