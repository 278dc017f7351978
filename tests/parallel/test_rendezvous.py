"""Where processes meet: at one address, which is not of the public internet."""

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

Run = Callable[..., list[dict[str, Any]]]


def listening(port: int) -> list[str]:
    """Addresses at which somebody on this machine listens on a port, as the kernel writes them."""
    result = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, number = line.split()[1].split(":")
            if line.split()[3] == "0A" and int(number, 16) == port:
                result.append(address)
    return result


LOOPBACK = ["0100007F"]


def test_a_store_for_this_machine_has_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = os.listdir("/proc/self/fd")
    with serve_local_store() as tells:
        assert len(os.listdir("/proc/self/fd")) == len(sockets) + 1  # the file
        monkeypatch.setenv(STORE_FILE_ENV, tells[STORE_FILE_ENV])
        first, second = open_store_connection(), open_store_connection()
        first.set("a", "b")
        assert second.get("a") == b"b"
        assert [connect_store.add("count", 2) for connect_store in (first, second)] == [2, 4]
        assert second.compare_set("c", "", b"\xff") == b"\xff" and first.compare_set("c", "", "x") == b"\xff"  # type: ignore[arg-type]
        assert first.delete_key("a") and not second.check(["a"])
        alone = connect_store(LaunchEnv(0, 1, False), timedelta(seconds=5))
        alone.set("a", "b")
        assert not second.check(["a"])
    assert len(os.listdir("/proc/self/fd")) == len(sockets)
    with pytest.raises(OSError, match="No such file|is not"):
        open_store_connection()


@needs_root
def test_another_user_cannot_open_the_store_of_this_machine() -> None:
    code = """
path = sys.argv[1].rpartition("@")[2]
for flags in (os.O_RDONLY, os.O_RDWR):
    try:
        os.open(path, flags)
        print("opened")
    except PermissionError:
        print("refused")
"""
    with serve_local_store() as tells:
        assert as_other_user(code, tells[STORE_FILE_ENV]) == "refused\n" * 2


def test_what_somebody_else_puts_into_a_store_is_refused(run_ranks: Run, tmp_path: Path) -> None:
    """Of ranks that meet at a port, which nobody has to show anything for."""
    first, second = run_ranks(2, "tests/parallel/ranks_forged_messages.py", str(tmp_path))
    assert first["prefix"], "he has not written where ranks read"
    assert first["notes"] == [True] * 3
    assert {first["last words"], second["last words"]} == {""}
    assert second["back"] == {"group": [1, 2]} and not first["harm"] and not (tmp_path / "harm").exists()


def test_a_port_that_is_taken_is_an_error_as_ever() -> None:
    with socket.socket() as selected:
        selected.bind(("127.0.0.1", 0))
        selected.listen()
        with pytest.raises(dist.DistNetworkError, match="EADDRINUSE|in use"):
            rendezvous.serve_store("127.0.0.1", selected.getsockname()[1], 1, timedelta(seconds=5))


def test_what_meets_by_an_address_keeps_its_store_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous._rendezvous, "TCPStore", dist.TCPStore)
    rendezvous.bind_store_addresses()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    result, rank, world = next(iter(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 1)))
    assert (rank, world) == (0, 1) and listening(port) == LOOPBACK
    result.set("x", "1")
    again, *_ = next(iter(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 1)))
    assert again.get("x") == b"1"  # the same store, as of several groups of one process


def test_public_addresses_are_refused_unless_they_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
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
