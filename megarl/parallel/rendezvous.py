"""Rendezvous of a job's ranks: environment variables of the launcher, and the torch store in which they meet.

torch's TCPStore authenticates nobody, listens on all addresses of a machine, and can make ranks connect to an attacker.
Ranks and engines on one machine therefore meet in a file that only this user can open. A store for several machines is
bound to the address at which others reach it, and its values carry a keyed hash (`job_secret.py`).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from megarl.config import ConfigError
from megarl.parallel import job_secret
from megarl.processes import memory_files
from megarl.utils.addresses import is_public

PUBLIC_NETWORK_ENV = "MEGARL_PUBLIC_NETWORK"
"""Environment variable; 1 allows ranks to meet at a public address, behind a firewall."""
STORE_FOLDER_ENV = "MEGARL_STORE_FOLDER"
"""Environment variable of a single-machine engine's processes: the folder of their file store."""
_LISTEN_BACKLOG = 4096
_rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the module, not the function of that name


def open_listener(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens at this address (port 0: any free port), or None if it cannot be opened."""
    with contextlib.suppress(OSError):
        for family, *_, socket_address in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError):
                return socket.create_server(socket_address, family=family, backlog=_LISTEN_BACKLOG)
    return None


def serve_store(address: str, port: int, world: int | None, timeout: timedelta, wait: bool = True) -> dist.TCPStore:
    """Serve a store from this process.

    It listens at `address` alone if that belongs to this machine; at all addresses if not, as behind a gateway.
    """
    options: dict[str, Any] = {}
    if listener := open_listener(address, port):
        port = int(listener.getsockname()[1])
        options["master_listen_fd"] = listener.detach()
    return dist.TCPStore(address, port, world, is_master=True, timeout=timeout, wait_for_workers=wait, **options)


def bind_store_addresses() -> None:
    """Patch torch so that stores for `tcp://ADDRESS:PORT` in this process listen at that address alone.

    If STORE_FOLDER_ENV is set, a loopback store is a file in that folder, which only this user may enter, and has no
    port.
    """
    make: Callable[..., dist.Store] = vars(_rendezvous)["TCPStore"]

    def create_store(*arguments: Any, **named: Any) -> dist.Store:
        folder = os.environ.get(STORE_FOLDER_ENV, "")
        if not arguments and named.get("host_name") in ("127.0.0.1", "localhost") and folder:
            file = dist.FileStore(str(Path(folder, f"store_{named['port']}")), -1)
            file.set_timeout(named["timeout"])
            return file
        if named.get("is_master") and not arguments and (listener := open_listener(named["host_name"], named["port"])):
            named["master_listen_fd"] = listener.detach()
        return make(*arguments, **named)

    vars(_rendezvous)["TCPStore"] = create_store


def check_private(name: str, address: str) -> None:
    """Raise ConfigError if an address, which the setting `name` gave, cannot be resolved or is public."""
    try:
        addresses = {str(socket_address[0]) for *_, socket_address in socket.getaddrinfo(address, None)}
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{name}={address} cannot be resolved ({getattr(error, 'strerror', None) or error}): it must be an "
            "address of the node of rank 0 that all nodes reach"
        ) from None
    public = sorted(filter(is_public, addresses))
    if public and os.environ.get(PUBLIC_NETWORK_ENV) != "1":
        raise ConfigError(
            f"{name}={address} is {public[0]}, an address of the public internet, where ranks and engines would accept "
            f"anybody's connections: set {name} to one of the nodes' own network, or export {PUBLIC_NETWORK_ENV}=1 on "
            f"all nodes, if a firewall protects it"
        )


def use_loopback() -> None:
    """Make gloo listen on the loopback interface. For ranks that are all on one machine."""
    if "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


STORE_FILE_ENV = "MEGARL_STORE"
"""Environment variable: path of the memory file (`processes/memory_files.py`) in which the ranks of a machine meet."""


class LaunchEnv(NamedTuple):
    """This process's rank as the launcher's environment gives it; without a launcher it is the only rank."""

    rank: int
    world: int
    is_launched: bool
    local_world: int = 0
    """Ranks of this machine; 0 if the launcher does not say."""


def read_launch_env() -> LaunchEnv:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Raises ConfigError if they are
    inconsistent."""
    launched = "RANK" in os.environ
    if not launched and "WORLD_SIZE" not in os.environ:
        return LaunchEnv(0, 1, False)
    remedy = "torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; to start without it, unset them"
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    world = _read_int("WORLD_SIZE", remedy, minimum=1)
    if world > 1 and STORE_FILE_ENV not in os.environ:
        missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"the environment has no {' and no '.join(missing)}: {remedy}")
    rank = _read_int("RANK", remedy)
    if rank >= world:
        raise ConfigError(f"the environment has RANK={rank} of WORLD_SIZE={world}: {remedy}")
    _read_int("LOCAL_RANK", remedy)
    if not 0 < _read_int("MASTER_PORT", remedy, default="29500") < 2**16:
        raise ConfigError(f"MASTER_PORT={os.environ['MASTER_PORT']} is not a port: {remedy}")
    return LaunchEnv(rank, world, True, _read_int("LOCAL_WORLD_SIZE", remedy))


