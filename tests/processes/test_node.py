"""The name of a node."""

from __future__ import annotations

import socket

import pytest

from megarl.processes import node

pytestmark = pytest.mark.alone


def test_prefers_the_slurm_name_and_numbers_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
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
