"""Changes of a message: encoding, and applying them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.reshard.run import delta

pytestmark = pytest.mark.alone


def test_encodes_positions_and_values() -> None:
    """Word 3 of the first block and word 1 of the second changed: two counts, two positions, two values."""
    old = torch.zeros(2 * delta.BLOCK_WORDS + 4, dtype=torch.int16)[: delta.BLOCK_WORDS + 2]
    new = old.clone()
    new[3], new[delta.BLOCK_WORDS + 1] = 7, -1
    encoded = delta.encode(new.view(torch.uint8), old.view(torch.uint8))
    assert encoded is not None and len(encoded) == 16
    assert encoded[:8].view(torch.int32).tolist() == [1, 1]
    assert encoded[8:].view(torch.int16).tolist() == [3, 1, 7, -1]


def test_is_whole_if_that_is_no_larger() -> None:
    """Of 8 bytes, the changes of one word would take 8: a count, a position and a value."""
    old = torch.zeros(4, dtype=torch.int16)
    new = torch.tensor([1, 0, 0, 0], dtype=torch.int16)
    assert delta.encode(new.view(torch.uint8), old.view(torch.uint8)) is None
    assert delta.encode(old.view(torch.uint8), old.view(torch.uint8)) is not None
    assert delta.encode(old[:0].view(torch.uint8), old[:0].view(torch.uint8)) is None


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 200_000), st.floats(0, 0.6), st.integers(0, 2**31), st.booleans())
def test_applied_changes_give_the_new_words(num_words: int, density: float, seed: int, twice: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = torch.randint(-(2**15), 2**15, (num_words,), generator=generator).to(torch.int16)
    is_changed = torch.rand(num_words, generator=generator) < density
    new = torch.where(is_changed, old ^ 0x5A5A, old)
    encoded = delta.encode(new.view(torch.uint8), old.view(torch.uint8))
    if encoded is None:
        assert 4 * is_changed.sum() + 4 * delta.num_blocks(2 * num_words) >= 2 * num_words
        return
    assert len(encoded) < 2 * num_words
    result = old.clone()
    for _ in range(1 + twice):
        delta.apply(encoded, result.view(torch.uint8))
    assert torch.equal(result, new)
