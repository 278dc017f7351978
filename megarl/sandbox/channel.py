"""The private channel of a harness: the encoding of its input, and the validation of its output."""

from __future__ import annotations

import hmac
import json
import secrets
from pathlib import Path
from typing import Any

_ISOLATED_PYTHON = ["python3", "-I", "-S", "-c"]
HARNESS_COMMAND = [*_ISOLATED_PYTHON, Path(__file__).with_name("inside_harness.py").read_text(encoding="utf-8")]
SESSION_COMMAND = [*_ISOLATED_PYTHON, Path(__file__).with_name("inside_session.py").read_text(encoding="utf-8")]
_DIGITS = 9


def new_nonce() -> str:
    return secrets.token_hex(16)


def encode_preamble(nonce: str, source: str) -> bytes:
    """Encode what a harness reads first.

    Raises ValueError for source with a zero character, which Python does not accept.
    """
    if "\0" in source:
        raise ValueError("a harness cannot have a zero character in it")
    return f"{nonce}\n{source}\0".encode()


def parse_results(data: bytes, nonce: str, count: int) -> dict[int, Any]:
    """Return the values of lines `nonce number value` whose number is below `count` and occurs once."""
    results: dict[int, Any] = {}
    rejected: set[int] = set()
    lines = data.split(b"\n")
    for line in lines[:-1]:  # after the last newline there is nothing or an incomplete line
        head, _, rest = line.partition(b" ")
        digits, _, text = rest.partition(b" ")
        if not hmac.compare_digest(head, nonce.encode()) or len(digits) > _DIGITS or not digits.isdigit():
            continue
        number = int(digits)
        if number >= count:
            continue
        if number in results:
            rejected.add(number)
            continue
        try:
            results[number] = json.loads(text)
        except (ValueError, RecursionError):
            rejected.add(number)
    return {number: value for number, value in results.items() if number not in rejected}
