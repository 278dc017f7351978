"""Where processes meet: at one address, which is not of the public internet."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megarl.config import ConfigError
from megarl.parallel import stores
from megarl.parallel.meeting import keep_store


def listening(port: int) -> list[str]:
    """Addresses at which somebody on this machine listens on a port, as the kernel writes them."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, number = line.split()[1].split(":")
            if line.split()[3] == "0A" and int(number, 16) == port:
                found.append(address)
    return found


LOOPBACK = ["0100007F"]


def test_a_store_for_this_machine_is_reached_from_this_machine_alone() -> None:
    kept, tells = keep_store()
    port = int(tells["MASTER_PORT"])
    assert listening(port) == LOOPBACK
    other = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    kept.set("a", "b")
    assert other.get("a") == b"b"


def test_a_port_that_is_taken_is_an_error_as_ever() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(dist.DistNetworkError, match="EADDRINUSE|in use"):
            stores.keep("127.0.0.1", taken.getsockname()[1], 1, timedelta(seconds=5))


def test_what_meets_by_an_address_keeps_its_store_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores._rendezvous, "TCPStore", dist.TCPStore)
    stores.keep_near()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found, rank, world = next(iter(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 1)))
    assert (rank, world) == (0, 1) and listening(port) == LOOPBACK
    found.set("x", "1")
    again, *_ = next(iter(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 1)))
    assert again.get("x") == b"1"  # the same store, as of several groups of one process


def test_public_addresses_are_refused_unless_they_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(stores.ALLOWS, raising=False)
    for address in ("127.0.0.1", "localhost", "10.1.2.3", "192.168.1.1", "172.20.0.1", "fd00::1", "100.64.0.1"):
        stores.check_private("MASTER_ADDR", address)
    for address in ("8.8.8.8", "2001:4860:4860::8888"):
        with pytest.raises(ConfigError, match=f"MASTER_ADDR={address} is .*public internet.*{stores.ALLOWS}=1"):
            stores.check_private("MASTER_ADDR", address)
    monkeypatch.setenv(stores.ALLOWS, "1")
    stores.check_private("MASTER_ADDR", "8.8.8.8")
