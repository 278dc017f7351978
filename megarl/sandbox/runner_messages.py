"""Messages between a `Sandbox` and the process that starts its boxes: JSON, and bytes behind it."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

_HEAD = struct.Struct(">II")
Frame = tuple[dict[str, Any], list[bytes]]


def pack_message(said: dict[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    text = json.dumps({**said, "sizes": [len(blob) for blob in blobs]}).encode()
    return b"".join([_HEAD.pack(len(text), sum(map(len, blobs))), text, *blobs])


class Unpacker:
    """Whole messages out of what arrives in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        self._buffer += data
        found: list[Frame] = []
        while len(self._buffer) >= _HEAD.size:
            text, rest = _HEAD.unpack_from(self._buffer)
            end = _HEAD.size + text
            if len(self._buffer) < end + rest:
                break
            said = json.loads(self._buffer[_HEAD.size : end])
            blobs = []
            for size in said.pop("sizes"):
                blobs.append(bytes(self._buffer[end : end + size]))
                end += size
            del self._buffer[:end]
            found.append((said, blobs))
        return found
