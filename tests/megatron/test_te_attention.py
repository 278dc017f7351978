"""Transformer Engine's attention over common prefixes; what a GPU computes is played by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_equals_attention_on_cpus(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    """On two context parallel ranks: output and gradients. Sequences of 64, 70, 90 and 30 tokens share 40, 55 and 0."""
    for result in run_ranks(2, "tests/megatron/ranks_te_attention.py", fresh=True):
        assert max(result["differences"]) < 2e-6
        assert result["tokens"] < 254 - 85
        assert result["context parallel"] == [False, True]  # off, and on again for a micro-batch without common tokens
