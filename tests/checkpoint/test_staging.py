"""Background writes, deferred copies and the host staging buffer of asynchronous checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.checkpoint.manifest import Entry
from megarl.checkpoint.store import BackgroundWrite
from megarl.parallel import host_copy
from megarl.parallel.host_copy import DeferredCopy, StagingBuffer

ENTRY = {Path("a"): Entry(1, "x")}


def test_background_write_runs_concurrently() -> None:
    started, may_end = threading.Event(), threading.Event()

    def work(is_cancelled: Callable[[], bool]) -> dict[Path, Entry]:
        started.set()
        may_end.wait()
        return ENTRY

    writing = BackgroundWrite(work)
    started.wait()
    assert not writing.is_done()
    may_end.set()
    assert writing.result() == ENTRY and writing.is_done()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("no"), SystemExit(3)])
def test_background_write_raises_any_failure_as_os_error(error: BaseException) -> None:
    def work(is_cancelled: Callable[[], bool]) -> dict[Path, Entry]:
        raise error

    writing = BackgroundWrite(work)
    with pytest.raises(OSError) as raised:
        writing.result()
    assert writing.is_done() and str(error) in str(raised.value)


def test_cancel_stops_background_write() -> None:
    def work(is_cancelled: Callable[[], bool]) -> dict[Path, Entry]:
        while not is_cancelled():
            pass
        raise InterruptedError("the run has ended")

    writing = BackgroundWrite(work)
    writing.cancel()
    assert writing.is_done()


def copy_to_host(staging: StagingBuffer, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    copies = staging.allocate(tensors)
    DeferredCopy(zip(tensors, copies, strict=True)).complete()
    return copies


def test_staged_copies_are_stable_and_reuse_memory() -> None:
    buffer = torch.arange(20, dtype=torch.float32)
    tensors = [buffer[3:9].view(2, 3), torch.tensor(5.0), torch.ones(3, dtype=torch.bfloat16), torch.empty(0, 4)]
    expected = [tensor.clone() for tensor in tensors]
    staging = StagingBuffer()
    first = copy_to_host(staging, tensors)
    buffer.zero_()
    for tensor in tensors[1:]:
        tensor.zero_()
    for copy, value in zip(first, expected, strict=True):
        assert torch.equal(copy, value) and copy.dtype == value.dtype and copy.shape == value.shape
        assert copy.untyped_storage().nbytes() == copy.nbytes  # torch.save writes all of it
    assert staging.nbytes == 3 * 64
    second = copy_to_host(staging, tensors)
    assert [copy.data_ptr() for copy in second] == [copy.data_ptr() for copy in first]
    assert not any(bool(copy.any()) for copy in second)
    staging.allocate(tensors[:1])
    assert staging.nbytes == 64  # a smaller copy reallocates the buffer


class SlowCopy(DeferredCopy):
    """A copy that has started but copies nothing until `may_copy` is set."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.has_started, self.may_copy = threading.Event(), threading.Event()

    def _copy(self) -> None:
        self.has_started.set()
        self.may_copy.wait()
        super()._copy()


def test_change_waits_for_copy_in_thread() -> None:
    source, target = torch.ones(3), torch.zeros(3)
    waits = []

    @contextmanager
    def waiting() -> Iterator[None]:
        copy.may_copy.set()  # the copy makes no progress until the change waits for it
        yield
        waits.append(target.tolist())

    copy = SlowCopy([(source, target)], waiting)
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(copy.complete)
        copy.has_started.wait()
        assert not target.any()
        copy.wait()
        source.zero_()
        thread.result()
    assert target.tolist() == [1, 1, 1] and waits == [[1, 1, 1]]
    copy.wait()
    assert len(waits) == 1  # nothing to wait for


def test_change_makes_copy_that_no_thread_has_started() -> None:
    source, target = torch.ones(3), torch.zeros(3)
    copy = DeferredCopy([(source, target)])
    copy.wait()
    source.zero_()
    copy.complete()
    assert target.tolist() == [1, 1, 1]


def test_only_thread_raises_error_of_copy() -> None:
    copy = DeferredCopy([(torch.ones(3), torch.zeros(2))])
    copy.wait()
    with pytest.raises(RuntimeError, match="size"):
        copy.complete()


class GpuTensor(torch.Tensor):
    """A host tensor that says that it is on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


class Stream:
    """A stream that completes its work when an event is synchronized."""

    def __init__(self) -> None:
        self.synchronized = 0

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        self.synchronized += 1


def test_copies_a_gpu_through_two_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "PINNED_PIECE_BYTES", 16)
    matrix = torch.arange(30, dtype=torch.float32).view(5, 6)
    sources = [
        *(matrix.as_subclass(GpuTensor), matrix.t().as_subclass(GpuTensor)),
        *(torch.ones(3), torch.tensor(5.0).as_subclass(GpuTensor), torch.empty(0, 2).as_subclass(GpuTensor)),
        torch.full((5,), 7, dtype=torch.bfloat16).as_subclass(GpuTensor),
    ]
    targets = StagingBuffer().allocate(sources)
    stream = Stream()
    host_copy._copy_in_pieces(zip(sources, targets, strict=True), stream)  # type: ignore[arg-type]
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source.as_subclass(torch.Tensor))
    assert stream.synchronized == 8 + 8 + 1 + 1 + 1  # pieces of 16 bytes, one at least
