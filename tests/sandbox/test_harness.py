"""Parse results from the private channel of a sandbox."""

import math

import pytest

from megarl.sandbox.harness import encode_preamble, parse_results

pytestmark = pytest.mark.alone

NONCE = "ab" * 16


def lines(*results):
    return b"".join(f"{NONCE} {line}\n".encode() for line in results)


def test_parses_results_by_number():
    assert parse_results(lines("0 1", '2 "x"', "1 [1, {}]"), NONCE, 3) == {0: 1, 1: [1, {}], 2: "x"}


@pytest.mark.parametrize(
    "line",
    [
        b"0 1\n",
        b"ab 0 1\n",
        NONCE.upper().encode() + b" 0 1\n",
        f"{NONCE}x 0 1\n".encode(),
        *(
            lines(text)
            for text in ("3 1", "-1 1", "+0 1", "0x0 1", "٠ 1", "1" * 400 + " 1", " 0 1", "0", "0 ", "0 {", "0 1 2")
        ),
        *(lines(text) for text in ("0 " + "[" * 100_000, "0 " + "9" * 5000)),
        lines("0 1")[:-1],
        b"\xff" * 100 + b"\n",
    ],
)
def test_ignores_invalid_lines(line):
    assert parse_results(line + lines("1 true"), NONCE, 3) in ({1: True}, {})
    assert parse_results(line + b"\n" + lines("1 true"), NONCE, 3) == {1: True} or line == lines("0 1")[:-1]


def test_drops_duplicate_numbers():
    assert parse_results(lines("0 1", "1 2", "0 1"), NONCE, 2) == {1: 2}
    assert parse_results(lines("0 {", "0 1"), NONCE, 1) == {}


def test_parses_nan():
    assert math.isnan(parse_results(lines("0 NaN"), NONCE, 1)[0])


def test_refuses_sources_with_null_bytes():
    with pytest.raises(ValueError, match="zero"):
        encode_preamble(NONCE, "x = '\0'")
