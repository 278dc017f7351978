"""Completion of `megarl`: bash runs the script and reports what it would insert."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl import completion
from megarl.__main__ import COMMANDS
from megarl.config import describe_keys
from megarl.config.shipped_files import list_recipes

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "megarl.bash"
    file.write_text(completion.build_script("bash"))
    return file


def complete(script: Path, folder: Path, line: str, breaks: str = " =:") -> set[str]:
    """Return the completions of a line whose cursor is at its end."""
    program = 'source "$1"; COMP_LINE=$2 COMP_POINT=${#2} COMP_WORDBREAKS=$3; _megarl; printf "%s\\n" "${COMPREPLY[@]}"'
    command = ["bash", "--norc", "-c", program, "bash", str(script), line, breaks]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("megarl tra", {"train"}),
        ("megarl try", {"try-reward", "try-tool"}),
        (".venv/bin/megarl re", {"report", "recipes"}),
        ("megarl train --d", {"--dry-run"}),
        ("megarl plan --gpus", {"--gpus", "--gpus-per-node"}),
        ("megarl train my", {"my.yaml", "my_folder"}),
        ("megarl train quickstart_s", {"quickstart_sft", "quickstart_split"}),
        ("megarl train my.yaml rollout.max_t", {"rollout.max_turns=", "rollout.max_tool_failed_frac="}),
        ("megarl train my.yaml algorithm=dap", {"dapo"}),
        ("megarl train my.yaml run.export=", {"true", "false"}),
        ("megarl train my.yaml data.train=my", {"my.yaml", "my.jsonl", "my_folder"}),
        ("megarl eval my_folder --data my.j", {"my.jsonl"}),
        ("megarl view my_f", {"my_folder"}),
        ("megarl completion ", {"bash", "zsh"}),
    ],
)
def test_completes(script: Path, tmp_path: Path, line: str, expected: set[str]) -> None:
    (tmp_path / "my.yaml").touch()
    (tmp_path / "my.jsonl").touch()
    (tmp_path / "my_folder").mkdir()
    assert {word for word in complete(script, tmp_path, line) if "max_tool_response" not in word} == expected


def test_lists_everything(script: Path, tmp_path: Path) -> None:
    assert complete(script, tmp_path, "megarl ") == set(COMMANDS)
    assert complete(script, tmp_path, "megarl train a.yaml ") == {f"{key}=" for key, _ in describe_keys()}
    assert complete(script, tmp_path, "megarl recipes ") == set(list_recipes())


def test_values_have_their_key_where_words_do_not_end_at_equals(script: Path, tmp_path: Path) -> None:
    assert complete(script, tmp_path, "megarl train a.yaml algorithm=dap", " ") == {"algorithm=dapo"}


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_prints_without_torch(shell: str) -> None:
    probe = f"import sys; from megarl.completion import main; main([{shell!r}]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == completion.build_script(shell) and "@" not in done.stdout.replace("[@]", "")
