"""Encode host values as bytes for other ranks: plain data that executes no code when it is read.

A value is None, bool, number, text, bytes, path, date, dtype, array, tensor (decoded on the host), or a list, tuple,
set, mapping, dataclass or NamedTuple of such. Classes are sent by name. The reader accepts classes of this package and
of modules that it has already imported, and only dataclasses or NamedTuples, whose fields it sets without calling
`__init__`. An object that occurs more than once, such as an array shared by all samples of a prompt, is sent once.

    size of the tree (8 bytes), the tree as JSON, the bytes of all arrays
"""

from __future__ import annotations

import array
import dataclasses
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

_MAX_DEPTH = 200
"""Maximum nesting depth of a value."""
_MIN_ARRAY_LENGTH = 32
"""Lists of at least this many numbers are sent as arrays."""
_SCALARS = (bool, int, float, str, type(None))
_TO_BUILTIN: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}
"""Convert an instance of a subclass to its builtin base."""
_TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "decimal": (Decimal, str, Decimal),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
}


class EncodingError(ValueError):
    """The value is not plain data, or the bytes are not an encoded value."""


def encode(value: Any) -> bytes:
    """Encode a value. Raises EncodingError, which names a type that cannot be sent."""
    writer = _Encoder()
    tree = json.dumps(writer.tree(value, 0), separators=(",", ":")).encode()
    return b"".join([len(tree).to_bytes(8, "little"), tree, *writer.parts])


def decode(content: bytes | memoryview) -> Any:
    """Decode a value. Raises EncodingError for bytes that `encode` has not written."""
    view = memoryview(content).cast("B")
    size = int.from_bytes(view[:8], "little")
    try:
        return _Decoder(view[8 + size :]).value(json.loads(bytes(view[8 : 8 + size])), 0)
    except (TypeError, LookupError, AttributeError, ValueError, RuntimeError, ImportError) as error:
        raise EncodingError(f"not a value from a rank: {type(error).__name__}: {error}") from error


