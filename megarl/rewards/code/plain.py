"""Values between processes that do not trust each other: plain ones alone, as JSON; no pickle, no eval.

What is read is of the very types None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict,
whatever the other side was: a subclass with an `__eq__` of its own comes out as the plain value beneath it, another
object as `Opaque`, which equals nothing. Only the standard library: these lines also run in boxes.
"""

from __future__ import annotations

from typing import Any

DEPTH = 100
"""Of containers within each other."""
_SMALL = 1 << 53  # integers that JSON's numbers hold in any language
_MAX_COLLISIONS = 64  # members of one set or keys of one dict that may share a hash: (-1, -2) and (-2, -1) do


class DecodeError(ValueError):
    """Text that no `encode` has written."""


class Opaque:
    """An object that is no plain value: whoever compares it, or asks for its truth, gets a TypeError."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"a {self.kind} is no plain value")

    def __bool__(self) -> bool:
        raise TypeError(f"a {self.kind} is no plain value")


def encode(value: Any, most: int = 1 << 20) -> Any:
    """A value as JSON has them: null, true, small integers and strings as they are, else [kind, ..]. An iterator is
    read to its end. Raises OverflowError where it has more than `most` values in all, or containers too deep."""
    room = [most]

    def items(values: Any, depth: int) -> list[Any]:
        return [one(value, depth + 1) for value in values]

    def one(value: Any, depth: int) -> Any:
        room[0] -= 1
        if room[0] < 0 or depth > DEPTH:
            raise OverflowError("too much to be sent")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if issubclass(kind, list | tuple | set | frozenset | dict) and len(value) > room[0]:
            raise OverflowError("too much to be sent")
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
        if issubclass(kind, list):
            return ["list", *items(list.__iter__(value), depth)]
        if issubclass(kind, tuple):
            return ["tuple", *items(tuple.__iter__(value), depth)]
        if issubclass(kind, set):
            return ["set", *items(set.__iter__(value), depth)]
        if issubclass(kind, frozenset):
            return ["frozenset", *items(frozenset.__iter__(value), depth)]
        if issubclass(kind, dict):
            return ["dict", *(item for pair in dict.items(value) for item in items(pair, depth))]
        if kind.__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
            return one(value.item(), depth + 1)  # its integers, which are no int
        if hasattr(kind, "__next__") and hasattr(kind, "__iter__"):
            return ["iterator", *items(value, depth)]
        return ["opaque", kind.__name__[:80]]

    return one(value, 0)


def decode(data: Any) -> Any:
    """What `encode` was given, in plain types; an iterator as an iterator of a list. The data
    may be anything that JSON has. Raises Unreadable for what is none of its."""
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
        if not all(type(one) is str for one in rest) or len(rest) != (2 if kind == "complex" else 1):
            raise DecodeError(f"no {kind}")
        if kind == "int":
            return int(rest[0], 16)
        if kind == "bytes":
            return bytes.fromhex(rest[0])
        if kind == "opaque":
            return Opaque(rest[0][:80])
        return float.fromhex(rest[0]) if kind == "float" else complex(*map(float.fromhex, rest))
    values = [_decoded(one, depth + 1) for one in rest]
    if kind == "list":
        return values
    if kind == "tuple":
        return tuple(values)
    if kind == "iterator":
        return iter(values)
    if kind in ("set", "frozenset"):
        return set(_check_hashes(values)) if kind == "set" else frozenset(_check_hashes(values))
    if kind == "dict" and len(values) % 2 == 0:
        return dict(zip(_check_hashes(values[::2]), values[1::2], strict=True))
    raise DecodeError("no kind of value")


def _check_hashes(keys: list[Any]) -> list[Any]:
    """The keys, if no table of theirs would be slow: who can choose them can make all of them share a hash."""
    found: dict[int, int] = {}
    for key in keys:
        number = hash(key)
        found[number] = found.get(number, 0) + 1
        if found[number] > _MAX_COLLISIONS:
            raise DecodeError("keys that share a hash")
    return keys
