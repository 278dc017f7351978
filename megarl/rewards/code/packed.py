"""Tests that are packed: JSON, or base64 of zlib of it, or of a pickle of it as LiveCodeBench has them. Nothing is
unpickled: of a pickle that holds one text, the text is read."""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from functools import lru_cache
from typing import Any

MOST = 1 << 28
"""Bytes that may come out, so that no small file fills the memory."""
_TEXTS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
_BESIDE = ("PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT", "STOP")


@lru_cache(maxsize=16)
def unpacked(text: str) -> Any:
    """What a text holds, not to be changed: once for the samples of a prompt. Raises ValueError for anything else."""
    start = text.lstrip()[:1]
    if start in ("[", "{", '"'):
        return _json(text)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("it is neither JSON nor base64") from None
    machine = zlib.decompressobj()
    try:
        data = machine.decompress(data, MOST)
    except zlib.error as error:
        raise ValueError(f"it is base64, but not of zlib: {error}") from None
    if machine.unconsumed_tail:
        raise ValueError(f"it has more than {MOST >> 20} MiB")
    if not machine.eof:
        raise ValueError("it is cut off")
    found = _json(pickled_text(data) if data[:1] == b"\x80" else data.decode(errors="replace"))
    return _json(found) if isinstance(found, str) else found


def pickled_text(data: bytes) -> str:
    """The text that a pickle consists of. Raises ValueError for a pickle of anything else, which could do anything."""
    found: list[str] = []
    try:
        for operation, argument, _ in pickletools.genops(data):
            if operation.name in _TEXTS:
                found.append(str(argument))
            elif operation.name not in _BESIDE:
                raise ValueError(f"it is a pickle that is more than a text ({operation.name}), which is not read")
    except (UnicodeDecodeError, IndexError) as error:
        raise ValueError(f"it is a broken pickle: {error}") from None
    if len(found) != 1:
        raise ValueError(f"it is a pickle of {len(found)} texts, not of one")
    return found[0]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
