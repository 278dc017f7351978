"""A reference with a model of its own: equal to the actor's log-probs at first and after a refresh."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STAGES, REPLICAS = {"tp": 1, "pp": 2, "ep": 1}, {"tp": 1, "pp": 1, "ep": 2}


@pytest.mark.parametrize(
    ("family", "lora_rank", "layout"),
    [("qwen3_moe", 0, STAGES), ("qwen3_moe", 4, STAGES), ("deepseek_v3", 0, REPLICAS)],
)
def test_refresh_moves_the_weights_to_another_layout(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, family: str, lora_rank: int, layout: dict[str, int]
) -> None:
    results = run_ranks(
        3, "tests/workers/ranks_reference.py", str(tmp_path), family, str(lora_rank), json.dumps(layout)
    )
    assert results[0] == results[1] == results[2]
    at_first, updated, refreshed = results[0]
    assert at_first < 1e-5 and refreshed < 1e-5 and updated > 1e-2
