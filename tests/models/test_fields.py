"""Every field of every family's config.json, perturbed: log-probs equal to transformers', or a one-line ConfigError."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))

import tiny  # noqa: E402

FAMILIES = [
    pytest.param(name, marks=() if name == "qwen3_moe" else pytest.mark.nightly)
    for name, hf in tiny.HF.items()
    if hasattr(transformers, hf["architectures"][0])
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_is_honoured_or_refused(family: str, run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    (result,) = run_ranks(1, "tests/models/ranks_fields.py", family, timeout=900.0)
    counts = result["counts"]
    print(family, counts, f"{result['built']} models built")  # shown if the test fails
    assert result["failures"] == {}
    assert min(counts["equal"], counts["refused"], result["built"]) >= 5
    assert counts["invalid"] < sum(counts.values()) / 4  # most values must say something
