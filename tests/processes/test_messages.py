"""Frames that a process sends to a rank, and those that it does not take."""

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


def read(sent: bytes, max_bytes: int | None = None) -> Frame:
    async def run() -> Frame:
        reader = asyncio.StreamReader()
        reader.feed_data(sent)
        reader.feed_eof()
        return await read_frame(reader, max_bytes)

    return asyncio.run(run())


def test_what_is_sent_comes_out() -> None:
    assert read(encode_frame({"a": "ä"}) + b"more") == ({"a": "ä"}, [])
    assert read(encode_frame({"a": 1}, [b"x", b"", b"yz"])) == ({"a": 1}, [b"x", b"", b"yz"])
    assert read(encode_frame({}), max_bytes=13) == ({}, [])


def test_pieces_of_a_stream() -> None:
    stream = encode_frame({"a": 1}, [b"x" * 1000]) + encode_frame({"b": 2}) + encode_frame({"c": 3}, [b""])
    for size in (1, 7, len(stream)):
        decoder = FrameDecoder()
        frames = [frame for i in range(0, len(stream), size) for frame in decoder.feed(stream[i : i + size])]
        assert frames == [({"a": 1}, [b"x" * 1000]), ({"b": 2}, []), ({"c": 3}, [b""])]


@pytest.mark.parametrize(
    "body",
    [b"[]", b"{}", b'{"sizes": 1}', b'{"sizes": [-1]}', b'{"sizes": [true]}', b'{"sizes": [1]}', b"{", b"[" * 100_000],
)
def test_what_is_no_frame(body: bytes) -> None:
    with pytest.raises(ValueError):
        read(struct.pack(">II", len(body), 0) + body)
    with pytest.raises(ValueError):
        FrameDecoder().feed(struct.pack(">II", len(body), 0) + body)


def test_what_is_cut_off_or_too_long() -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        read(encode_frame({"a": 1})[:-1])
    with pytest.raises(ValueError, match="a frame of 8589934590 bytes"):
        read(b"\xff" * 8, max_bytes=1 << 24)


def test_orders_have_numbers() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(encode_frame({"number": 7}, [b"do"]) + encode_frame({"number": 8}, [b""]))
    ours.close()
    assert [(number, bytes(content)) for number, content in iter_orders(theirs)] == [(7, b"do"), (8, b"")]

    async def one() -> tuple[int, bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(encode_frame({"number": -1}, [b"x"]))
        number, content = await read_order(reader)
        return number, bytes(content)

    assert asyncio.run(one()) == (-1, b"x")
