"""Rendezvous of ranks, the collectives that warm groups up, and checks of the launch environment."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.parallel.rendezvous import check_rendezvous, read_launch_env

RunRanks = Callable[..., list[dict[str, Any]]]


def test_initialize_warms_up_world_and_pipeline_groups(run_ranks: RunRanks) -> None:
    """NCCL creates a group at its first use, which must include all of its ranks."""
    results = run_ranks(4, "tests/parallel/ranks_rendezvous.py", "warm_up")
    for rank, result in enumerate(results):
        all_ranks, pipeline = [0, 1, 2, 3], [rank % 2, rank % 2 + 2]
        assert result["result"] == [all_ranks, pipeline, all_ranks]


def test_two_single_rank_runs_at_once(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, "tests/parallel/ranks_rendezvous.py", "alone", str(tmp_path), timeout=120.0, is_one_job=False)


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_to(**values: str) -> None:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_to


def test_read_launch_env(environment: Callable[..., None]) -> None:
    environment()
    assert (read_launch_env().rank, read_launch_env().world, read_launch_env().is_launched) == (0, 1, False)
    environment(RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1234")
    assert (read_launch_env().rank, read_launch_env().world, read_launch_env().is_launched) == (1, 2, True)


def test_check_rendezvous_refuses_bad_addresses_and_ports() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        check_rendezvous(2, "1", "127.0.0.1", port)
        with pytest.raises(ConfigError, match=f"MASTER_PORT={port} is in use"):
            check_rendezvous(2, "0", "127.0.0.1", port)
    with pytest.raises(ConfigError, match="NODE_RANK=2 must be .* from 0 to 1"):
        check_rendezvous(2, "2", "127.0.0.1", "29500")
    with pytest.raises(ConfigError, match="MASTER_ADDR=no.such.host.invalid cannot be resolved"):
        check_rendezvous(2, "1", "no.such.host.invalid", "29500")
    with pytest.raises(ConfigError, match="MASTER_PORT=x must be a free port"):
        check_rendezvous(2, "1", "127.0.0.1", "x")
