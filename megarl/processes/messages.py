"""Wire format between a rank and a worker process: a length of four bytes, then the content.

An order is a number, which identifies its response, and a payload agreed on by the two sides. Responses are JSON, and
so are the initial frames: {"loading": what} any number of times, then {"ready": ...} or {"error": why}. A rank never
unpickles a response.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any

MAX_BYTES = 1 << 24
"""Maximum bytes of a response."""
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">q")


def encode_frame(said: Mapping[str, Any]) -> bytes:
    """Encode a JSON frame. Raises TypeError, ValueError, or RecursionError for a value that JSON cannot hold."""
    content = json.dumps(said).encode()
    return _LENGTH.pack(len(content)) + content


def encode_order(number: int, content: bytes) -> bytes:
    return _LENGTH.pack(_NUMBER.size + len(content)) + _NUMBER.pack(number) + content


async def read_frame(reader: asyncio.StreamReader, most: int | None = None) -> bytes:
    """Read one frame.

    Raises IncompleteReadError at the end of the stream, ValueError for a frame of more than `most` bytes.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if most is not None and length > most:
        raise ValueError(f"a frame of {length} bytes")
    return await reader.readexactly(length)


async def read_order(reader: asyncio.StreamReader) -> tuple[int, memoryview]:
    """Read an order's number and content. Raises as `read_frame` does."""
    return _split_order(await read_frame(reader))


def iter_orders(wire: socket.socket) -> Iterator[tuple[int, memoryview]]:
    """Iterate over (number, content) of orders until the other end closes."""
    stream = wire.makefile("rb")
    while header := stream.read(_LENGTH.size):
        yield _split_order(stream.read(*_LENGTH.unpack(header)))


def _split_order(content: bytes) -> tuple[int, memoryview]:
    return _NUMBER.unpack_from(content)[0], memoryview(content)[_NUMBER.size :]
