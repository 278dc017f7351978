"""LiveCodeBench's packed tests, read without unpickling."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

import pytest

from megarl.rewards.code import problems
from megarl.rewards.code.problems import read_pickled_text, unpack_tests

pytestmark = pytest.mark.alone

TESTS = [{"input": "1\n", "output": "é\ud800" * 100, "testtype": "stdin"}]


def pack(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("length", [1, 300, 70_000])
def test_reads_pickled_text(protocol: int, length: int) -> None:
    tests = [{"input": "x" * length}]
    assert unpack_tests(pack(pickle.dumps(json.dumps(tests), protocol))) == tests


def test_reads_json_and_compressed_json() -> None:
    text = json.dumps(TESTS)
    for item in (text, json.dumps(text), pack(text.encode()), pack(json.dumps(text).encode())):
        assert unpack_tests(item) == (TESTS if item != json.dumps(text) else text)


class EvalOnUnpickling:
    def __reduce__(self) -> Any:
        return eval, ("1/0",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (EvalOnUnpickling(), "a pickle of more than text (STACK_GLOBAL), which is not supported"),
        (["x"], "more than text"),
        (b"x", "more than text"),
        (3, "more than text"),
    ],
)
def test_refuses_pickles_of_other_types(value: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        unpack_tests(pack(pickle.dumps(value)))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is truncated"),
        ("[1", "it is not JSON"),
        ("hello!", "it is neither JSON nor base64"),
        ("aGVsbG8=", "it is base64, but not of zlib"),
        (pack(b"[1]")[:-8], "it is"),
        (pack(b"hello"), "it is not JSON"),
        (pack(b"\x80\x04"), ""),
        (pack(pickle.dumps("[1")), "it is not JSON"),
        (pack(("[" * 200_000).encode()), "it is not JSON"),
    ],
)
def test_refuses_malformed_data(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        unpack_tests(text)
    assert message in str(error.value)


def test_limits_the_decompressed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "MAX_BYTES", 1 << 16)
    with pytest.raises(ValueError, match="it has more than 0 MiB"):
        unpack_tests(pack(b"[" + b" " * (1 << 20) + b"]"))
    with pytest.raises(ValueError, match="a pickle of 0 strings"):
        read_pickled_text(b"\x80\x04.")
