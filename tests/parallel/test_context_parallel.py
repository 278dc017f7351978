"""Sizes of context parallel groups."""

import pytest

from megarl.parallel.context_parallel import context_sizes

pytestmark = pytest.mark.alone


def test_sizes_divide_each_other():
    assert [context_sizes(cp) for cp in (1, 2, 3, 6, 8, 12)] == [
        (1,),
        (1, 2),
        (1, 3),
        (1, 2, 6),
        (1, 2, 4, 8),
        (1, 2, 4, 12),
    ]
