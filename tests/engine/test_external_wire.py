"""Connections to engines outside of a job: both ends prove that they know the secret, and nothing can be forged."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import pytest
import torch

from megarl.engine import external_wire
from megarl.engine.external_wire import Wire, WireError, parse_address
from megarl.parallel import encoding, job_secret

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


@pytest.mark.parametrize(
    "text", ["", "host", ":80", "host:", "host:0", "host:65536", "host:x", "host:-1", "10.0..5:80", "a\0b:80"]
)
def test_refuses_other_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        parse_address(text)


def test_bytes_that_drip_do_not_extend_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_wire, "CONNECT_TIMEOUT_S", 0.3)
    client_end, server_end = socket.socketpair()
    is_over = threading.Event()

    def drip() -> None:
        while not is_over.wait(0.05):
            client_end.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    start = time.monotonic()
    with pytest.raises(WireError, match="timed out"):  # 32 bytes would take 1.6 s
        Wire(server_end, is_server=True)
    assert time.monotonic() - start < 1.2
    is_over.set()
    thread.join()


def test_a_message_has_one_time_limit() -> None:
    client, server = make_pair()
    server.set_timeout(0.3)
    message = client.encode("hello")

    def drip() -> None:
        with contextlib.suppress(WireError):
            for number in range(len(message)):
                time.sleep(0.05)
                client.send_encoded(message[number : number + 1])

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(WireError, match="timed out"):
        server.receive()
    server.close()
    thread.join()


def test_a_secret_that_is_too_short_breaks_the_connection_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(job_secret.EXTERNAL_SECRET_ENV, "short")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(WireError, match="MEGARL_ENGINE_SECRET has 5 characters"):
            Wire.connect(f"127.0.0.1:{listener.getsockname()[1]}")


def test_a_value_that_cannot_be_encoded_leaves_the_connection_as_it_was() -> None:
    client, server = make_pair()
    with pytest.raises(encoding.EncodingError):
        client.send(object())
    client.send("hello")
    assert server.receive() == "hello"


def test_a_machine_that_has_vanished_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: Wire(listener.accept()[0], is_server=True))
        thread.start()
        wire = Wire.connect(f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    connection = wire._connection
    assert [connection.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [30, 10, 3, 60_000]


class PublicConnection:
    """A connection to a public address, to which its name was resolved."""

    def getpeername(self) -> tuple[str, int]:
        return "8.8.8.8", 7000

    def close(self) -> None: ...


def test_a_name_of_a_public_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *_: PublicConnection())
    with pytest.raises(WireError, match=r"node:7000 is 8\.8\.8\.8, an address of the public internet"):
        Wire.connect("node:7000")
