"""Encode values in the sandbox and decode them here: plain values survive, others become opaque."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, namedtuple
from enum import IntEnum
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.code.grading import is_correct
from megarl.rewards.code.plain import DEPTH, DecodeError, Opaque, decode, encode
from megarl.rewards.code.problems import CallTest

pytestmark = pytest.mark.alone

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
    ),
    max_leaves=12,
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(
        [
            "int",
            "float",
            "complex",
            "list",
            "tuple",
            "set",
            "dict",
            "iterator",
            "opaque",
            "bytes",
            "frozenset",
            "0x1",
            "nan",
        ]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def round_trip(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


@given(VALUES)
def test_plain_values_round_trip(value: Any) -> None:
    result = round_trip(value)
    assert result == value and type(result) is type(value)


@given(JSON)
def test_decoding_gives_plain_values_or_an_error(data: Any) -> None:
    try:
        result = decode(data)
    except DecodeError:
        return
    plain_types = (type(None), bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, Opaque)
    assert type(result) in plain_types or type(result) is type(iter([]))


class EqualToAll:
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class SlyInt(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __index__(self) -> int:
        return 17

    __hash__ = int.__hash__


class SlyStr(str):
    def __str__(self) -> str:
        return "right"

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


class SlyList(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([17])


Color = IntEnum("Color", {"RED": 3})
Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (SlyInt(4), 4),
        (SlyStr("wrong"), "wrong"),
        (SlyList([1, 2]), [1, 2]),
        (Color.RED, 3),
        (Point(1, 2), (1, 2)),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (np.float64(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(True), True),
        (bytearray(b"ab"), b"ab"),
        ("\ud800", "\ud800"),
        (-0.0, -0.0),
    ],
)
def test_subclasses_become_their_base_type(value: Any, expected: Any) -> None:
    result = round_trip(value)
    assert repr(result) == repr(expected) and type(result) is type(expected)


@pytest.mark.parametrize(
    "value", [EqualToAll(), [EqualToAll()], {"a": EqualToAll()}, (1, EqualToAll()), object, len, np.zeros(2)], ids=type
)
def test_opaque_objects_equal_nothing(value: Any) -> None:
    call = CallTest(value)
    assert not is_correct(call, round_trip(value)) and not is_correct(CallTest(1), round_trip(value))


def test_large_integers_round_trip() -> None:
    assert round_trip(10**5000) == 10**5000 and round_trip(-(1 << 53)) == -(1 << 53)


def test_opaque_objects_cannot_be_compared() -> None:
    for operation in (bool, lambda item: item == 1, lambda item: item != 1, lambda item: item in [1], hash):
        with pytest.raises(TypeError):
            operation(round_trip(EqualToAll()))


def test_iterators_become_their_items() -> None:
    assert list(round_trip(iter([1, 2]))) == [1, 2]
    assert list(round_trip(map(str, [1, 2]))) == ["1", "2"]
    assert list(round_trip(item for item in "ab")) == ["a", "b"]
    assert round_trip(iter([1])) != [1]


def test_nan_and_infinity_round_trip() -> None:
    assert math.isnan(round_trip(float("nan"))) and round_trip(float("-inf")) == -math.inf
    assert math.isnan(round_trip(complex("nan")).real)


def test_limits_depth_and_number_of_values() -> None:
    nested: Any = []
    for _ in range(DEPTH + 1):
        nested = [nested]
    endless = iter(int, 1)
    for value in (nested, endless, [0] * 1001):
        with pytest.raises(OverflowError):
            encode(value, max_values=1000)
    data: Any = ["list"]
    for _ in range(DEPTH + 1):
        data = ["list", data]
    with pytest.raises(DecodeError):
        decode(data)


def test_refuses_keys_that_share_a_hash() -> None:
    keys = list(product((-1, -2), repeat=7))
    assert len(set(map(hash, keys))) == 1
    for value in (set(keys), frozenset(keys), dict.fromkeys(keys)):
        with pytest.raises(DecodeError, match="share a hash"):
            round_trip(value)
    assert round_trip(set(keys[:50])) == set(keys[:50])


@pytest.mark.parametrize(
    "data",
    [
        1 << 53,
        1.5,
        [],
        {},
        ["int", "12x"],
        ["int", 12],
        ["int"],
        ["float", "1_0x"],
        ["float", "0x1p99999"],
        ["complex", "0x1p0"],
        ["bytes", "0"],
        ["dict", 1],
        ["dict", ["list"], 1],
        ["set", ["dict"]],
        ["set", ["opaque", "x"]],
        ["tuple", {}],
        ["__import__", "os"],
        [["list"]],
        [1, 2],
    ],
)
def test_refuses_malformed_data(data: Any) -> None:
    with pytest.raises(DecodeError):
        decode(data)
