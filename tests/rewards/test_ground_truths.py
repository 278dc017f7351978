"""Ground truths are checked before the run starts, and errors name the unusable rows."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError, from_dict
from megarl.rewards.by_source import by_source
from megarl.rewards.choice import choice
from megarl.rewards.code import hidden_tests
from megarl.rewards.functions import check_truth_file, check_truths
from megarl.rewards.gsm8k import gsm8k
from megarl.rewards.math_dapo import math_dapo
from megarl.rewards.math_verify import math_verify
from megarl.rewards.squad import exact_match, f1
from megarl.types import Prompt

pytestmark = pytest.mark.alone

GOOD = "assert f(1) == 2"


def prompt(ground_truth: Any, source: str = "") -> Prompt:
    return Prompt("p", ({"role": "user", "content": "x"},), ground_truth=ground_truth, data_source=source)


@pytest.mark.parametrize(
    ("function", "valid", "invalid"),
    [
        (hidden_tests, [GOOD], "no tests"),
        (choice, "(b)", "F"),
        (math_verify, "1/2", ""),
        (math_dapo, "34", None),
        (gsm8k, "1,080", "ten"),
        (exact_match, ["Paris"], []),
        (f1, {"target": "Paris"}, None),
    ],
)
def test_functions_refuse_unusable_ground_truths(function: Any, valid: Any, invalid: Any) -> None:
    function.check(prompt(valid))
    with pytest.raises(ValueError, match="."):
        function.check(prompt(invalid))


def test_by_source_checks_with_the_function_of_the_source() -> None:
    by_source.check(prompt("12", "openai/gsm8k"))
    for invalid_prompt in (prompt("ten", "openai/gsm8k"), prompt("12", "unknown")):
        with pytest.raises(ValueError, match="not a number|no reward for the data source"):
            by_source.check(invalid_prompt)


def test_names_the_first_bad_rows(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    ground_truths = ["1"] * 20 + ["ten", "11", "no", "none", "many"]
    file.write_text(
        "".join(json.dumps({"prompt": "x", "ground_truth": ground_truth}) + "\n" for ground_truth in ground_truths)
    )
    config = from_dict({"reward": {"functions": ["megarl.rewards.gsm8k:gsm8k"]}})
    (line,) = check_truth_file(config, str(file))
    assert "4 of 25 rows have no ground truth that gsm8k can use" in line and "many" not in line
    assert all(f"{file}:{number}" in line for number in (21, 23, 24)) and "'ten' is not a number" in line
    config = from_dict({"reward": {"functions": ["megarl.rewards.choice:choice"]}})
    with pytest.raises(ConfigError, match="25 of 25 rows have no ground truth that choice can use"):
        check_truth_file(config, str(file))


def test_stops_checking_endless_files() -> None:
    rows = ((f"f:{number}", prompt("1")) for number in itertools.count())
    (line,) = check_truths({"gsm8k": gsm8k, "mine": lambda rollout: 1.0}, rows, "f", seconds=0.05)
    assert "ground truths were checked in 0.05 s" in line
    assert check_truths({"mine": lambda rollout: 1.0}, itertools.repeat(("f", prompt("1"))), "f") == []
