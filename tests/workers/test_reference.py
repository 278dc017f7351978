"""A reference with a model of its own: equal to the actor's log-probs at first and after a refresh."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SPLIT = {
    "actor": {"tp": 2, "ep": 2},
    "megatron": {},
    "reference": {"tp": 1, "pp": 2, "ep": 1},
}
UNEVEN_STAGES = {  # of the actor only
    "actor": {"pp": 2},
    "megatron": {"num_layers_in_last_pipeline_stage": 1},
    "reference": {"pp": 1, "ep": 2},
}


@pytest.mark.parametrize(
    ("family", "lora_rank", "settings"),
    [("qwen3_moe", 0, SPLIT), ("qwen3_moe", 4, SPLIT), ("deepseek_v3", 0, UNEVEN_STAGES)],
)
def test_refresh_moves_the_weights_to_another_layout(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, family: str, lora_rank: int, settings: dict[str, Any]
) -> None:
    arguments = str(tmp_path), family, str(lora_rank), json.dumps(settings)
    results = run_ranks(3, "tests/workers/ranks_reference.py", *arguments)
    assert results[0] == results[1] == results[2]
    at_first, updated, refreshed = results[0]
    assert at_first < 1e-5 and refreshed < 1e-5 and updated > 1e-2
