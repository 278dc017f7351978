"""`check_parity`: tolerances, titles and the table; tests/megatron/test_model.py runs the comparison."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import check_parity  # noqa: E402


def test_reports_values_out_of_tolerance() -> None:
    passing = {"logprobs": 1e-6, "gradients": 1e-6, "swapped": 0.0, "skipped": 1.0}
    assert check_parity.misses(passing) == []
    assert check_parity.misses(passing | {"logprobs": 2e-5, "resumed": 0.0}) == ["logprobs", "resumed"]
    assert check_parity.misses(passing | {"gradients": float("nan")}) == ["gradients"]


def test_titles_of_layouts() -> None:
    assert check_parity.title("tp=2,ep=2") == "TP2 x EP2"
    assert check_parity.title("cp=2,selective") == "CP2, selective"
    assert [check_parity.title(layout) for layout in ("", "overlap")] == ["one process", "DP2, overlap"]


def test_renders_the_readme_table() -> None:
    results = {"one process": {"a": {"logprobs": 9.5e-7}, "b": {"logprobs": 1.4e-6}}, "EP2": {"a": {"logprobs": 0.0}}}
    lines = check_parity.markdown(results).splitlines()
    assert lines[0] == "|  | one process | EP2 |"
    assert lines[2:] == ["| a | 1e-06 | 0e+00 |", "| b | 1e-06 | - |"]
