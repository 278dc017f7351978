"""Connections to engines outside of a job: both ends prove that they know the secret, and nothing can be forged."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch

from megarl.engine.external_wire import Wire, WireError, parse_address
from megarl.parallel import job_secret

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(job_secret.EXTERNAL_SECRET_ENV, "a secret of this test alone")


def make_pair() -> tuple[Wire, Wire]:
    """Return a client and a server that are connected."""
    client_end, server_end = socket.socketpair()
    servers: list[Wire] = []

    def serve() -> None:
        servers.append(Wire(server_end, is_server=True))

    thread = threading.Thread(target=serve)
    thread.start()
    client = Wire(client_end, is_server=False)
    thread.join()
    return client, servers[0]


def test_values_and_data_arrive_in_both_directions() -> None:
    client, server = make_pair()
    data = torch.arange(1000, dtype=torch.int64).view(torch.uint8)
    sender = threading.Thread(target=client.send, args=({"step": 3, "shape": (2, 3)}, data))
    sender.start()
    assert server.receive() == {"step": 3, "shape": (2, 3)}
    received = torch.empty_like(data)
    server.receive_data(received)
    sender.join()
    assert torch.equal(received, data)
    server.send([torch.ones(2)])
    assert torch.equal(client.receive()[0], torch.ones(2))


def test_refuses_another_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = iter([b"a" * 32, b"b" * 32])
    monkeypatch.setattr(job_secret, "external_key", lambda: next(keys))
    client, server = make_pair()
    client.send("hello")
    with pytest.raises(WireError, match="does not know the secret.*MEGARL_ENGINE_SECRET"):
        server.receive()


@pytest.mark.parametrize("is_changed", [True, False])
def test_refuses_changed_and_repeated_messages(is_changed: bool) -> None:
    client, server = make_pair()
    message = client.encode("hello")
    client.send_encoded(message)
    assert server.receive() == "hello"
    next_message = client.encode("hello")
    client.send_encoded(next_message[:-1] + bytes([next_message[-1] ^ 1]) if is_changed else message)
    with pytest.raises(WireError, match="does not know the secret"):
        server.receive()


def test_refuses_its_own_messages() -> None:
    """An attacker who returns a message to its sender is not taken for the other end."""
    client, server = make_pair()
    message = client.encode("hello")
    server.send_encoded(message)
    with pytest.raises(WireError, match="does not know the secret"):
        client.receive()


def test_reads_little_before_the_other_end_has_proven_itself() -> None:
    client, server = make_pair()
    client.send_encoded((1 << 33).to_bytes(8, "little"))
    with pytest.raises(WireError, match="announces a message of 8589934592 bytes"):
        server.receive()


def test_the_end_of_a_connection_is_an_error() -> None:
    client, server = make_pair()
    client.close()
    client.close()
    with pytest.raises(WireError, match="hung up"):
        server.receive()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10.0.0.5:7000", ("10.0.0.5", 7000)), ("[::1]:80", ("::1", 80)), ("node-3:1", ("node-3", 1))],
)
def test_parses_addresses(text: str, expected: Any) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:0", "host:65536", "host:x", "host:-1"])
def test_refuses_other_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        parse_address(text)
