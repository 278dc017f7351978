"""Values that the host reads of device tensors in a rehearsal, whose tensors have no bytes.

Small integer tensors that the host has sent to the device, such as offsets of sequences, and what is computed from
them alone, keep their values. Of other tensors every number that the host reads is 0, nothing is true of `any` element,
and every other flag is True: gradients are finite and no error is set. Operations whose result has a size that depends
on values return the size of balanced routing, see `megatron_values.py`, or that of flags that are all True.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.fx.experimental._config as fx_config
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from megarl.rehearse.peak_memory import PeakMemory
from megarl.rehearse.result_cache import ResultCache

_ATEN = torch.ops.aten
_C10D = torch.ops.c10d
_SMALL = 1 << 20
"""Elements of a host tensor that is filled as in a real step. Larger ones are of weights and optimizer states, which
nobody reads; untouched, they cost no memory."""
_MAP_NORESERVE = 0x4000
"""Linux's flag for memory that need not be there until it is touched; Python's `mmap` lacks it."""
_MAX_KNOWN = 1 << 12
"""Elements of a device tensor whose values are remembered."""
_VALUES = "_rehearsed_values"
"""Attribute of a device tensor whose values are known: the same tensor on the host."""
_IS_ANY = "_megarl_is_any"
"""Attribute of the result of `tensor.any()`."""


class HostReads(PeakMemory):
    """Counts memory on `meta` and answers reads of it, within the block."""

    def __init__(self, records: bool = False) -> None:
        """records: see `PeakMemory`."""
        super().__init__("meta", records=records)
        self._cache = ResultCache()
        fx_config.meta_nonzero_assume_all_nonzero = True

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        values = _compute_values(func, args, kwargs)
        answer = _ANSWERS.get(func)
        if answer is not None and (result := answer(self, values, args, kwargs)) is not None:
            return result
        if values is not None and func in _SIZED_BY_VALUES:
            result = torch.empty_like(values, device="meta")
        else:
            result = self._cache.call(func, args, kwargs)
        if isinstance(values, torch.Tensor) and result.is_meta and _can_remember(values):
            setattr(result, _VALUES, values)
        elif values is not None and isinstance(result, tuple | list):
            for item, value in zip(result, values, strict=True):
                if _can_remember(value):
                    setattr(item, _VALUES, value)
        return result


def set_expert_rows(rows: int) -> None:
    """Set the length of the result of the next `masked_select`s, which are by routing maps of [experts, tokens]."""
    global _expert_rows
    _expert_rows = rows


_expert_rows = 0


def tokens_per_expert(tokens: int, topk: int, experts: int, multiple: int = 1, ranks: int = 1) -> torch.Tensor:
    """Return [experts] int64: how many of the `tokens * topk` choices are each expert, padded to a multiple.

    Each of `ranks` has as many consecutive experts, and as many choices, as any other. So there are up to `ranks - 1`
    choices more where they do not divide.
    """
    choices = -(-tokens * topk // ranks) * ranks
    ends = choices * torch.arange(experts + 1) // experts
    counts = ends.diff()
    return -(-counts // multiple) * multiple


def _can_remember(values: Any) -> bool:
    return isinstance(values, torch.Tensor) and not values.is_floating_point() and values.numel() <= _MAX_KNOWN


def _compute_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation on known tensors, on the host; None if it has others or none at all.

    Known values of tensors to which the operation writes are changed, too, or forgotten.
    """
    tensors = list(_iter_tensors(args, kwargs))
    has_values = any(hasattr(tensor, _VALUES) for tensor in tensors)
    if not has_values and func not in _COPIES:
        return None
    if func is _ATEN.copy_.default and args[0].is_meta and _is_known(args[1]):
        with _disable_current_modes():
            return _on_host(args[1]).to(args[0].dtype).expand(args[0].shape).clone()
    is_copied = func is _ATEN._to_copy.default and str(kwargs.get("device")) == "meta"
    if func.namespace == "aten" and (has_values or is_copied) and all(map(_is_known, tensors)):
        options = {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs
        host_args, options = tree_map(_on_host, (args, options))
        with _disable_current_modes():
            return func(*host_args, **options)
    if func.namespace == "c10d" or func._schema.is_mutable:
        for tensor in tensors if func.namespace == "c10d" else tensors[:1]:
            vars(tensor).pop(_VALUES, None)
    return None


def _iter_tensors(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors among arguments, and in lists of them."""
    for value in chain(args, kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _iter_tensors(value, {})


def _is_known(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, _VALUES) if tensor.is_meta else _can_remember(tensor)


def _on_host(value: Any) -> Any:
    return getattr(value, _VALUES, value) if isinstance(value, torch.Tensor) else value


def _read_scalar(reads: HostReads, values: Any, args: Any, kwargs: Any) -> Any:
    if not args[0].is_meta:
        return None
    if values is not None:
        return values
    is_flag = args[0].dtype == torch.bool
    return not hasattr(args[0], _IS_ANY) if is_flag else torch.zeros((), dtype=args[0].dtype).item()


def _any(reads: HostReads, values: Any, args: Any, kwargs: Any) -> Any:
    if not args[0].is_meta or values is not None:
        return None
    result = args[0].new_empty((), dtype=torch.bool)
    setattr(result, _IS_ANY, True)
    return result


def _to_host(reads: HostReads, values: Any, args: Any, kwargs: Any) -> Any:
    if args[0].is_meta and (device := kwargs.get("device")) is not None and torch.device(device).type != "meta":
        return values if values is not None else torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    return None


def _copy(reads: HostReads, values: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[:2]
    if target.is_meta:
        return None
    if source.is_meta and _is_known(source):
        return target.copy_(_on_host(source))
    if target.numel() > _SMALL:
        return target
    return target.zero_() if source.is_meta else None


def _zeros(reads: HostReads, values: Any, args: Any, kwargs: Any) -> Any:
    return _untouched(torch.Size(args[0]), kwargs.get("dtype"), kwargs.get("device"))


def _zeros_like(reads: HostReads, values: Any, args: Any, kwargs: Any) -> Any:
    dtype, device = kwargs.get("dtype") or args[0].dtype, kwargs.get("device") or args[0].device
    return _untouched(args[0].shape, dtype, device) if args[0].is_contiguous() else None


def _untouched(size: torch.Size, dtype: torch.dtype | None, device: Any) -> torch.Tensor | None:
    """Return a large host tensor of zeros whose memory nothing has touched; None for other tensors."""
    if size.numel() <= _SMALL or torch.device(device or "cpu").type == "meta":
        return None
    dtype = dtype or torch.get_default_dtype()
    memory = mmap.mmap(-1, size.numel() * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=dtype).view(size)


def _equal(reads: HostReads, values: Any, args: Any, kwargs: Any) -> Any:
    if not args[0].is_meta:
        return None
    return True if values is None else values


def _masked_select(reads: HostReads, values: Any, args: Any, kwargs: Any) -> Any:
    if not args[0].is_meta or values is not None:
        return None
    return args[0].new_empty(_expert_rows)


_COPIES = _ATEN.copy_.default, _ATEN._to_copy.default
_SIZED_BY_VALUES = {
    _ATEN.nonzero.default,
    _ATEN.masked_select.default,
    _ATEN.index.Tensor,
    _ATEN.repeat_interleave.Tensor,
    _ATEN.bincount.default,
}
_ANSWERS: dict[Any, Callable[[HostReads, Any, Any, Any], Any]] = {
    _ATEN._local_scalar_dense.default: _read_scalar,
    _ATEN._to_copy.default: _to_host,
    _ATEN.any.default: _any,
    _ATEN.copy_.default: _copy,
    _ATEN.zeros.default: _zeros,
    _ATEN.zeros_like.default: _zeros_like,
    _ATEN.equal.default: _equal,
    _ATEN.masked_select.default: _masked_select,
    # torch has no kernels of these collectives for `meta`
    _C10D.reduce_scatter_tensor_coalesced_.default: lambda *_: FakeWork().boxed(),
    _C10D.allgather_into_tensor_coalesced_.default: lambda *_: FakeWork().boxed(),
}
