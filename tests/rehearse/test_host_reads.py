"""What the host reads in a rehearsal, and host tensors that cost no memory."""

from __future__ import annotations

import psutil
import pytest
import torch

from megarl.rehearse.host_reads import HostReads, tokens_per_expert

pytestmark = pytest.mark.alone


def test_ranks_have_equally_many_choices() -> None:
    """1,460 tokens with 8 experts each, of 256 on 8 ranks: 45.6 choices of an expert, 1,460 of a rank."""
    counts = tokens_per_expert(1460, 8, 256)
    assert set(counts.tolist()) == {45, 46}
    assert counts.view(8, 32).sum(1).tolist() == [1460] * 8
    assert tokens_per_expert(1460, 8, 256, 16).tolist() == [48] * 256


def test_choices_that_do_not_divide_are_rounded_up() -> None:
    """13 tokens with 2 experts each, of 8 on 4 ranks: 28 choices in place of 26."""
    assert tokens_per_expert(13, 2, 8, ranks=4).tolist() == [3, 4] * 4
    assert tokens_per_expert(12, 2, 8, ranks=4).tolist() == [3] * 8


def test_large_host_tensors_stay_untouched() -> None:
    """Zeros, copies of them, and copies from the device, of 4 GB each; small ones are filled."""
    process, size = psutil.Process(), 1 << 30
    with HostReads():
        before = process.memory_info().rss
        zeros = torch.zeros(size)
        moments = torch.zeros_like(zeros)
        moments.copy_(torch.empty(size, device="meta"))
        zeros.copy_(moments)
        small = torch.full((4,), 3.0)
        small.copy_(torch.empty(4, device="meta"))
        assert process.memory_info().rss - before < 1 << 28
    assert float(zeros[-1]) == float(moments[0]) == 0.0 and small.tolist() == [0.0] * 4
