"""Messages between a `Sandbox` and the process that starts its boxes: JSON followed by binary blobs."""

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
    """Reassembles whole messages from pieces of a stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        self._buffer += data
        frames: list[Frame] = []
        while len(self._buffer) >= _HEAD.size:
            json_size, blobs_size = _HEAD.unpack_from(self._buffer)
            end = _HEAD.size + json_size
            if len(self._buffer) < end + blobs_size:
                break
            message = json.loads(self._buffer[_HEAD.size : end])
            blobs = []
            for size in message.pop("sizes"):
                blobs.append(bytes(self._buffer[end : end + size]))
                end += size
            del self._buffer[:end]
            frames.append((message, blobs))
        return frames
