"""What a machine is called."""

from __future__ import annotations

import socket

import pytest

from megarl.processes import node

pytestmark = pytest.mark.alone


def test_slurms_name_comes_before_the_hosts_and_a_number_tells_nodes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURMD_NODENAME", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    host = socket.gethostname()
    assert (node.get_name(), node.get_name(3)) == (host, f"{host} (number 3)")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_RANK", "1")
    assert node.get_name() == f"{host} (number 1)"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert node.get_name() == host
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert (node.get_name(), node.get_name(3)) == ("n7", "n7")
