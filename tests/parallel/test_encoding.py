"""Encoding of values between ranks: exact round trips, and decoding calls nothing."""

from __future__ import annotations

import os
import pickle
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import IntEnum, StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megarl.parallel import encoding
from megarl.parallel.encoding import EncodingError, decode, encode
from megarl.types import Prompt, Rollout, Turn


@dataclass(frozen=True)
class Point:
    x: int
    y: Any = None
    num_calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        CALLED.append("__post_init__")


class Pair(NamedTuple):
    a: Any
    b: Any


class Colour(StrEnum):
    RED = "red"


class Number(IntEnum):
    TWO = 2


CALLED: list[str] = []
ROUND_TRIP_VALUES = [
    *(None, True, 0, -1, 2**70, 1.5, float("inf"), "", "a\u20ac\ud800\0", b"", b"\x00\xff", bytearray(b"x")),
    *([], (), {}, set(), frozenset({1}), [1, [2, (3,)]], (1, None), {"a": 1}, {1: "a", (2, 3): [4], None: 5}),
    *(list(range(100)), [0.5] * 40, [2**70] * 40, [True] * 40, [1, 2.0] * 40, {"again": [0], "tuple": 1}),
    *(Pair(1, [2]), Point(1, {"a": (2,)}), [Point(1), Pair(Point(2), 3)], Colour.RED, [Colour.RED, "red"], Number.TWO),
    *(
        Counter({"a": 2, (1,): 3}),
        Path("/a/b"),
        Decimal("1.50"),
        date(2026, 1, 2),
        datetime(2026, 1, 2, 3, 4, 5, 6, UTC),
        time(1, 2),
    ),
    *(torch.float32, np.float32(1.5), np.int64(3), np.bool_(True)),
]


@pytest.mark.parametrize("value", ROUND_TRIP_VALUES, ids=repr)
def test_round_trip_preserves_value_and_type(value: Any) -> None:
    result = decode(encode(value))
    assert result == value
    if not isinstance(value, (bytearray, Colour, Number)):
        assert type(result) is type(value)


def test_other_mappings_decode_as_dict() -> None:
    assert decode(encode([OrderedDict(a=1), MappingProxyType({2: 3})])) == [{"a": 1}, {2: 3}]


def test_round_trip_preserves_nan() -> None:
    assert np.isnan(decode(encode(float("nan")))) and np.isnan(decode(encode([float("nan")] * 50))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 2)])
def test_round_trip_of_tensors_and_arrays(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 5).to(dtype)
    result = decode(encode([tensor, tensor.mT if tensor.dim() > 1 else tensor]))
    assert result[0].dtype == dtype and result[0].shape == shape and torch.equal(result[0], tensor)
    assert torch.equal(result[1], tensor.mT if tensor.dim() > 1 else tensor)
    result[0].zero_()  # can be written to
    if dtype is not torch.bfloat16:
        array = tensor.numpy().copy()
        array.flags.writeable = False
        decoded_again = decode(encode({"a": array}))["a"]
        assert (
            decoded_again.dtype == array.dtype
            and np.array_equal(decoded_again, array)
            and not decoded_again.flags.writeable
        )


def test_round_trip_of_one_element_of_any_stride() -> None:
    for tensor in (torch.tensor(7).expand(1), torch.arange(8, dtype=torch.int32)[::4][:1], torch.zeros(3, 0).t()):
        result = decode(encode(tensor))
        assert torch.equal(result, tensor) and result.dtype == tensor.dtype
    array = np.broadcast_to(np.int32(7), (1, 1))
    assert np.array_equal(decode(encode(array)), array)


def test_shared_objects_are_sent_once_and_stay_shared() -> None:
    ids = np.arange(100_000, dtype=np.int32)
    point = Point(1, ids)
    content = encode([point, point, ids, Point(2, ids)])
    assert len(content) < 2 * ids.nbytes
    first, second, third, fourth = decode(content)
    assert first is second and first.y is third and fourth.y is third


def test_round_trip_of_rollouts() -> None:
    prompt = Prompt("p", ({"role": "user", "content": "x"},), np.arange(5), extra={"a": [1, None, {"b": 0.5}]})
    answer = Turn(np.arange(3), np.array([-0.5, -1.0, 0.0]), is_action=True, weight_version=2, reward=0.5)
    rollout = Rollout(prompt, (Turn(prompt.token_ids), answer), "length", reward_parts={"a": 1.0})
    result = decode(encode([rollout, rollout]))
    assert result == [rollout, rollout] and result[0].turns[0].token_ids is result[0].prompt.token_ids


def test_decode_does_not_call_post_init() -> None:
    content = encode(Point(1))
    CALLED.clear()
    assert decode(content).x == 1 and CALLED == []


@pytest.mark.parametrize(
    ("value", "kind"),
    [(object(), "builtins.object"), (os.system, "builtin"), (ValueError("x"), "builtins.ValueError"), ({"a": len}, "")],
)
def test_encode_refuses_other_types_by_name(value: Any, kind: str) -> None:
    with pytest.raises(EncodingError, match=f"a {kind}.* cannot be sent to another rank: only plain values"):
        encode(value)


def test_encode_refuses_deep_nesting() -> None:
    nested: Any = []
    for _ in range(1000):
        nested = [nested]
    with pytest.raises(EncodingError, match="nested too deeply"):
        encode(nested)


class PickledCall:
    """Pickles as a call of any function, as an attacker may write it."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def pickle_call(function: Any, *arguments: Any) -> bytes:
    return pickle.dumps([PickledCall(function, *arguments)], protocol=5)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\0" * 7, b"\xff" * 40, encode("a")[:-1], encode(np.arange(9))[:-20], pickle.dumps(Point(1))),
        *(
            pickle_call(os.mkdir, "harm"),
            pickle_call(eval, "1"),
            pickle_call(getattr, 1, "real"),
            pickle_call(Point, 1),
            pickle_call(list, "a"),
        ),
        *(
            pickle_call(encoding._object, "os:system", {}),
            pickle_call(encoding._object, "subprocess:Popen", {"args": "x"}),
        ),
        *(
            pickle_call(encoding._object, "no_such_module:X", {}),
            pickle_call(encoding._object, f"{__name__}:Point", {"x": 1}),
        ),
        *(
            pickle_call(encoding._object, f"{__name__}:CALLED", {}),
            pickle_call(encoding._named_tuple, "builtins:tuple", (1,)),
        ),
        *(
            pickle_call(encoding._tensor, "load", (1,), bytearray(1)),
            pickle_call(encoding._tensor, "float32", (9,), bytearray(4)),
        ),
        *(pickle_call(encoding._array, "|O", (1,), bytes(8)), pickle_call(encoding._array, "<i8", (2,), bytes(8))),
        *(
            pickle_call(encoding._dtype, "load"),
            pickle_call(encoding._find_class, "os:system"),
            pickle.dumps(os.system),
        ),
    ],
    ids=lambda content: repr(content[8:60]),
)
def test_decode_refuses_foreign_bytes_without_calls(content: bytes) -> None:
    CALLED.clear()
    with pytest.raises(EncodingError):
        decode(content)
    assert CALLED == [] and not os.path.exists("harm")
