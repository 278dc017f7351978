"""Completion of `megarl`: bash and zsh run the script and report what they would insert."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import completion
from megarl.__main__ import COMMANDS
from megarl.config import describe_keys
from megarl.config.shipped_files import list_recipes

pytestmark = pytest.mark.alone

CASES: dict[str, set[str]] = {
    "megarl tra": {"train"},
    "megarl try": {"try-reward", "try-tool"},
    ".venv/bin/megarl re": {"report", "recipes"},
    "megarl train --d": {"--dry-run"},
    "megarl plan --gpus": {"--gpus", "--gpus-per-node"},
    "megarl train my": {"my.yaml", "my_folder"},
    "megarl train quickstart_s": {"quickstart_sft", "quickstart_split"},
    "megarl train my.yaml rollout.max_t": {"rollout.max_turns=", "rollout.max_tool_failed_frac="},
    "megarl train my.yaml algorithm=dap": {"dapo"},
    "megarl train my.yaml --dry-run algor": {"algorithm="},
    "megarl train my.yaml --show-prompt algor": {"algorithm="},
    "megarl eval my_folder --samples my.j": {"my.jsonl"},
    "megarl train my.yaml run.export=": {"true", "false"},
    "megarl train my.yaml data.train=my": {"my.yaml", "my.jsonl", "my_folder"},
    "megarl eval my_folder --data my.j": {"my.jsonl"},
    "megarl view my_f": {"my_folder"},
    "megarl completion ": {"bash", "zsh"},
}
"""Lines, and what follows in a folder of my.yaml, my.jsonl and my_folder; without rollout.max_tool_response_tokens."""
COMPLETE_LINES = Path(__file__).parent / "helpers" / "complete_lines.zsh"
needs_zsh = pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh on this machine")


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


def make_files(folder: Path) -> None:
    (folder / "my.yaml").touch()
    (folder / "my.jsonl").touch()
    (folder / "my_folder").mkdir()


@pytest.mark.parametrize(("line", "expected"), CASES.items())
def test_completes(script: Path, tmp_path: Path, line: str, expected: set[str]) -> None:
    make_files(tmp_path)
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


def complete_in_zsh(tmp_path: Path, lines: list[str]) -> list[tuple[set[str], str]]:
    """Return (words offered, line after the tab) of each line, typed into an interactive zsh."""
    script, folder, own = tmp_path / "megarl.zsh", tmp_path / "folder", tmp_path / "own"
    script.write_text(completion.build_script("zsh"))
    folder.mkdir()
    own.mkdir()
    make_files(folder)
    command = ["zsh", "-f", str(COMPLETE_LINES), str(script), str(own), *lines]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    result: list[tuple[set[str], str]] = []
    words: set[str] = set()
    for word in done.stdout.splitlines():
        if word.startswith("["):
            result.append((words, word[1:-1]))
            words = set()
        else:
            words.add(word)
    assert len(result) == len(lines)
    return result


@needs_zsh
def test_zsh_completes(tmp_path: Path) -> None:
    results = complete_in_zsh(tmp_path, list(CASES))
    offered = [{word for word in words if "max_tool_response" not in word} for words, _ in results]
    assert dict(zip(CASES, offered, strict=True)) == CASES


@needs_zsh
def test_zsh_inserts_what_it_offers(tmp_path: Path) -> None:
    expected = {
        "megarl tra": "megarl train ",
        "megarl train my.y": "megarl train my.yaml ",
        "megarl train my.yaml rollout.max_tu": "megarl train my.yaml rollout.max_turns=",
        "megarl train my.yaml algorithm=dap": "megarl train my.yaml algorithm=dapo ",
        "megarl train my.yaml data.train=my_f": "megarl train my.yaml data.train=my_folder/",
        "megarl eval my_folder --data my.j": "megarl eval my_folder --data my.jsonl ",
    }
    lines = [line for _, line in complete_in_zsh(tmp_path, list(expected))]
    assert dict(zip(expected, lines, strict=True)) == expected


@needs_zsh
def test_zsh_lists_everything(tmp_path: Path) -> None:
    results = complete_in_zsh(tmp_path, ["megarl ", "megarl train a.yaml ", "megarl recipes "])
    keys = {f"{key}=" for key, _ in describe_keys()}
    assert [words for words, _ in results] == [set(COMMANDS), keys, set(list_recipes())]
