import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.parallel.host_copy import MIN_PIECE_BYTES, HostCopy


def given_by_torch(size: int) -> int:
    """What torch takes for so many page-locked bytes: the next power of two (ATen/core/CachingHostAllocator.h)."""
    return 1 << (size - 1).bit_length() if size else 0


@given(st.integers(0, 1 << 48))
def test_page_locked_memory_is_no_more_than_it_has_to_be(size: int) -> None:
    with torch.device("meta"):
        selected = sum(given_by_torch(piece.nbytes) for piece in HostCopy(size).pieces)
    assert size <= selected < size + MIN_PIECE_BYTES


def test_one_piece_would_take_nearly_twice_as_much() -> None:
    size = (33 << 30) + 5
    assert given_by_torch(size) == 64 << 30
    with torch.device("meta"):
        assert len(HostCopy(size).pieces) == 3


@given(st.lists(st.integers(0, 3 * MIN_PIECE_BYTES // 2), max_size=5))
def test_all_of_it_comes_back(sizes: list[int]) -> None:
    there = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    before = [item.clone() for item in there]
    copy = HostCopy(sum(sizes))
    copy.copy_from([item.untyped_storage() for item in there])
    for item in there:
        item.zero_()
    copy.copy_back([item.untyped_storage() for item in there])
    assert all(torch.equal(item, old) for item, old in zip(there, before, strict=True))


def test_what_was_taken_before_is_replaced() -> None:
    there, copy = torch.zeros(7), HostCopy(28)
    for value in (1.0, 2.0):
        copy.copy_from([there.fill_(value).untyped_storage()])
    copy.copy_back([there.zero_().untyped_storage()])
    assert there.tolist() == [2.0] * 7
