"""Stores in which processes find each other, kept where only those can reach them who shall.

torch's TCPStore asks nobody who he is, and listens on all addresses of a machine, whichever it is given. Whoever can
write into one can make ranks talk to him instead of each other. So on one machine ranks and engines meet in a file
that only this user can open. A store for several is bound to the address that it is reached by, and who believes what
lies in it asks for the job's secret (`secret.py`).
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.config import ConfigError
from megarl.parallel.addresses import is_public

ALLOWS = "MEGARL_PUBLIC_NETWORK"
"""Environment variable; 1 where ranks may meet at an address of the public internet, behind a firewall."""
STORE_FOLDER = "MEGARL_STORE_FOLDER"
"""Environment variable of the processes of an engine on one machine: the folder in which they keep their store."""
_WAITING = 4096
_rendezvous = importlib.import_module("torch.distributed.rendezvous")  # not the function of that name


def listener(address: str, port: int) -> socket.socket | None:
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
            made.listen(_WAITING)
            return made
        except OSError:
            made.close()
    return None


def keep(address: str, port: int, world: int | None, timeout: timedelta, wait: bool = True) -> dist.TCPStore:
    """A store that this process keeps, at this address alone where that is one of this machine; at one that stands for
    it, as behind a gateway, at all addresses."""
    made = listener(address, port)
    if made is None:
        return dist.TCPStore(address, port, world, is_master=True, timeout=timeout, wait_for_workers=wait)
    port = int(made.getsockname()[1])
    return dist.TCPStore(
        address, port, world, is_master=True, timeout=timeout, wait_for_workers=wait, master_listen_fd=made.detach()
    )


def keep_near() -> None:
    """From here on whatever meets by `tcp://ADDRESS:PORT` in this process keeps its store at that address alone; where
    STORE_FOLDER is set it has no port, but a file in that folder, which only this user may enter."""
    make: Callable[..., dist.Store] = vars(_rendezvous)["TCPStore"]

    def near(*arguments: Any, **named: Any) -> dist.Store:
        folder = os.environ.get(STORE_FOLDER, "")
        if not arguments and named.get("host_name") in ("127.0.0.1", "localhost") and folder:
            file = dist.FileStore(str(Path(folder, f"store_{named['port']}")), -1)
            file.set_timeout(named["timeout"])
            return file
        made = listener(named["host_name"], named["port"]) if named.get("is_master") and not arguments else None
        return make(*arguments, **named, **({"master_listen_fd": made.detach()} if made is not None else {}))

    vars(_rendezvous)["TCPStore"] = near


def check_private(name: str, address: str) -> None:
    """Raise ConfigError where an address, which `name` has said, cannot be resolved, or is of the public internet."""
    try:
        found = {str(place[0]) for *_, place in socket.getaddrinfo(address, None)}
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{name}={address} cannot be resolved ({getattr(error, 'strerror', None) or error}): it must be an "
            "address of the node of rank 0 that all nodes reach"
        ) from None
    public = sorted(filter(is_public, found))
    if public and os.environ.get(ALLOWS) != "1":
        raise ConfigError(
            f"{name}={address} is {public[0]}, an address of the public internet, where ranks and engines would answer "
            f"anybody: set {name} to one of the nodes' own network, or export {ALLOWS}=1 on all nodes, if a firewall "
            "keeps others out"
        )


def stay_on_this_machine() -> None:
    """Have gloo listen on the loopback. For ranks that are all on one machine."""
    if "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
