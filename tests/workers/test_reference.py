"""A reference with a model of its own: equal to the actor's log-probs at first and after a refresh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(("family", "lora_rank"), [("qwen3_moe", 0), ("qwen3_moe", 4), ("deepseek_v3", 0)])
def test_refresh_moves_the_weights_to_another_layout(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, family: str, lora_rank: int
) -> None:
    results = run_ranks(3, "tests/workers/ranks_reference.py", str(tmp_path), family, str(lora_rank))
    assert results[0] == results[1] == results[2]
    at_first, updated, refreshed = results[0]
    assert at_first < 1e-5 and refreshed < 1e-5 and updated > 1e-2
