"""What goes over the wire between a rank and a process: four bytes of length and as many of content.

An order is a number, by which its answer is found, and whatever the two sides have agreed on. Answers are JSON, as are
the frames that come first: {"loading": what} any number of times, then {"ready": ...} or {"error": why}. A rank does
not unpickle what it is answered.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any

MAX_BYTES = 1 << 24
"""Bytes of an answer."""
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">q")


def encode_frame(said: Mapping[str, Any]) -> bytes:
    """Raises TypeError, ValueError or RecursionError for what JSON cannot hold."""
    content = json.dumps(said).encode()
    return _LENGTH.pack(len(content)) + content


def encode_order(number: int, content: bytes) -> bytes:
    return _LENGTH.pack(_NUMBER.size + len(content)) + _NUMBER.pack(number) + content


async def read_frame(reader: asyncio.StreamReader, most: int | None = None) -> bytes:
    """Raises IncompleteReadError where there is no whole one any more, ValueError for one of more than `most` bytes."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if most is not None and length > most:
        raise ValueError(f"a frame of {length} bytes")
    return await reader.readexactly(length)


async def read_order(reader: asyncio.StreamReader) -> tuple[int, memoryview]:
    """Number and content; errors as of `read_frame`."""
    return _split_order(await read_frame(reader))


def iter_orders(wire: socket.socket) -> Iterator[tuple[int, memoryview]]:
    """Number and content of each, until the other end is closed."""
    stream = wire.makefile("rb")
    while header := stream.read(_LENGTH.size):
        yield _split_order(stream.read(*_LENGTH.unpack(header)))


def _split_order(content: bytes) -> tuple[int, memoryview]:
    return _NUMBER.unpack_from(content)[0], memoryview(content)[_NUMBER.size :]
