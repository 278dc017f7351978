"""The command `megarl`: its commands, their help, suggestions and versions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import megarl
from megarl import __main__ as program
from megarl.config import describe_keys
from megarl.train import EVERYDAY_KEYS

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.alone


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("option", ["-V", "--version"])
@pytest.mark.parametrize(
    "arguments", [["megarl"], ["megarl.train"], ["megarl.eval"], ["megarl.torchrun"], ["megarl", "view"]]
)
def test_prints_version(arguments: list[str], option: str) -> None:
    done = run("-m", *arguments, option)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"MegaRL {megarl.__version__}\n", "")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_has_a_line_for_each_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: megarl COMMAND ..."
    for name, command in program.COMMANDS.items():
        (words,) = [line.split() for line in lines if line.split()[:1] == [name]]
        assert words == [name, *command.meaning.split()]
    assert {"train", "eval", "chat", "view", "report", "plan", "doctor"} <= set(program.COMMANDS)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", [name for name in program.COMMANDS if name != "torchrun"])
def test_help_of_a_command_does_not_import_torch(name: str) -> None:
    """Torch takes seconds to import. `torchrun` is torch's own program."""
    probe = (
        "import sys; from megarl.__main__ import main\n"
        f"try: main([{name!r}, '--help'])\n"
        "finally: print([name for name in ('torch', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    done = run("-c", probe)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.startswith(f"usage: megarl {name} ") and done.stdout.endswith("\n[]\n")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("trian", "no command trian; did you mean train?"),
        ("docter", "no command docter; did you mean doctor?"),
        ("zzzz", "no command zzzz; see"),
        ("my.yaml", "no command my.yaml; did you mean megarl train my.yaml?"),
        ("--nonsense", "unrecognized arguments: --nonsense; see megarl --help"),
    ],
)
def test_unknown_commands_are_one_line(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([argument]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_module_without_a_command_checks_the_machine() -> None:
    assert run("-m", "megarl").stdout.splitlines()[0] == run("-m", "megarl", "doctor").stdout.splitlines()[0]


def test_help_of_train_groups_everyday_keys() -> None:
    text = run("-m", "megarl", "train", "--help").stdout
    keys = [key for group in EVERYDAY_KEYS.values() for key in group]
    assert set(keys) <= {name for name, _ in describe_keys()} and 10 <= len(keys) <= 16
    lines = text.splitlines()
    for group, members in EVERYDAY_KEYS.items():
        start = lines.index(f"  {group}")
        listed = [line.split()[0] for line in lines[start + 1 :] if line.startswith("    ") and line[4] != " "]
        assert listed[: len(members)] == list(members), group
    assert "Peak learning rate (default: 1e-06)" in text
    assert f"{len(describe_keys()) - len(keys)} more keys" in text and "--keys" in text
    assert lines[-1].startswith("example: megarl train configs/quickstart.yaml ")
