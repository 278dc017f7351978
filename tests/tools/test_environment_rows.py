"""`environment_rows`: data sets from the tasks of environments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.data.datasets import read_prompts

pytestmark = pytest.mark.alone

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "environment_rows.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


def write_task(folder: Path, instruction: str) -> None:
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
    (folder / "task.toml").write_text("")
    (folder / "instruction.md").write_text(instruction)


def test_converts_harbor_tasks_to_prompts(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "b", "Write b.")
    write_task(tmp_path / "tasks" / "a", "Write a.")
    process = run(f"harbor:{tmp_path / 'tasks'}", tmp_path / "new" / "rows.jsonl")
    assert process.returncode == 0, process.stderr
    assert process.stdout == f"{tmp_path}/new/rows.jsonl: 2 prompts\n"
    prompts = list(read_prompts(tmp_path / "new" / "rows.jsonl"))
    assert [prompt.messages for prompt in prompts] == [
        ({"role": "user", "content": text},) for text in ("Write a.", "Write b.")
    ]
    assert prompts[1].extra == {"environment": f"{tmp_path}/tasks", "task": "b"} and prompts[1].id == "b"


def test_converts_verifiers_data_to_prompts(tmp_path: Path) -> None:
    pytest.importorskip(
        "verifiers", reason="the package verifiers is not installed, see launch/requirements-verifiers.txt"
    )
    (tmp_path / "small_world.py").write_text(
        "import verifiers as vf\nfrom datasets import Dataset\n"
        "def load_environment():\n"
        "    data = Dataset.from_list([{'question': '2+3?', 'answer': '5'}])\n"
        "    return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric())\n"
    )
    code = f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = sys.argv[1:]; "
    code += f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    command = [sys.executable, "-c", code, str(SCRIPT), "verifiers:small-world", str(tmp_path / "rows.jsonl")]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert row["prompt"] == [{"role": "user", "content": "2+3?"}] and row["ground_truth"] == "5"
    assert row["environment"] == "small-world" and row["verifiers"]["answer"] == "5"


@pytest.mark.parametrize(
    "spec, target, message",
    [
        ("mcp:a.json", "rows.jsonl", "is neither harbor:FOLDER nor verifiers:NAME"),
        ("harbor:none", "rows.jsonl", "no folder none"),
        ("harbor:none", "rows.json", "must end in .jsonl"),
    ],
)
def test_rejects_other_specs_and_targets(tmp_path: Path, spec: str, target: str, message: str) -> None:
    process = run(spec, tmp_path / target)
    assert process.returncode == 2
    assert process.stderr.startswith("error: ") and message in process.stderr and process.stderr.count("\n") == 1
    assert not (tmp_path / target).exists()
