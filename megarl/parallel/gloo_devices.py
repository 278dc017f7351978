"""Devices of gloo: the sockets of a process, and the threads that serve them.

By default each group has a device to itself, whose thread wakes up a hundred times a second even if nobody ever uses
the group. A rank is in dozens of groups, most of which are idle.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

NUM_DEVICES = 4
"""Devices of a process. With a single one, a large message would delay those of all other groups."""
_DEFAULT_TIMEOUT = timedelta(minutes=30)
_shared: Iterator[list[Any]] | None = None


def share_devices() -> None:
    """Patch torch so that the gloo groups of this process take turns on `NUM_DEVICES` devices. Idempotent."""
    global _shared
    if _shared is not None:
        return
    _shared = itertools.cycle([[] for _ in range(NUM_DEVICES)])
    construct = dist.ProcessGroupGloo.__init__

    def construct_shared(self: Any, store: Any, rank: int, size: int, *rest: Any, **named: Any) -> None:
        """Take torch's arguments: `timeout` by name or position, or options, which have devices already."""
        value = rest[0] if rest else named.get("timeout", named.get("options", _DEFAULT_TIMEOUT))
        options = _make_options(value) if isinstance(value, timedelta) else value
        construct(self, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = construct_shared  # type: ignore[method-assign]


def _make_options(timeout: timedelta) -> Any:
    assert _shared is not None
    devices = next(_shared)
    if not devices:
        devices.extend(_create_devices())
    group_class: Any = dist.ProcessGroupGloo  # whose stubs lack _Options
    options = group_class._Options()
    options._devices, options._timeout, options._threads = devices, timeout, 2 * len(devices)
    return options


def _create_devices() -> list[Any]:
    """Return new devices like those that torch creates for a group: one for each interface in GLOO_SOCKET_IFNAME."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not interfaces:
        return [dist.ProcessGroupGloo.create_default_device()]
    return [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces]
