"""Exchange plain values between processes that do not trust each other, as JSON. No pickle, no eval.

An instance of a subclass with its own `__eq__` arrives as the plain value beneath it, and any object that is not a
plain value as `Opaque`, which equals nothing. Uses only the standard library, because this module also runs in boxes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

DEPTH = 100
"""Maximum nesting depth of containers."""
_SEQUENCES = (list, tuple, set, frozenset)
_CONTAINERS: dict[str, Any] = {base.__name__: base for base in _SEQUENCES} | {"iterator": iter}
_SMALL = 1 << 53  # JSON numbers hold smaller integers exactly in any language
_MAX_COLLISIONS = 64  # maximum members of a set or keys of a dict with the same hash, as (-1, -2) and (-2, -1) have


class DecodeError(ValueError):
    """The data was not written by `encode`."""


class Opaque:
    """An object that is not a plain value. Comparing it or testing its truth raises TypeError."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def _refuse(self, other: object = None) -> bool:
        raise TypeError(f"a {self.kind} is not a plain value")

    __eq__ = __bool__ = _refuse


def encode(value: Any, max_values: int = 1 << 20) -> Any:
    """Return a value as JSON data: null, booleans, small integers, and strings unchanged, anything else as [kind, ..].

    Exhausts an iterator. Raises OverflowError for more than `max_values` values, or too deeply nested containers.
    """
    remaining = [max_values]

    def encode_items(values: Any, depth: int) -> list[Any]:
        return [encode_value(value, depth + 1) for value in values]

    def encode_value(value: Any, depth: int) -> Any:
        remaining[0] -= 1
        if remaining[0] < 0 or depth > DEPTH:
            raise OverflowError("too large to send")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if issubclass(kind, list | tuple | set | frozenset | dict) and len(value) > remaining[0]:
            raise OverflowError("too large to send")
        if issubclass(kind, int):
            number = int.__index__(value)
            return number if -_SMALL < number < _SMALL else ["int", hex(number)]
        if issubclass(kind, float):
            return ["float", float.hex(float.__float__(value))]
        if issubclass(kind, str):
            return str.__str__(value)
        if issubclass(kind, bytes | bytearray):
            return ["bytes", bytes(value).hex()]
        if issubclass(kind, complex):
            return ["complex", float.hex(value.real), float.hex(value.imag)]
        for base in _SEQUENCES:
            if issubclass(kind, base):
                return [base.__name__, *encode_items(base.__iter__(value), depth)]
        if issubclass(kind, dict):
            return ["dict", *(item for pair in dict.items(value) for item in encode_items(pair, depth))]
        if kind.__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
            return encode_value(value.item(), depth + 1)  # its integers are not instances of int
        if hasattr(kind, "__next__") and hasattr(kind, "__iter__"):
            return ["iterator", *encode_items(value, depth)]
        return ["opaque", kind.__name__[:80]]

    return encode_value(value, 0)


def decode(data: Any) -> Any:
    """Return the value that was encoded, in plain types; an iterator becomes an iterator of a list.

    Accepts arbitrary JSON data. Raises DecodeError for data that `encode` does not write.
    """
    try:
        return _decoded(data, 0)
    except (TypeError, ValueError, OverflowError) as error:
        raise DecodeError(str(error)) from None


def _decoded(data: Any, depth: int) -> Any:
    if data is None or type(data) in (bool, str):
        return data
    if type(data) is int:
        if not -_SMALL < data < _SMALL:
            raise DecodeError("a large integer in digits")
        return data
    if type(data) is not list or not data or type(data[0]) is not str or depth > DEPTH:
        raise DecodeError("no value")
    kind, rest = data[0], data[1:]
    if kind in ("int", "float", "complex", "bytes", "opaque"):
        if not all(type(item) is str for item in rest) or len(rest) != (2 if kind == "complex" else 1):
            raise DecodeError(f"no {kind}")
        if kind == "int":
            return int(rest[0], 16)
        if kind == "bytes":
            return bytes.fromhex(rest[0])
        if kind == "opaque":
            return Opaque(rest[0][:80])
        return float.fromhex(rest[0]) if kind == "float" else complex(*map(float.fromhex, rest))
    values = [_decoded(item, depth + 1) for item in rest]
    keys = values if kind in ("set", "frozenset") else values[::2] if kind == "dict" else []
    if max(Counter(map(hash, keys)).values(), default=0) > _MAX_COLLISIONS:
        raise DecodeError("keys that share a hash")  # crafted keys would make the hash table slow
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](values)
    if kind == "dict" and len(values) % 2 == 0:
        return dict(zip(keys, values[1::2], strict=True))
    raise DecodeError("no kind of value")
