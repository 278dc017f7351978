"""Free ports lie outside the range of outgoing connections, and can be bound."""

import socket
from pathlib import Path

import pytest

from megarl.utils import addresses

pytestmark = pytest.mark.alone


def test_free_ports_are_outside_the_range_of_outgoing_connections() -> None:
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = addresses.free_port()
    assert 10000 <= port < first_outgoing or first_outgoing < 11000
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


def test_occupied_ports_are_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = listener.getsockname()[1]

        class Random:
            def sample(self, *_: object) -> list[int]:
                return [port]

        monkeypatch.setattr(addresses.random, "SystemRandom", Random)
        assert addresses.free_port() != port
