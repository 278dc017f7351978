"""How the ranks of a job find each other: the environment's variables, and the store in which they meet.

torch's TCPStore authenticates nobody and listens on all addresses of a machine. Whoever can write to one can make ranks
talk to him. On one machine, ranks and engines therefore meet in a file that only this user can open. A store for
several machines is bound to the address that others reach it by, and its values are sealed with the job's secret
(`job_secret.py`).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.config import ConfigError
from megarl.parallel import job_secret
from megarl.processes import memory_files
from megarl.utils.addresses import is_public

PUBLIC_NETWORK_ENV = "MEGARL_PUBLIC_NETWORK"
"""Environment variable; 1 where ranks may meet at an address of the public internet, behind a firewall."""
STORE_FOLDER_ENV = "MEGARL_STORE_FOLDER"
"""Environment variable of the processes of an engine on one machine: the folder in which they keep their store."""
_LISTEN_BACKLOG = 4096
_rendezvous = importlib.import_module("torch.distributed.rendezvous")  # not the function of that name


def open_listener(address: str, port: int) -> socket.socket | None:
    """A socket that listens at this address of this machine, at a free port for 0. None where that cannot be had."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, place in found:
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(place)
            made.listen(_LISTEN_BACKLOG)
            return made
        except OSError:
            made.close()
    return None


def serve_store(address: str, port: int, world: int | None, timeout: timedelta, wait: bool = True) -> dist.TCPStore:
    """A store that this process keeps, at this address alone where that is one of this machine; at one that stands for
    it, as behind a gateway, at all addresses."""
    made = open_listener(address, port)
    if made is None:
        return dist.TCPStore(address, port, world, is_master=True, timeout=timeout, wait_for_workers=wait)
    port = int(made.getsockname()[1])
    return dist.TCPStore(
        address, port, world, is_master=True, timeout=timeout, wait_for_workers=wait, master_listen_fd=made.detach()
    )


def bind_store_addresses() -> None:
    """From here on whatever meets by `tcp://ADDRESS:PORT` in this process keeps its store at that address alone; where
    STORE_FOLDER is set it has no port, but a file in that folder, which only this user may enter."""
    make: Callable[..., dist.Store] = vars(_rendezvous)["TCPStore"]

    def near(*arguments: Any, **named: Any) -> dist.Store:
        folder = os.environ.get(STORE_FOLDER_ENV, "")
        if not arguments and named.get("host_name") in ("127.0.0.1", "localhost") and folder:
            file = dist.FileStore(str(Path(folder, f"store_{named['port']}")), -1)
            file.set_timeout(named["timeout"])
            return file
        made = open_listener(named["host_name"], named["port"]) if named.get("is_master") and not arguments else None
        return make(*arguments, **named, **({"master_listen_fd": made.detach()} if made is not None else {}))

    vars(_rendezvous)["TCPStore"] = near


def check_private(name: str, address: str) -> None:
    """Raise ConfigError where an address, which `name` has said, cannot be resolved, or is of the public internet."""
    try:
        found = {str(read_launch_env[0]) for *_, read_launch_env in socket.getaddrinfo(address, None)}
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{name}={address} cannot be resolved ({getattr(error, 'strerror', None) or error}): it must be an "
            "address of the node of rank 0 that all nodes reach"
        ) from None
    public = sorted(filter(is_public, found))
    if public and os.environ.get(PUBLIC_NETWORK_ENV) != "1":
        raise ConfigError(
            f"{name}={address} is {public[0]}, an address of the public internet, where ranks and engines would answer "
            f"anybody: set {name} to one of the nodes' own network, or export {PUBLIC_NETWORK_ENV}=1 on all nodes, if a firewall "
            "keeps others out"
        )


def use_loopback() -> None:
    """Have gloo listen on the loopback. For ranks that are all on one machine."""
    if "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


