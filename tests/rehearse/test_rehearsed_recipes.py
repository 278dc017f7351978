"""Every recipe of configs/ is rehearsed within three nights: whole, or the first pipeline stage of large ones."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from nights import cases_of_this_night
from rehearsal_cases import ROOT, run_cases

QUICKSTART = ("quickstart", "quickstart_async", "quickstart_pictures", "quickstart_sft", "quickstart_split")
"""Their models are made by tools."""
STAGES = (
    *("deepseek_r1", "deepseek_v3_671b", "deepseek_v3_671b_256", "deepseek_v3_671b_96", "glm4.7_flash", "glm_5"),
    *("kimi_k2.5", "kimi_k2_thinking", "ling_flash_2.0", "minimax_m2", "qwen3.5_35b_a3b", "qwen3_235b"),
    *("qwen3_30b_a3b", "qwen3_next_80b_a3b", "qwen3_vl_30b_a3b"),
)
"""Recipes whose ranks take more than 40 s of one core, all together."""
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


def make_model(tool: str, folder: Path) -> str:
    subprocess.run([sys.executable, str(ROOT / "tools" / tool), str(folder)], check=True, capture_output=True)
    return str(folder / "model")


@pytest.mark.nightly
def test_whole_recipes(tmp_path: Path) -> None:
    numbers, pictures = make_model("make_quickstart.py", tmp_path / "q"), make_model("make_pictures.py", tmp_path / "p")
    cases: dict[str, Sequence[str]] = {}
    for name in cases_of_this_night([name for name in RECIPES if name not in STAGES], 3):
        model = pictures if name == "quickstart_pictures" else numbers
        cases[name] = [f"configs/{name}.yaml", *([f"model.path={model}"] if name in QUICKSTART else [])]
    for name, (status, report, errors) in run_cases("rehearsed_recipes.py", cases, tmp_path, timeout=1800).items():
        assert status == 0, f"{name}: {report[-2000:]}{errors[-2000:]}"
        assert re.search(r"communication: [\d,]+ operations of all kinds match|no communication", report), name


@pytest.mark.nightly
def test_stages_of_large_recipes(tmp_path: Path) -> None:
    """The first stages, and the last one of one recipe."""
    stages = cases_of_this_night([*((name, "first") for name in STAGES), ("qwen3_235b", "last")], 3)
    cases = {
        f"{name}, {stage} stage": {
            "config": str(ROOT / f"configs/{name}.yaml"),
            "overrides": [],
            "rank": stage,
            "finds_leaks": False,
        }
        for name, stage in stages
    }
    results = run_cases("plays.py", cases, tmp_path, timeout=1200)
    assert {name: result["error"] for name, result in results.items() if "error" in result} == {}
    for name, result in results.items():
        assert any(phase.endswith("_update") for phase in result["peaks"]), name
