"""Wire format between a process of a run and the processes that it starts: frames of JSON and binary blobs.

A frame is the byte lengths of its two parts, the JSON object `message`, in which `sizes` lists the sizes of the blobs,
and the blobs. An order has a `number`, which identifies its response, and one blob. Responses of workers are JSON,
after the frames {"loading": what}, any number of times, and {"ready": ...} or {"error": why}. Uses only the standard
library, because the process that starts boxes has no packages.
"""

from __future__ import annotations

import itertools
import json
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing it takes longer than starting a box
    import asyncio

MAX_BYTES = 1 << 24
"""Maximum bytes of a worker's response."""
_HEAD = struct.Struct(">II")
Frame = tuple[dict[str, Any], list[bytes]]


def encode_frame(message: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """Encode a frame. Raises TypeError, ValueError, or RecursionError for a value that JSON cannot hold."""
    text = json.dumps({**message, "sizes": [len(blob) for blob in blobs]}).encode()
    return b"".join([_HEAD.pack(len(text), sum(map(len, blobs))), text, *blobs])


class FrameDecoder:
    """Reassembles whole frames from pieces of a stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are complete now. Raises ValueError for an invalid one."""
        self._buffer += data
        frames: list[Frame] = []
        while len(self._buffer) >= _HEAD.size:
            text_size, blobs_size = _HEAD.unpack_from(self._buffer)
            end = _HEAD.size + text_size + blobs_size
            if len(self._buffer) < end:
                break
            frames.append(_decode(bytes(self._buffer[_HEAD.size : end]), text_size))
            del self._buffer[:end]
        return frames


async def read_frame(reader: asyncio.StreamReader, max_bytes: int | None = None) -> Frame:
    """Read one frame.

    Raises IncompleteReadError at the end of the stream, ValueError for an invalid frame or one of more than `max_bytes`
    bytes, of which nothing is read.
    """
    text_size, blobs_size = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if max_bytes is not None and text_size + blobs_size > max_bytes:
        raise ValueError(f"a frame of {text_size + blobs_size} bytes")
    return _decode(await reader.readexactly(text_size + blobs_size), text_size)


async def read_order(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read an order's number and content. Raises as `read_frame` does."""
    message, (content,) = await read_frame(reader)
    return message["number"], content


def iter_orders(wire: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Iterate over (number, content) of orders until the other end closes."""
    stream = wire.makefile("rb")
    while head := stream.read(_HEAD.size):
        text_size, blobs_size = _HEAD.unpack(head)
        message, (content,) = _decode(stream.read(text_size + blobs_size), text_size)
        yield message["number"], content


def _decode(body: bytes, text_size: int) -> Frame:
    try:
        message = json.loads(body[:text_size])
    except RecursionError:
        raise ValueError("a frame that is nested too deeply") from None
    sizes = message.pop("sizes", None) if isinstance(message, dict) else None
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("a frame without the sizes of its blobs")
    if text_size + sum(sizes) != len(body):
        raise ValueError("a frame whose blobs differ from its declared sizes")
    starts = itertools.accumulate(sizes, initial=text_size)
    return message, [body[start : start + size] for start, size in zip(starts, sizes, strict=False)]
