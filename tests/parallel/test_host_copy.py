"""Copies of device memory in page-locked host memory."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.parallel.host_copy import MIN_PIECE_BYTES, HostCopy, allocate_pinned, storage_bytes, tensor_bytes


def torch_allocation(size: int) -> int:
    """Return the page-locked bytes of a request: the next power of two (ATen/core/CachingHostAllocator.h)."""
    return 1 << (size - 1).bit_length() if size else 0


@given(st.integers(0, 1 << 48))
def test_pieces_bound_allocation_overhead(size: int) -> None:
    with torch.device("meta"):
        allocated = sum(torch_allocation(chunk.nbytes) for chunk in HostCopy(size).pieces)
    assert size <= allocated < size + MIN_PIECE_BYTES


def test_single_piece_would_allocate_nearly_twice() -> None:
    size = (33 << 30) + 5
    assert torch_allocation(size) == 64 << 30
    with torch.device("meta"):
        assert len(HostCopy(size).pieces) == 3


@given(st.lists(st.integers(0, 3 * MIN_PIECE_BYTES // 2), max_size=5))
def test_copy_back_restores_storages(sizes: list[int]) -> None:
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    before = [item.clone() for item in tensors]
    copy = HostCopy(sum(sizes))
    copy.copy_from(storage_bytes(item.untyped_storage()) for item in tensors)
    for item in tensors:
        item.zero_()
    copy.copy_back(storage_bytes(item.untyped_storage()) for item in tensors)
    assert all(torch.equal(item, old) for item, old in zip(tensors, before, strict=True))


def test_second_copy_replaces_first() -> None:
    tensors, copy = torch.zeros(7), HostCopy(28)
    for value in (1.0, 2.0):
        copy.copy_from([tensor_bytes(tensors.fill_(value))])
    copy.copy_back([tensor_bytes(tensors.zero_())])
    assert tensors.tolist() == [2.0] * 7


@given(st.lists(st.integers(0, 3 * MIN_PIECE_BYTES // 2), max_size=5))
def test_exchange_twice_restores_both_sides(sizes: list[int]) -> None:
    local, received = ([torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes] for _ in range(2))
    tensors, copy = [item.clone() for item in local], HostCopy(sum(sizes))
    copy.copy_from(received)
    copy.exchange(tensors)
    assert all(torch.equal(item, other) for item, other in zip(tensors, received, strict=True))
    copy.exchange(tensors)
    assert all(torch.equal(item, local_tensor) for item, local_tensor in zip(tensors, local, strict=True))


@given(st.lists(st.integers(0, 1 << 40) | st.integers(0, 1 << 29), max_size=9))
def test_pinned_allocations_are_more_than_half_full(sizes: list[int]) -> None:
    with torch.device("meta"):
        tensors = allocate_pinned([torch.Size([size]) for size in sizes])
    assert [len(item) for item in tensors] == sizes
    storages = {item.untyped_storage()._cdata: item.untyped_storage().nbytes() for item in tensors if len(item)}
    assert sum(map(torch_allocation, storages.values())) == sum(storages.values()) < 8 * max(1, sum(sizes))


@given(st.lists(st.integers(0, 300), max_size=9))
def test_pinned_tensors_do_not_overlap(sizes: list[int]) -> None:
    tensors = allocate_pinned([torch.Size([size // 3, 3]) for size in sizes])
    for number, item in enumerate(tensors):
        item.fill_(number)
    assert all((item == number).all() for number, item in enumerate(tensors))
