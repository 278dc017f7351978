"""The README of controllers: its table lists every recipe, and its example of a custom algorithm learns."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_learning import TableFlow  # noqa: E402

from megarl.config import from_dict  # noqa: E402
from megarl.config.recipes import RECIPES  # noqa: E402
from megarl.controllers.controller import make_controller  # noqa: E402
from megarl.types import Prompt  # noqa: E402

pytestmark = pytest.mark.alone

PAGE = (Path(__file__).resolve().parents[2] / "megarl/controllers/README.md").read_text(encoding="utf-8")


def test_readme_table_lists_every_recipe() -> None:
    rows = re.findall(r"^\| (`.*?) \| .*? \| `(.*?)`", PAGE, flags=re.MULTILINE)
    page_names = {name for cell, _ in rows for name in re.findall(r"`(\w+)`", cell)}
    assert page_names == set(RECIPES)
    for cell, file in rows:
        for name in re.findall(r"`(\w+)`", cell):
            module = str(RECIPES[name].controller).partition(":")[0].rpartition(".")[2]
            assert f"{module}.py" == file or f"`{module}.py`" in PAGE, name


def test_readme_example_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = PAGE.partition("# lab/sign.py\n")[2].partition("\nThe line:")[0]
    (tmp_path / "lab_sign.py").write_text("\n".join(line.removeprefix("    ") for line in example.splitlines()))
    monkeypatch.syspath_prepend(tmp_path)
    try:
        config = from_dict({"algorithm": "lab_sign:SignController", "kl": {"apply_to": "none"}})
        controller, flow = make_controller(config), TableFlow(config)
        prompts: Any = [Prompt(id=str(i), messages=()) for i in range(8)]
        means = [float(controller.step(flow, prompts).rollouts.reward.mean()) for _ in range(40)]  # type: ignore
        assert means[0] < 0.4 and sum(means[-5:]) / 5 > 0.8, means
    finally:
        sys.modules.pop("lab_sign", None)
