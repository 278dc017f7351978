"""Megatron in a world of any number of ranks, in one process and without memory: tensors have shapes and no contents
(`FakeTensorMode`), and groups say what they are given (torch's own fake backend)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.parallel import ranks


@contextlib.contextmanager
def one_of(world: int, rank: int) -> Iterator[None]:
    """What happens here is done by this rank of so many."""
    new_group = dist.new_group

    def faked(*value: Any, **named: Any) -> Any:
        return new_group(*value, **{**named, "backend": "fake"})

    def said_by_all(result: list[Any], mine: Any, group: Any = None) -> None:
        result[:] = [mine] * len(result)

    def applied(self: torch.nn.Module, change: Any, recurse: bool = True) -> torch.nn.Module:
        """Fake parameters cannot be put in place of others; they are where and what they shall be already."""
        for child in self.children():
            applied(child, change)
        for parameter in self._parameters.values():
            assert parameter is None or change(parameter.data).dtype == parameter.dtype
        for name, buffer in self._buffers.items():
            self._buffers[name] = None if buffer is None else change(buffer)
        return self

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    with contextlib.ExitStack() as stack:
        for where, name, other in (
            (dist, "new_group", faked),
            (dist, "all_gather_object", said_by_all),
            (ranks, "warm_up_group", lambda group=None: None),
            (random.CudaRNGStatesTracker, "fork", lambda self, name="": contextlib.nullcontext()),
            (torch.nn.Module, "_apply", applied),
        ):
            stack.enter_context(mock.patch.object(where, name, other))
        try:
            yield
        finally:
            ranks.shutdown()


def shapes_only() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)
