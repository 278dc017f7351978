"""Records the communication of ranks on the CPU, to check that it would work with NCCL.

Gloo tolerates what hangs or races on a GPU: a group whose first use is an exchange between some of its ranks, sends
that block each other, access to a buffer in flight. `install` records every transfer and wait of a process, and raises
on early access to a buffer; `nccl_order.py` simulates the records of all ranks.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "all_gather_single": "all_gather_single",
    "_allgather_base": "all_gather_single",
    "all_gather_single_coalesced": "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single_coalesced": "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
}
"""Methods of a process group, and their names in a record."""
SAME_SIZE = (
    *("all_reduce", "all_reduce_coalesced", "broadcast", "reduce"),
    *("all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
)
"""Collectives to which all ranks must pass the same number of bytes."""
SILENT = {
    *("abort", "bound_device_id", "boxed", "get_group_store", "group_desc", "group_name", "name", "rank"),
    *("set_timeout", "shutdown", "size", "unbox"),
}
"""Methods and properties of a process group that send nothing to other ranks."""
UNRECORDED = ("merge_remote_group", "recv_anysource", "split_group", "use_pg_for_symm_mem_rendezvous")
"""Methods that a record has no name for: to call them while recording is an error."""


NUM_CALLS = 4
"""Lines of code that a record has for each operation."""
_ROOT = str(Path(__file__).resolve().parents[2]) + "/"


class EarlyBufferAccess(AssertionError):
    """A buffer was used between the start of its transfer and the wait for it."""


class CommRecorder:
    """The ordered record of one process: `{"do": "post", "op": n, ...}` and `{"do": "wait", "op": n}`."""

    def __init__(self, guards_buffers: bool = True) -> None:
        self.guards_buffers = guards_buffers
        self.events: list[dict[str, Any]] = []
        self.hosts: set[str] = set()
        """Names of groups that use gloo on a GPU too."""
        self.members: dict[str, list[int]] = {}
        """Global ranks by group; torch may use other numbers for a while (`ranks.use_member_world`)."""
        self.batch: int | None = None
        self._works: dict[int, tuple[Any, int]] = {}  # keeps the work alive, so that its id is not reused
        self._numbers = itertools.count()
        self._buffer_guard = BufferGuard()

    def post(self, group: Any, kind: str, tensors: list[torch.Tensor], peer: int | None = None, **fields: Any) -> int:
        """Record the start of an operation; return its number. peer: group rank of a send or receive. fields: more of
        the event."""
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
                "bytes": sum(item.nbytes for item in tensors),
                "calls": call_sites(),
            }
            | fields
        )
        return number

    def start(self, number: int, work: Any, kind: str, host: bool, tensors: list[torch.Tensor]) -> None:
        if work is None:
            self._record_wait(number)
            return
        self._works[id(work)] = work, number
        if self.guards_buffers and kind in ("send", "receive") and not host:
            self._buffer_guard.add(number, kind, tensors)

    def wait(self, work: Any) -> None:
        result = self._works.pop(id(work), None)
        if result is not None:
            self._record_wait(result[1])

    def _record_wait(self, number: int) -> None:
        self.events.append({"do": "wait", "op": number})
        self._buffer_guard.remove(number)

    def write(self, path: Path) -> None:
        path.write_text("".join(json.dumps(event) + "\n" for event in self.events))


def call_sites(*skipped_files: str) -> str:
    """Return the lines of code outside of torch and these files that led to the current operation, the innermost
    first."""
    calls: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(calls) < NUM_CALLS:
        file = frame.f_code.co_filename
        if file != __file__ and file not in skipped_files and "/torch/" not in file and not file.startswith("<"):
            calls.append(f"{file.rpartition('site-packages/')[2].removeprefix(_ROOT)}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(calls)


class BufferGuard(TorchDispatchMode):
    """Checks every tensor operation while a send or receive is in flight."""

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
            if (kind == "receive" or writes) and any(
                begin < last_element and first < end for first, last_element in ranges
            ):
                does = "written" if writes else "read"
                raise EarlyBufferAccess(f"{func} has {does} a buffer whose {kind} nobody has waited for")


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address range of a tensor, including gaps between its elements."""
    last_element = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last_element + 1) * tensor.element_size()


