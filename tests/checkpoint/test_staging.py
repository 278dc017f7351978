from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.checkpoint.manifest import Entry
from megarl.checkpoint.store import BackgroundWrite
from megarl.parallel.host_copy import StagingBuffer

ENTRY = {Path("a"): Entry(1, "x")}


def test_work_goes_on_beside() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def work(ended: Callable[[], bool]) -> dict[Path, Entry]:
        begun.set()
        may_end.wait()
        return ENTRY

    writing = BackgroundWrite(work)
    begun.wait()
    assert not writing.is_done()
    may_end.set()
    assert writing.result() == ENTRY and writing.is_done()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("no"), SystemExit(3)])
def test_whatever_ends_it_is_an_error_of_storage(error: BaseException) -> None:
    def work(ended: Callable[[], bool]) -> dict[Path, Entry]:
        raise error

    writing = BackgroundWrite(work)
    with pytest.raises(OSError) as caught:
        writing.result()
    assert writing.is_done() and str(error) in str(caught.value)


def test_it_is_left_at_the_next_occasion() -> None:
    def work(ended: Callable[[], bool]) -> dict[Path, Entry]:
        while not ended():
            pass
        raise InterruptedError("the run has ended")

    writing = BackgroundWrite(work)
    writing.cancel()
    assert writing.is_done()


def test_copies_stay_as_they_are_and_take_memory_once() -> None:
    buffer = torch.arange(20, dtype=torch.float32)
    tensors = [buffer[3:9].view(2, 3), torch.tensor(5.0), torch.ones(3, dtype=torch.bfloat16), torch.empty(0, 4)]
    expected = [tensor.clone() for tensor in tensors]
    staging = StagingBuffer()
    first = staging.copy_to_host(tensors)
    buffer.zero_()
    for tensor in tensors[1:]:
        tensor.zero_()
    for copy, value in zip(first, expected, strict=True):
        assert torch.equal(copy, value) and copy.dtype == value.dtype and copy.shape == value.shape
        assert copy.untyped_storage().nbytes() == copy.nbytes  # torch.save writes all of it
    assert staging.nbytes == 3 * 64
    second = staging.copy_to_host(tensors)
    assert [copy.data_ptr() for copy in second] == [copy.data_ptr() for copy in first]
    assert not any(bool(copy.any()) for copy in second)
    staging.copy_to_host(tensors[:1])
    assert staging.nbytes == 64  # of another size, it is taken anew