def _read_int(name: str, remedy: str, minimum: int = 0, default: str = "") -> int:
    text = os.environ.get(name, default or str(minimum))
    if not (text.isascii() and text.isdigit()) or int(text) < minimum:
        raise ConfigError(f"the environment has {name}={text!r}, which is not a number from {minimum}: {remedy}")
    return int(text)


def connect_store(env: LaunchEnv, timeout: timedelta) -> dist.Store:
    """Connect to the store in which the job's ranks meet.

    On one machine no port is opened: a single rank has an in-process store, ranks of our launcher a memory file.
    """
    if env.world == 1:
        use_loopback()
        store = dist.HashStore()
        store.set_timeout(timeout)
        return store
    if os.environ.get("LOCAL_WORLD_SIZE") == str(env.world):
        use_loopback()
    if STORE_FILE_ENV in os.environ:
        return _file_store(timeout)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    check_private("MASTER_ADDR", address)
    is_served_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        if env.rank == 0 and not is_served_by_torchrun:
            return serve_store(address, port, env.world, timeout)
        return dist.TCPStore(address, port, env.world, is_master=False, timeout=timeout)
    except dist.DistNetworkError as error:
        if env.rank == 0 and ("EADDRINUSE" in str(error) or "in use" in str(error)):
            raise _port_in_use_error(port) from None
        raise


def _file_store(timeout: timedelta) -> dist.FileStore:
    file = dist.FileStore(memory_files.resolve_path(os.environ[STORE_FILE_ENV]), -1)  # -1: do not count users
    file.set_timeout(timeout)
    return file


def open_store_connection() -> dist.Store:
    """Open another connection to the job's store, for another thread: a connection serves one thread at a time."""
    if STORE_FILE_ENV in os.environ:
        return _file_store(timedelta(seconds=30))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)


def check_rendezvous(nodes: int, node_rank: str, address: str, port: str) -> None:
    """Check a user's rendezvous settings on one node. Raises ConfigError if the nodes cannot meet there.

    nodes: their number, with spares.
    """
    if not node_rank.isdecimal() or int(node_rank) >= nodes:
        raise ConfigError(f"NODE_RANK={node_rank} must be the number of this node, from 0 to {nodes - 1}")
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
    """Serve a store for ranks on this machine within the block; yields their environment variables, with a new secret.

    The launcher keeps the store, since the rank that did might be the first to exit.
    """
    file = memory_files.create("megarl-store")
    try:
        yield {
            "MASTER_ADDR": "127.0.0.1",
            STORE_FILE_ENV: memory_files.build_path(file),
            job_secret.SECRET_ENV: secrets.token_hex(32),
        }
    finally:
        os.close(file)
