"""Frames between a process and a rank: encoding, decoding and refusals."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from megarl.processes.messages import (
    Frame,
    FrameDecoder,
    encode_frame,
    iter_orders,
    read_frame,
    read_order,
)

pytestmark = pytest.mark.alone


def read_one(sent: bytes, max_bytes: int | None = None) -> Frame:
    async def run() -> Frame:
        reader = asyncio.StreamReader()
        reader.feed_data(sent)
        reader.feed_eof()
        return await read_frame(reader, max_bytes)

    return asyncio.run(run())


def test_frames_round_trip() -> None:
    assert read_one(encode_frame({"a": "ä"}) + b"more") == ({"a": "ä"}, [])
    assert read_one(encode_frame({"a": 1}, [b"x", b"", b"yz"])) == ({"a": 1}, [b"x", b"", b"yz"])
    assert read_one(encode_frame({}), max_bytes=13) == ({}, [])


def test_decodes_frames_from_pieces_of_a_stream() -> None:
    stream = encode_frame({"a": 1}, [b"x" * 1000]) + encode_frame({"b": 2}) + encode_frame({"c": 3}, [b""])
    for size in (1, 7, len(stream)):
        decoder = FrameDecoder()
        frames = [frame for i in range(0, len(stream), size) for frame in decoder.feed(stream[i : i + size])]
        assert frames == [({"a": 1}, [b"x" * 1000]), ({"b": 2}, []), ({"c": 3}, [b""])]


@pytest.mark.parametrize(
    "body",
    [b"[]", b"{}", b'{"sizes": 1}', b'{"sizes": [-1]}', b'{"sizes": [true]}', b'{"sizes": [1]}', b"{", b"[" * 100_000],
)
def test_refuses_malformed_frames(body: bytes) -> None:
    with pytest.raises(ValueError):
        read_one(struct.pack(">II", len(body), 0) + body)
    with pytest.raises(ValueError):
        FrameDecoder().feed(struct.pack(">II", len(body), 0) + body)


def test_refuses_truncated_and_oversized_frames() -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        read_one(encode_frame({"a": 1})[:-1])
    with pytest.raises(ValueError, match="a frame of 8589934590 bytes"):
        read_one(b"\xff" * 8, max_bytes=1 << 24)


def test_reads_numbered_orders() -> None:
    writer_end, reader_end = socket.socketpair()
    writer_end.sendall(encode_frame({"number": 7}, [b"do"]) + encode_frame({"number": 8}, [b""]))
    writer_end.close()
    assert [(number, bytes(content)) for number, content in iter_orders(reader_end)] == [(7, b"do"), (8, b"")]

    async def read_numbered() -> tuple[int, bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(encode_frame({"number": -1}, [b"x"]))
        number, content = await read_order(reader)
        return number, bytes(content)

    assert asyncio.run(read_numbered()) == (-1, b"x")