STORE_FILE_ENV = "MEGARL_STORE"
"""Environment variable with the path of the memory file (`processes/memory_files.py`) in which the ranks of a machine
meet."""


@dataclass(frozen=True)
class LaunchEnv:
    """What a launcher says of this process in the environment; without one it is the only rank."""

    rank: int
    world: int
    is_launched: bool


def read_launch_env() -> LaunchEnv:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Raises ConfigError where they make no sense."""
    launched = "RANK" in os.environ
    if not launched and "WORLD_SIZE" not in os.environ:
        return LaunchEnv(0, 1, False)
    remedy = "torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; to start without it, unset them"
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    world = _read_int("WORLD_SIZE", remedy, least=1)
    if world > 1 and STORE_FILE_ENV not in os.environ:
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"the environment has no {' and no '.join(missing)}: {remedy}")
    rank = _read_int("RANK", remedy)
    if rank >= world:
        raise ConfigError(f"the environment says RANK={rank} of WORLD_SIZE={world}: {remedy}")
    _read_int("LOCAL_RANK", remedy)
    if not 0 < _read_int("MASTER_PORT", remedy, default="29500") < 2**16:
        raise ConfigError(f"MASTER_PORT={os.environ['MASTER_PORT']} is no port: {remedy}")
    return LaunchEnv(rank, world, True)


def _read_int(name: str, remedy: str, least: int = 0, default: str = "") -> int:
    text = os.environ.get(name, default or str(least))
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ConfigError(f"the environment says {name}={text!r}, which is no number from {least}: {remedy}")
    return int(text)


def connect_store(here: LaunchEnv, timeout: timedelta) -> dist.Store:
    """Where ranks find each other. On one machine no port is needed for it, which others could connect to: one that is
    alone keeps it to itself, and those of a launcher of ours have a file in memory."""
    if here.world == 1:
        use_loopback()
        alone = dist.HashStore()
        alone.set_timeout(timeout)
        return alone
    if os.environ.get("LOCAL_WORLD_SIZE") == str(here.world):
        use_loopback()
    if STORE_FILE_ENV in os.environ:
        return _file_store(timeout)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    check_private("MASTER_ADDR", address)
    kept_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        if here.rank == 0 and not kept_by_torchrun:
            return serve_store(address, port, here.world, timeout)
        return dist.TCPStore(address, port, here.world, is_master=False, timeout=timeout)
    except dist.DistNetworkError as error:
        if here.rank == 0 and ("EADDRINUSE" in str(error) or "in use" in str(error)):
            raise _port_in_use_error(port) from None
        raise


def _file_store(timeout: timedelta) -> dist.FileStore:
    file = dist.FileStore(
        memory_files.resolve_path(os.environ[STORE_FILE_ENV]), -1
    )  # -1: it does not count who uses it
    file.set_timeout(timeout)
    return file


def open_store_connection() -> dist.Store:
    """To the store that the ranks of the job have met in, for another thread: one connection is for one at a time."""
    if STORE_FILE_ENV in os.environ:
        return _file_store(timedelta(seconds=30))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)


def check_rendezvous(nodes: int, node_rank: str, address: str, port: str) -> None:
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
                raise _port_in_use_error(int(port)) from None


def _port_in_use_error(port: int) -> ConfigError:
    return ConfigError(f"MASTER_PORT={port} is in use or not allowed here: set MASTER_PORT to one that is free")


@contextlib.contextmanager
def serve_local_store() -> Iterator[dict[str, str]]:
    """Within the block there is a store for ranks on this machine, and these variables tell them of it, and of a
    secret of theirs. A launcher keeps it, as the rank that did might be the first to end."""
    file = memory_files.create("megarl-store")
    try:
        yield {
            "MASTER_ADDR": "127.0.0.1",
            STORE_FILE_ENV: memory_files.build_path(file),
            job_secret.SECRET_ENV: job_secret.generate_secret(),
        }
    finally:
        os.close(file)