@functools.cache
def _is_view(func: Any) -> bool:
    """Return whether an operation only creates a view."""
    returned = [item.alias_info for item in func._schema.returns]
    return bool(returned) and all(info is not None and not info.is_write for info in returned)


def _used(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield the tensors of an operation, and whether it writes to each."""
    if func is torch.ops.aten.index_put_.default and args[0].dim() == 1 and len(args[1]) == 1 and args[1][0].numel():
        target, (index_values,) = args[0], args[1]  # writes only between the first and the last index
        yield target[int(index_values.min()) : int(index_values.max()) + 1], True
        args = (target[:0], *args[1:])
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                yield leaf, writes


def install(guards_buffers: bool = True) -> CommRecorder:
    """Start recording. Call once per process, before importing anything that communicates.

    guards_buffers: raise on early access to a buffer.
    """
    recorder = CommRecorder(guards_buffers)
    group = dist.ProcessGroup
    for name, kind in COLLECTIVES.items():
        if hasattr(group, name):
            setattr(group, name, _collective(recorder, getattr(group, name), kind))
    for name in UNRECORDED:
        setattr(group, name, _refuse(name))
    for name, kind in {"send": "send", "recv": "receive"}.items():
        setattr(group, name, _exchange(recorder, getattr(group, name), kind))
    for work_type in (Work, FakeWork):
        work_type.wait = _wait(recorder, work_type.wait)  # type: ignore[method-assign]
    dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = _batch(recorder, dist.batch_isend_irecv)
    dist.new_group = dist.distributed_c10d.new_group = _new_group(recorder, dist.new_group)
    return recorder


def _wait(recorder: CommRecorder, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(self: Any, *args: Any) -> Any:
        result = call(self, *args)
        recorder.wait(self)
        return result

    return wrapped


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"ProcessGroup.{name} cannot be recorded")

    return refuse


def _collective(recorder: CommRecorder, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(list(args)) if isinstance(leaf, torch.Tensor)]
        fields: dict[str, Any] = _exchanged_bytes(self.size(), *args, **kwargs) if kind == "all_to_all_single" else {}
        number = recorder.post(self, kind, tensors if kind in SAME_SIZE else [], **fields)
        returned = call(self, *args, **kwargs)
        recorder.start(number, returned, kind, self.group_name in recorder.hosts, tensors)
        return returned

    return wrapped


def _exchanged_bytes(
    size: int,
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
    *_: Any,
    **__: Any,
) -> dict[str, list[int]]:
    """Return the bytes that a rank sends to and receives from each rank of the group in an all-to-all."""

    def parts(tensor: torch.Tensor, split_sizes: Sequence[int]) -> list[int]:
        if not len(split_sizes):
            return [tensor.nbytes // size] * size
        return [int(rows) * (tensor.nbytes // max(1, len(tensor))) for rows in split_sizes]  # Megatron gives tensors

    return {"sends": parts(input, input_split_sizes), "receives": parts(output, output_split_sizes)}


def _exchange(recorder: CommRecorder, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(self: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        number = recorder.post(self, kind, tensors, peer)
        returned = call(self, tensors, peer, tag)
        recorder.start(number, returned, kind, self.group_name in recorder.hosts, tensors)
        return returned

    return wrapped


def _batch(recorder: CommRecorder, call: Callable[..., Any]) -> Callable[..., Any]:
    numbers = itertools.count()

    @functools.wraps(call)
    def wrapped(operations: list[Any]) -> Any:
        recorder.batch = next(numbers)
        try:
            return call(operations)
        finally:
            recorder.batch = None

    return wrapped


def _new_group(recorder: CommRecorder, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        returned = call(*args, **kwargs)
        backend = kwargs.get("backend", args[2] if len(args) > 2 else None)
        if isinstance(returned, dist.ProcessGroup):
            recorder.members[returned.group_name] = list(dist.get_process_group_ranks(returned))
            if backend == "gloo":
                recorder.hosts.add(returned.group_name)
        return returned

    return wrapped
