"""Where the ranks of a job find each other: what the environment says of that, and the store that they meet in."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megarl.config import ConfigError
from megarl.parallel import secret
from megarl.parallel.stores import check_private, keep, stay_on_this_machine
from megarl.processes import memory_files

FILE = "MEGARL_STORE"
"""Environment variable with the path of the memory file (`processes/memory_files.py`) in which the ranks of a machine
meet."""


@dataclass(frozen=True)
class Place:
    """What a launcher says of this process in the environment; without one it is the only rank."""

    rank: int
    world: int
    launched: bool


def place() -> Place:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Raises ConfigError where they make no sense."""
    launched = "RANK" in os.environ
    if not launched and "WORLD_SIZE" not in os.environ:
        return Place(0, 1, False)
    remedy = "torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; to start without it, unset them"
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    world = _number("WORLD_SIZE", remedy, least=1)
    if world > 1 and FILE not in os.environ:
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"the environment has no {' and no '.join(missing)}: {remedy}")
    rank = _number("RANK", remedy)
    if rank >= world:
        raise ConfigError(f"the environment says RANK={rank} of WORLD_SIZE={world}: {remedy}")
    _number("LOCAL_RANK", remedy)
    if not 0 < _number("MASTER_PORT", remedy, default="29500") < 2**16:
        raise ConfigError(f"MASTER_PORT={os.environ['MASTER_PORT']} is no port: {remedy}")
    return Place(rank, world, True)


def _number(name: str, remedy: str, least: int = 0, default: str = "") -> int:
    text = os.environ.get(name, default or str(least))
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ConfigError(f"the environment says {name}={text!r}, which is no number from {least}: {remedy}")
    return int(text)


def store(here: Place, timeout: timedelta) -> dist.Store:
    """Where ranks find each other. On one machine no port is needed for it, which others could connect to: one that is
    alone keeps it to itself, and those of a launcher of ours have a file in memory."""
    if here.world == 1:
        stay_on_this_machine()
        alone = dist.HashStore()
        alone.set_timeout(timeout)
        return alone
    if os.environ.get("LOCAL_WORLD_SIZE") == str(here.world):
        stay_on_this_machine()
    if FILE in os.environ:
        return _file_store(timeout)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    check_private("MASTER_ADDR", address)
    kept_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        if here.rank == 0 and not kept_by_torchrun:
            return keep(address, port, here.world, timeout)
        return dist.TCPStore(address, port, here.world, is_master=False, timeout=timeout)
    except dist.DistNetworkError as error:
        if here.rank == 0 and ("EADDRINUSE" in str(error) or "in use" in str(error)):
            raise _port_in_use(port) from None
        raise


def _file_store(timeout: timedelta) -> dist.FileStore:
    file = dist.FileStore(memory_files.place(os.environ[FILE]), -1)  # -1: it does not count who uses it
    file.set_timeout(timeout)
    return file


def further_connection() -> dist.Store:
    """To the store that the ranks of the job have met in, for another thread: one connection is for one at a time."""
    if FILE in os.environ:
        return _file_store(timedelta(seconds=30))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)


def check_meeting(nodes: int, node_rank: str, address: str, port: str) -> None:
    """What a user says of where the nodes shall meet, on one of them. Raises ConfigError where they cannot."""
    if not node_rank.isdecimal() or int(node_rank) >= nodes:
        raise ConfigError(f"NODE_RANK={node_rank} must be the number of this node, from 0 to NNODES - 1 = {nodes - 1}")
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"MASTER_PORT={port} must be a free port of node 0, from 1 to 65535")
    check_private("MASTER_ADDR", address)
    if int(node_rank) == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does
            try:
                probe.bind(("", int(port)))
            except OSError:
                raise _port_in_use(int(port)) from None


def _port_in_use(port: int) -> ConfigError:
    return ConfigError(f"MASTER_PORT={port} is in use or not allowed here: set MASTER_PORT to one that is free")


@contextlib.contextmanager
def keep_store() -> Iterator[dict[str, str]]:
    """Within the block there is a store for ranks on this machine, and these variables tell them of it, and of a
    secret of theirs. A launcher keeps it, as the rank that did might be the first to end."""
    file = memory_files.create("megarl-store")
    try:
        yield {"MASTER_ADDR": "127.0.0.1", FILE: memory_files.path(file), secret.VARIABLE: secret.new()}
    finally:
        os.close(file)
