"""Where the ranks of a job find each other: what the environment says of that, and the store that they meet in."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megarl.config import ConfigError
from megarl.parallel.stores import check_private, keep, stay_on_this_machine


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
    if world > 1:
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
    """Where ranks find each other. One that is alone needs no port that somebody else may have."""
    if here.world == 1:
        stay_on_this_machine()
        return keep("127.0.0.1", 0, 1, timeout)
    if os.environ.get("LOCAL_WORLD_SIZE") == str(here.world):
        stay_on_this_machine()
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


def further_connection() -> dist.Store:
    """To the store that the ranks of the job have met in, for another thread: one connection is for one at a time."""
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


def keep_store() -> tuple[dist.Store, dict[str, str]]:
    """A store for ranks on this machine, on a port that nobody else has, and what tells them of it.

    It lives as long as the first: a launcher keeps it, as the rank that did might be the first to end.
    """
    kept = keep("127.0.0.1", 0, None, timedelta(minutes=5), wait=False)
    tells = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return kept, tells
