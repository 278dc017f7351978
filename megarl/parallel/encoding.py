"""Encode host values as bytes for other ranks: plain data that executes no code when it is read.

A value is None, bool, number, text, bytes, path, date, dtype, array, tensor (decoded on the host), or a list, tuple,
set, mapping, dataclass or NamedTuple of such. The bytes are a pickle in which only `_FUNCTIONS` can be called. Classes
are sent by name. The reader accepts dataclasses and NamedTuples of this package and of modules that it has already
imported, and sets their fields without calling `__init__`.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

_PLAIN_TYPES = (Counter, Decimal, date, datetime, time, timedelta, timezone)  # pickled as a call and its arguments
_TO_BUILTIN: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}
"""Convert an instance of a subclass, such as an enumeration, to its builtin base."""


class EncodingError(ValueError):
    """The value is not plain data, or the bytes are not an encoded value."""


def encode(value: Any) -> bytes:
    """Encode a value. Raises EncodingError, which names a type that cannot be sent."""
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5).dump(value)
    except RecursionError:
        raise EncodingError("a value that is nested too deeply cannot be sent to another rank") from None
    return stream.getvalue()


def decode(content: bytes | memoryview) -> Any:
    """Decode a value. Raises EncodingError for bytes that `encode` has not written."""
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # noqa: BLE001  pickle raises errors of almost every kind
        raise EncodingError(f"not a value from a rank: {type(error).__name__}: {error}") from error


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Return a function of `_FUNCTIONS` and its arguments. Not called for built-in types."""
        kind = type(value)
        if kind in _PLAIN_TYPES or (callable(value) and value in _FUNCTIONS.values()):
            return NotImplemented
        if isinstance(value, torch.Tensor):
            plain = value.detach().cpu().contiguous()
            # A single element counts as contiguous whatever its stride, and is viewed as bytes only with stride 1.
            flat = plain.as_strided((plain.numel(),), (1,))
            data = pickle.PickleBuffer(flat.view(torch.uint8).numpy().data)
            return _tensor, (str(plain.dtype).removeprefix("torch."), tuple(plain.shape), data)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.names is None:
            data = pickle.PickleBuffer(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            return _array, (value.dtype.str, value.shape, data)
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return _scalar, (value.dtype.str, value.tobytes())
        for base, convert in _TO_BUILTIN.items():
            if isinstance(value, base):
                return base, (convert(value),)
        if isinstance(value, Mapping):
            return dict, (list(value.items()),)
        if isinstance(value, PurePath):
            return Path, (str(value),)
        if isinstance(value, torch.dtype):
            return _dtype, (str(value).removeprefix("torch."),)
        name = f"{kind.__module__}:{kind.__qualname__}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _object, (name, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return _named_tuple, (name, tuple(value))
        raise EncodingError(
            f"a {name.replace(':', '.')} cannot be sent to another rank: only plain values, arrays and dataclasses of "
            "them can"
        )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _FUNCTIONS[module, name]


def _tensor(dtype: str, shape: tuple[int, ...], data: bytearray) -> torch.Tensor:
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(_dtype(dtype)).view(shape)


def _array(dtype: str, shape: tuple[int, ...], data: bytes | bytearray) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, dtype).reshape(shape)  # writable if it was, since the data are then a bytearray


def _scalar(dtype: str, data: bytes) -> Any:
    return np.frombuffer(data, dtype)[0]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise EncodingError(f"{name} is not a dtype")
    return dtype


def _object(name: str, values: dict[str, Any]) -> Any:
    cls = _find_class(name)
    if {field.name for field in dataclasses.fields(cls)} != set(values):
        raise EncodingError(f"not the fields of {name}")
    decoded: Any = object.__new__(cls)
    for field, value in values.items():
        object.__setattr__(decoded, field, value)
    return decoded


def _named_tuple(name: str, values: tuple[Any, ...]) -> Any:
    cls = _find_class(name)
    if not (issubclass(cls, tuple) and hasattr(cls, "_fields")):
        raise EncodingError(f"{name} is not a NamedTuple")
    return tuple.__new__(cls, values)


def _find_class(name: str) -> type:
    """Return the class of this name. Imports no modules but those of this package."""
    module, _, path = name.partition(":")
    if module not in sys.modules and module.split(".")[0] == __name__.split(".")[0]:
        importlib.import_module(module)
    target: Any = sys.modules[module]
    for part in path.split("."):
        target = getattr(target, part)
    if not isinstance(target, type):
        raise EncodingError(f"{name} is not a class")
    return target


_BUILDERS: tuple[Any, ...] = _tensor, _array, _scalar, _dtype, _object, _named_tuple
_FUNCTIONS: dict[tuple[str, str], Any] = {
    (function.__module__, function.__qualname__): function
    for function in (*_BUILDERS, dict, Path, *_TO_BUILTIN, *_PLAIN_TYPES)
}
"""The only functions that a pickle may call, by module and name."""
