"""Megatron as one rank of a world of any size, in one process and without memory: tensors have shapes and no contents
(`FakeTensorMode`), and collectives return their inputs (torch's fake backend)."""

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
def fake_rank(world: int, rank: int) -> Iterator[None]:
    """Act as one rank of a fake world."""
    new_group = dist.new_group

    def new_fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake"})

    def gather_copies(result: list[Any], local: Any, group: Any = None) -> None:
        result[:] = [local] * len(result)

    def apply_in_place(self: torch.nn.Module, change: Any, recurse: bool = True) -> torch.nn.Module:
        """Fake parameters cannot replace others, and already have the right device and dtype."""
        for child in self.children():
            apply_in_place(child, change)
        for parameter in self._parameters.values():
            assert parameter is None or change(parameter.data).dtype == parameter.dtype
        for name, buffer in self._buffers.items():
            self._buffers[name] = None if buffer is None else change(buffer)
        return self

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    with contextlib.ExitStack() as stack:
        for module, name, replacement in (
            (dist, "new_group", new_fake_group),
            (dist, "all_gather_object", gather_copies),
            (ranks, "warm_up_group", lambda group=None: None),
            (random.CudaRNGStatesTracker, "fork", lambda self, name="": contextlib.nullcontext()),
            (torch.nn.Module, "_apply", apply_in_place),
        ):
            stack.enter_context(mock.patch.object(module, name, replacement))
        try:
            yield
        finally:
            ranks.shutdown()


def fake_tensors() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)
