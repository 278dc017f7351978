"""Prepared namespaces, so that a box starts without delay.

They match the specs that were requested more than once recently: same command, same memory. Each is handed out once and
ends with its box. Only a few wait, and they are ended when nobody requests their spec any more.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

from megarl.sandbox.namespace import BoxNamespace, BoxSpec, NamespaceHost

MAX_IDLE, MAX_IDLE_PER_SPEC = 8, 4
"""Maximum idle namespaces, in total and per spec."""
_REMEMBERED = 16
"""Specs remembered. A policy's programs with their own commands are many, and each comes once."""
IDLE_S = 60.0
_STALE_S = 5.0
"""A spec that nobody has requested for this long gives way to another; otherwise three alternating specs would evict
each other."""
AGAIN_S = 1.0
"""Delay after a namespace died or could not be created."""


@dataclass
class _Demand:
    times: int
    last: float
    disk_limits: tuple[int, int]

    def compute_target(self) -> int:
        return min(MAX_IDLE_PER_SPEC, self.times - 1)


class WarmPool:
    """Idle namespaces of one process that starts boxes, in its event loop."""

    def __init__(self, host: NamespaceHost, max_boxes: int) -> None:
        self._host = host
        self._max_idle = min(MAX_IDLE, max_boxes) if host.spawner.is_boxed else 0
        self._idle: list[BoxNamespace] = []
        self._demand: OrderedDict[BoxSpec, _Demand] = OrderedDict()  # the latest last
        self._numbers = itertools.count(1)
        self._retry_at = 0.0

    def take(self, spec: BoxSpec, disk_mb: int, files: int) -> BoxNamespace:
        """Return an unused namespace: an idle one, or a new one. Raises OSError."""
        previous = self._demand.pop(spec, None)
        times = previous.times + 1 if previous else 1
        self._demand[spec] = _Demand(times, time.monotonic(), (disk_mb, files))
        while len(self._demand) > _REMEMBERED:
            self._forget(next(iter(self._demand)))
        for namespace in self._list_idle(spec):
            self._idle.remove(namespace)
            try:
                if namespace.is_alive():
                    namespace.resize(disk_mb, files)
                    return namespace
            except OSError:  # cannot be resized; a new one raises the reason, if there is any
                pass
            _discard(namespace)
        return self._create(spec, disk_mb, files)

    def refill(self, now: float) -> float:
        """Create a missing namespace and end those that nobody requests any more. Returns the time of the next call."""
        for spec, demand in tuple(self._demand.items()):
            if now >= demand.last + IDLE_S:
                self._forget(spec)
        wake_time = min((demand.last for demand in self._demand.values()), default=now) + IDLE_S
        missing = self._find_missing_spec(now)
        if missing is None:
            return wake_time
        if now < self._retry_at:
            return min(wake_time, self._retry_at)
        try:
            namespace = self._create(missing, *self._demand[missing].disk_limits)
        except OSError:
            self._retry_at = now + AGAIN_S
            return min(wake_time, self._retry_at)
        namespace.on_exited = partial(self._on_lost, namespace)
        self._idle.append(namespace)
        return now

    def close(self) -> None:
        """Kill all idle namespaces."""
        for namespace in self._idle:
            _discard(namespace)
        self._idle = []
        self._demand.clear()

    def _list_idle(self, spec: BoxSpec) -> list[BoxNamespace]:
        return [namespace for namespace in self._idle if namespace.spec == spec]

    def _find_missing_spec(self, now: float) -> BoxSpec | None:
        """Return the most recently requested spec that has too few idle namespaces and room for another."""
        for spec, demand in reversed(self._demand.items()):
            if len(self._list_idle(spec)) < demand.compute_target() and (
                len(self._idle) < self._max_idle or self._make_room(now)
            ):
                return spec
        return None

    def _make_room(self, now: float) -> bool:
        for spec, demand in self._demand.items():
            if now < demand.last + _STALE_S:
                return False
            if idle := self._list_idle(spec):
                self._idle.remove(idle[0])
                _discard(idle[0])
                return True
        return False

    def _forget(self, spec: BoxSpec) -> None:
        del self._demand[spec]
        for namespace in self._list_idle(spec):
            self._idle.remove(namespace)
            _discard(namespace)

    def _on_lost(self, namespace: BoxNamespace) -> None:
        """Handle a namespace that ended while idle."""
        self._idle.remove(namespace)
        namespace.remove()
        self._retry_at = time.monotonic() + AGAIN_S
        # Without an init process none can start: the next request raises the reason.
        if not namespace.init_pid and namespace.spec in self._demand:
            self._forget(namespace.spec)

    def _create(self, spec: BoxSpec, disk_mb: int, files: int) -> BoxNamespace:
        namespace = BoxNamespace(self._host, next(self._numbers), spec, disk_mb, files)
        try:
            namespace.start()
        except BaseException:
            namespace.remove()
            raise
        return namespace


def _discard(namespace: BoxNamespace) -> None:
    namespace.on_exited = namespace.remove
    namespace.kill()
