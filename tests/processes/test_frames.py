"""Frames that a process sends to a rank, and those that it does not take."""

from __future__ import annotations

import asyncio
import socket

import pytest

from megarl.processes.messages import encode_frame, encode_order, iter_orders, read_frame, read_order

pytestmark = pytest.mark.alone


def read(sent: bytes, most: int | None = None) -> bytes:
    async def run() -> bytes:
        reader = asyncio.StreamReader()
        reader.feed_data(sent)
        reader.feed_eof()
        return await read_frame(reader, most)

    return asyncio.run(run())


def test_what_is_sent_comes_out() -> None:
    assert read(encode_frame({"a": "ä"}) + b"more") == b'{"a": "\\u00e4"}'
    assert read(encode_frame({}), most=2) == b"{}"


def test_what_is_cut_off_or_too_long() -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        read(encode_frame({"a": 1})[:-1])
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes"):
        read(b"\xff" * 8, most=1 << 24)


def test_orders_have_numbers() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(encode_order(7, b"do") + encode_order(8, b""))
    ours.close()
    assert [(number, bytes(content)) for number, content in iter_orders(theirs)] == [(7, b"do"), (8, b"")]

    async def one() -> tuple[int, bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(encode_order(-1, b"x"))
        number, content = await read_order(reader)
        return number, bytes(content)

    assert asyncio.run(one()) == (-1, b"x")
