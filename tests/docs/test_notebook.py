"""docs/quickstart.ipynb: committed without outputs, and its code runs from first to last cell, without Jupyter."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pages import ROOT, links  # noqa: E402
from tutorials import make_checkout  # noqa: E402

from megarl.observe.tracker import read_metrics  # noqa: E402

NOTEBOOK = ROOT / "docs/quickstart.ipynb"
SMALL = {
    "DEMONSTRATIONS": 256,
    "WARM_UP": ["run.num_rollout=2"],
    "TRAINING": ["run.num_rollout=6", "run.eval_every=6", "data.prompts_per_step=4", "rollout.samples_per_prompt=4"],
}
"""Settings in place of those of the cell `parameters`."""


def read_cells() -> list[dict[str, Any]]:
    tree = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (tree["nbformat"], tree["nbformat_minor"]) == (4, 5)
    cells = tree["cells"]
    assert isinstance(cells, list)
    return cells


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_has_no_outputs() -> None:
    cells = read_cells()
    assert {cell["cell_type"] for cell in cells} == {"markdown", "code"}
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if "outputs" in cell)
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_code_is_plain_python() -> None:
    """Without magics, so that it runs anywhere; settings are in the cell tagged `parameters`."""
    cells = [cell for cell in read_cells() if cell["cell_type"] == "code"]
    for cell in cells:
        ast.parse(source(cell))
    (parameters,) = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", ())]
    names = {target.id for node in ast.parse(source(parameters)).body for target in node.targets}  # type: ignore
    assert names == {"FOLDER", *SMALL}


def test_links_resolve() -> None:
    text = "\n".join(source(cell) for cell in read_cells() if cell["cell_type"] == "markdown")
    targets = [link for link in links(text) if "://" not in link]
    assert len(targets) >= 5 and all((NOTEBOOK.parent / target).exists() for target in targets), targets


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_cells_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = make_checkout(tmp_path / "megarl")
    (checkout / "docs").mkdir()
    monkeypatch.chdir(checkout / "docs")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(checkout), str(ROOT)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "path", list(sys.path))
    import matplotlib

    matplotlib.use("Agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in read_cells():
        if cell["cell_type"] == "code":
            exec(compile(source(cell), f"{NOTEBOOK.name}:{cell['id']}", "exec"), namespace)
            if "parameters" in cell["metadata"].get("tags", ()):
                namespace |= SMALL

    run = checkout / "runs/notebook/run-1"
    metrics = read_metrics(run)
    assert max(metrics) == 6 and {"eval/reward_greedy", "eval/reward_sampled"} <= metrics[0].keys() & metrics[6].keys()
    training, greedy = namespace["axes"].lines[0], namespace["axes"].lines[2]
    assert list(training.get_ydata()) == [metrics[step]["rollout/reward_mean"] for step in range(1, 7)]
    assert list(greedy.get_xdata()) == [0, 6]
    frame = (checkout / "docs" / namespace["frame"].src).resolve()
    assert frame == (run / "view.html").resolve() and "<html" in frame.read_text(encoding="utf-8")[:500]
    assert len(namespace["last"]) == 16 and namespace["last"][0].messages
