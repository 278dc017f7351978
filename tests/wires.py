"""What ranks say to each other on the CPU, held against what NCCL would ask of it.

Gloo forgives what hangs or races on a GPU: a group whose first use is an exchange of some of its ranks, sends that wait
for each other, a buffer that is touched while it is on its way. `install` takes down every transfer and every wait of a
process, and raises where a buffer is touched too early; `nccl_order.py` plays the records of all ranks.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "all_gather_single": "all_gather_single",
    "_allgather_base": "all_gather_single",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
}
"""Collectives of a process group, and what they are called in a record."""
SAME_SIZE = ("all_reduce", "broadcast", "reduce", "all_gather_single", "reduce_scatter_single")
"""Of which all ranks must give as much."""


class TouchedTooEarly(AssertionError):
    """A buffer was used between the start of its transfer and the wait for it."""


class Wires:
    """The record of one process, in its order: `{"do": "post", "op": n, ...}` and `{"do": "wait", "op": n}`."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.hosts: set[str] = set()
        """Names of the groups that are gloo's on a GPU, too."""
        self.members: dict[str, list[int]] = {}
        """Ranks of the job, by group: torch may be told other numbers for a while (`ranks.use_member_world`)."""
        self.batch: int | None = None
        self._works: dict[int, tuple[Any, int]] = {}  # the work stays: another must not have its id
        self._numbers = itertools.count()
        self._buffer_guard = BufferGuard()

    def post(self, group: Any, kind: str, tensors: list[torch.Tensor], peer: int | None = None) -> int:
        """One that is under way from now on; its number. peer: in the group, of a send or a receive."""
        number = next(self._numbers)
        if group.group_name not in self.members:
            self.members[group.group_name] = list(dist.get_process_group_ranks(group))
        members = self.members[group.group_name]
        self.events.append(
            {
                "do": "post",
                "op": number,
                "kind": kind,
                "group": group.group_name,
                "members": members,
                "host": group.group_name in self.hosts,
                "peer": None if peer is None else members[peer],
                "batch": self.batch,
                "bytes": sum(item.numel() * item.element_size() for item in tensors),
            }
        )
        return number

    def started(self, number: int, work: Any, kind: str, host: bool, tensors: list[torch.Tensor]) -> None:
        if work is None:
            self.waited(number)
            return
        self._works[id(work)] = work, number
        if kind in ("send", "receive") and not host:
            self._buffer_guard.add(number, kind, tensors)

    def wait(self, work: Any) -> None:
        result = self._works.pop(id(work), None)
        if result is not None:
            self.waited(result[1])

    def waited(self, number: int) -> None:
        self.events.append({"do": "wait", "op": number})
        self._buffer_guard.remove(number)

    def write(self, path: Path) -> None:
        path.write_text("".join(json.dumps(event) + "\n" for event in self.events))


class BufferGuard(TorchDispatchMode):
    """Sees every operation on tensors while something is under way between two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._ranges: dict[int, tuple[str, list[tuple[int, int]]]] = {}

    def add(self, number: int, kind: str, tensors: list[torch.Tensor]) -> None:
        if not self._ranges:
            self.__enter__()
        self._ranges[number] = kind, [_range(item) for item in tensors if item.numel()]

    def remove(self, number: int) -> None:
        if self._ranges.pop(number, None) is not None and not self._ranges:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "c10d" and not _is_view(func):
            for tensor, writes in _used(func, args, kwargs):
                self._check(func, tensor, writes)
        return func(*args, **kwargs)

    def _check(self, func: Any, tensor: torch.Tensor, writes: bool) -> None:
        if tensor.device.type == "meta" or not tensor.numel():
            return
        begin, end = _range(tensor)
        for kind, ranges in self._ranges.values():
            if (kind == "receive" or writes) and any(begin < last and first < end for first, last in ranges):
                does = "written" if writes else "read"
                raise TouchedTooEarly(f"{func} has {does} a buffer whose {kind} nobody has waited for")


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The first and the last byte of it, and what lies between."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether it only looks at memory in another way."""
    returned = [item.alias_info for item in func._schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


def _used(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """Its tensors, and whether it writes to each."""
    if func is torch.ops.aten.index_put_.default and args[0].dim() == 1 and len(args[1]) == 1 and args[1][0].numel():
        target, (places,) = args[0], args[1]  # some of its elements, which lie between the first and the last
        yield target[int(places.min()) : int(places.max()) + 1], True
        args = (target[:0], *args[1:])
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                yield leaf, writes


def install() -> Wires:
    """Before anything else is imported that talks to other ranks, once per process."""
    wires = Wires()
    group, work = dist.ProcessGroup, torch._C._distributed_c10d.Work
    for name, kind in COLLECTIVES.items():
        if hasattr(group, name):
            setattr(group, name, _collective(wires, getattr(group, name), kind))
    group.send = _exchange(wires, group.send, "send")
    group.recv = _exchange(wires, group.recv, "receive")
    wait = work.wait

    @functools.wraps(wait)
    def waits(self: Any, *args: Any) -> Any:
        result = wait(self, *args)
        wires.wait(self)
        return result

    work.wait = waits
    dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = _batch(wires, dist.batch_isend_irecv)
    dist.new_group = dist.distributed_c10d.new_group = _new_group(wires, dist.new_group)
    return wires


def _collective(wires: Wires, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(self: Any, *args: Any, **named: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(list(args)) if isinstance(leaf, torch.Tensor)]
        number = wires.post(self, kind, tensors if kind in SAME_SIZE else [])
        created = call(self, *args, **named)
        wires.started(number, created, kind, self.group_name in wires.hosts, tensors)
        return created

    return wrapped


def _exchange(wires: Wires, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(self: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        number = wires.post(self, kind, tensors, peer)
        created = call(self, tensors, peer, tag)
        wires.started(number, created, kind, self.group_name in wires.hosts, tensors)
        return created

    return wrapped


def _batch(wires: Wires, call: Callable[..., Any]) -> Callable[..., Any]:
    numbers = itertools.count()

    @functools.wraps(call)
    def wrapped(operations: list[Any]) -> Any:
        wires.batch = next(numbers)
        try:
            return call(operations)
        finally:
            wires.batch = None

    return wrapped


def _new_group(wires: Wires, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(*args: Any, **named: Any) -> Any:
        created = call(*args, **named)
        backend = named.get("backend", args[2] if len(args) > 2 else None)
        if isinstance(created, dist.ProcessGroup):
            wires.members[created.group_name] = list(dist.get_process_group_ranks(created))
            if backend == "gloo":
                wires.hosts.add(created.group_name)
        return created

    return wrapped
