"""Rendezvous stores: local ones without a port, one address otherwise, and no public network."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from other_user import as_other_user, needs_root

from megarl.config import ConfigError
from megarl.parallel import rendezvous
from megarl.parallel.rendezvous import (
    STORE_FILE_ENV,
    LaunchEnv,
    connect_store,
    open_store_connection,
    serve_local_store,
)

RunRanks = Callable[..., list[dict[str, Any]]]


def listening_addresses(port: int) -> list[str]:
    """Return the local addresses that have a listener on a port, in the kernel's notation."""
    result = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, number = line.split()[1].split(":")
            if line.split()[3] == "0A" and int(number, 16) == port:
                result.append(address)
    return result


LOOPBACK = ["0100007F"]


def test_local_store_uses_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = os.listdir("/proc/self/fd")
    with serve_local_store() as environment:
        assert len(os.listdir("/proc/self/fd")) == len(sockets) + 1  # the file
        monkeypatch.setenv(STORE_FILE_ENV, environment[STORE_FILE_ENV])
        first, second = open_store_connection(), open_store_connection()
        first.set("a", "b")
        assert second.get("a") == b"b"
        assert [connect_store.add("count", 2) for connect_store in (first, second)] == [2, 4]
        assert second.compare_set("c", "", b"\xff") == b"\xff" and first.compare_set("c", "", "x") == b"\xff"  # type: ignore[arg-type]
        assert first.delete_key("a") and not second.check(["a"])
        single_store = connect_store(LaunchEnv(0, 1, False), timedelta(seconds=5))
        single_store.set("a", "b")
        assert not second.check(["a"])
    assert len(os.listdir("/proc/self/fd")) == len(sockets)
    with pytest.raises(OSError, match="No such file|is not"):
        open_store_connection()


@needs_root
def test_another_user_cannot_open_local_store() -> None:
    code = """
path = sys.argv[1].rpartition("@")[2]
for flags in (os.O_RDONLY, os.O_RDWR):
    try:
        os.open(path, flags)
        print("opened")
    except PermissionError:
        print("refused")
"""
    with serve_local_store() as environment:
        assert as_other_user(code, environment[STORE_FILE_ENV]) == "refused\n" * 2


def test_ranks_refuse_forged_store_entries(run_ranks: RunRanks, tmp_path: Path) -> None:
    """A TCP store requires no authentication, so any local process can write to it."""
    first, second = run_ranks(2, "tests/parallel/ranks_forged_messages.py", str(tmp_path))
    assert first["prefix"], "the forged keys have another prefix than those of the ranks"
    assert first["refused_tickets"] == [True] * 3
    assert {first["root_cause"], second["root_cause"]} == {""}
    assert second["returned"] == {"group": [1, 2]} and not first["harm"] and not (tmp_path / "harm").exists()


def test_serving_store_on_used_port_raises() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(dist.DistNetworkError, match="EADDRINUSE|in use"):
            rendezvous.serve_store("127.0.0.1", listener.getsockname()[1], 1, timedelta(seconds=5))


def test_tcp_rendezvous_binds_to_its_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous._rendezvous, "TCPStore", dist.TCPStore)
    rendezvous.bind_store_addresses()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    result, rank, world = next(iter(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 1)))
    assert (rank, world) == (0, 1) and listening_addresses(port) == LOOPBACK
    result.set("x", "1")
    second_store, *_ = next(iter(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 1)))
    assert second_store.get("x") == b"1"  # one store serves several groups of a process


def test_refuses_public_addresses_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(rendezvous.PUBLIC_NETWORK_ENV, raising=False)
    for address in ("127.0.0.1", "localhost", "10.1.2.3", "192.168.1.1", "172.20.0.1", "fd00::1", "100.64.0.1"):
        rendezvous.check_private("MASTER_ADDR", address)
    for address in ("8.8.8.8", "2001:4860:4860::8888"):
        with pytest.raises(
            ConfigError, match=f"MASTER_ADDR={address} is .*public internet.*{rendezvous.PUBLIC_NETWORK_ENV}=1"
        ):
            rendezvous.check_private("MASTER_ADDR", address)
    monkeypatch.setenv(rendezvous.PUBLIC_NETWORK_ENV, "1")
    rendezvous.check_private("MASTER_ADDR", "8.8.8.8")