class _Encoder:
    """Builds a JSON tree: scalars and lists stand for themselves, everything else is {"kind": ...}."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._object_ids: dict[int, int] = {}
        self._alive: list[Any] = []  # prevents the reuse of ids

    def tree(self, value: Any, depth: int) -> Any:
        if type(value) in _SCALARS:
            return value
        if depth > _MAX_DEPTH:
            raise EncodingError(f"more than {_MAX_DEPTH} levels of values cannot be sent to another rank")
        if type(value) is list:
            return self._list(value, depth)
        if type(value) in (tuple, set, frozenset):
            return {type(value).__name__: self._list(list(value), depth)}
        if type(value) is Counter:
            return {"counter": [self.tree([key, item], depth + 1) for key, item in value.items()]}
        if isinstance(value, Mapping):
            if all(type(key) is str for key in value):
                return {"dict": {key: self.tree(item, depth + 1) for key, item in value.items()}}
            return {"pairs": [self.tree([key, item], depth + 1) for key, item in value.items()]}
        if isinstance(value, (str, int, float)) and not isinstance(value, np.generic):  # such as an enumeration's
            plain = next(read for kind, read in _TO_BUILTIN.items() if isinstance(value, kind))
            return plain(value)
        if id(value) in self._object_ids:
            return {"again": self._object_ids[id(value)]}
        tree = self._encode_object(value, depth)
        self._object_ids[id(value)] = len(self._object_ids)
        self._alive.append(value)
        return tree

    def _list(self, values: list[Any], depth: int) -> Any:
        if len(values) >= _MIN_ARRAY_LENGTH and len(types := set(map(type, values))) == 1 and types <= {int, float}:
            code = "d" if float in types else "q"
            try:
                self.parts.append(array.array(code, values).tobytes())
                return {"numbers": [code, len(values)]}
            except OverflowError:
                pass
        return [self.tree(item, depth + 1) for item in values]

    def _encode_object(self, value: Any, depth: int) -> Any:
        if isinstance(value, (bytes, bytearray)):
            self.parts.append(bytes(value))
            return {"bytes": len(value)}
        if isinstance(value, torch.Tensor):
            plain = value.detach().cpu().contiguous()
            self.parts.append(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
            return {"tensor": [str(plain.dtype).removeprefix("torch."), list(plain.shape)]}
        if isinstance(value, np.ndarray) and value.dtype.hasobject is False and value.dtype.names is None:
            self.parts.append(value.tobytes())
            return {"array": [value.dtype.str, list(value.shape), bool(value.flags.writeable)]}
        if isinstance(value, np.generic):
            self.parts.append(value.tobytes())
            return {"scalar": value.dtype.str}
        if isinstance(value, PurePath):
            return {"path": str(value)}
        for name, (exact, write, _) in _TEXTS.items():  # such as cells of data set columns
            if type(value) is exact:
                return {"text": [name, write(value)]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        kind = type(value)
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            return {"object": [_class_name(kind), {name: self.tree(getattr(value, name), depth + 1) for name in names}]}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {"named": [_class_name(kind), [self.tree(item, depth + 1) for item in value]]}
        raise EncodingError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be sent to another rank: only plain values, arrays and "
            "dataclasses of them can"
        )


class _Decoder:
    def __init__(self, data: memoryview) -> None:
        self._data, self._offset = data, 0
        self._known: list[Any] = []

    def value(self, tree: Any, depth: int) -> Any:
        if type(tree) in _SCALARS:
            return tree
        if depth > 2 * _MAX_DEPTH:
            raise EncodingError("nested too deeply")
        if type(tree) is list:
            return [self.value(item, depth + 1) for item in tree]
        ((kind, what),) = tree.items()
        if kind in ("tuple", "set", "frozenset"):
            values = self.value(what, depth + 1)
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](values)
        if kind == "dict":
            return {key: self.value(item, depth + 1) for key, item in what.items()}
        if kind in ("pairs", "counter"):
            pairs = dict(self.value(pair, depth + 1) for pair in what)
            return Counter(pairs) if kind == "counter" else pairs
        if kind == "numbers":
            code, count = what
            numbers = array.array({"d": "d", "q": "q"}[code])
            numbers.frombytes(self._read_bytes(8 * count))
            return numbers.tolist()
        if kind == "again":
            return self._known[what]
        decoded = self._decode_object(kind, what, depth)
        self._known.append(decoded)
        return decoded

    def _read_bytes(self, size: int) -> memoryview:
        if not 0 <= size <= len(self._data) - self._offset:
            raise EncodingError("bytes are missing")
        self._offset += size
        return self._data[self._offset - size : self._offset]

    def _decode_object(self, kind: str, what: Any, depth: int) -> Any:
        if kind == "bytes":
            return bytes(self._read_bytes(what))
        if kind == "tensor":
            dtype, shape = _dtype(what[0]), tuple(map(int, what[1]))
            data = self._read_bytes(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.empty(0).byte()
            return tensor.view(dtype).view(shape)
        if kind == "array":
            dtype, shape = np.dtype(what[0]), tuple(map(int, what[1]))
            data = self._read_bytes(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
            decoded = np.frombuffer(bytearray(data), dtype).reshape(shape)
            decoded.flags.writeable = what[2]
            return decoded
        if kind == "scalar":
            return np.frombuffer(self._read_bytes(np.dtype(what).itemsize), np.dtype(what))[0]
        if kind == "path":
            return Path(what)
        if kind == "text":
            return _TEXTS[what[0]][2](what[1])
        if kind == "dtype":
            return _dtype(what)
        if kind == "named":
            named = _find_class(what[0])
            if not (issubclass(named, tuple) and hasattr(named, "_fields")):
                raise EncodingError(f"{what[0]} is not a NamedTuple")
            return tuple.__new__(named, [self.value(item, depth + 1) for item in what[1]])
        if kind == "object":
            cls = _find_class(what[0])
            names = {field.name for field in dataclasses.fields(cls)}
            if names != set(what[1]):
                raise EncodingError(f"not the fields of {what[0]}")
            decoded = object.__new__(cls)
            for name, item in what[1].items():
                object.__setattr__(decoded, name, self.value(item, depth + 1))
            return decoded
        raise EncodingError(f"no kind of value: {kind}")


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find_class(name: str) -> Any:
    """Return the dataclass or NamedTuple of this name. Imports no modules but those of this package."""
    module, _, path = name.partition(":")
    if module not in sys.modules and module.split(".")[0] == __name__.split(".")[0]:
        importlib.import_module(module)
    target: Any = sys.modules[module]
    for part in path.split("."):
        target = getattr(target, part)
    if not isinstance(target, type):
        raise EncodingError(f"{name} is not a class")
    return target


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise EncodingError(f"{name} is not a dtype")
    return dtype
