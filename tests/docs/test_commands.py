"""Every command of every page: its program is there, its options are known, its configuration and overrides load."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pages import COMING, ROOT, Command, blocks, commands, pages  # noqa: E402

from megarl.config import ConfigError, load_config  # noqa: E402

pytestmark = [pytest.mark.alone, pytest.mark.nightly]

NAMED = {
    "hf": "a program of Hugging Face's, which needs the network",
    "git": "not ours",
    "docker": "needs Docker and, to be of use, a GPU",
    "srun": "needs Slurm",
    "pip": "changes the environment",
    "-m pip": "changes the environment",
    "-m pytest": "would be this test",
    "-m tensorboard.main": "a server, not ours",
    "export": "the shell's",
    "cd": "the shell's",
    "kill": "the shell's",
    "podman": "not ours",
    "apt-get": "changes the machine",
    ".venv/bin/ruff": "tests/run.sh begins with it",
    ".venv/bin/mypy": "tests/run.sh begins with it",
    "-m megarl": "run by tests/test_main.py",
}
"""Commands that are not tried, and why."""
PLACEHOLDER = re.compile(r"[\[<(]|^[A-Z_]+$|\.\.\.")
ALL = [(str(page.relative_to(ROOT)), command) for page in pages() for command in commands(page.read_text())]
OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_0-9]+)*=")
TRAINED = (
    "-m megarl.train",
    "launch/single_node.sh",
    "launch/multi_node.sh",
    "slurm/ppo_moe.sh",
    "launch/quickstart.sh",
)


def here(program: str) -> bool:
    """Whether the program is one of this project's, and is there."""
    if program.startswith("-m megarl"):
        file = ROOT / program.removeprefix("-m ").replace(".", "/")
        return file.with_suffix(".py").is_file() or (file / "__main__.py").is_file()
    return "/" in program and (ROOT / program).is_file()


def trained(command: Command) -> list[str] | None:
    """The configuration and overrides of a command that trains; None for another."""
    if command.program == "-m megarl.torchrun" and "megarl.train" in command.arguments:
        return command.arguments[command.arguments.index("megarl.train") + 1 :]
    if command.program == "launch/quickstart.sh":
        return ["configs/quickstart.yaml", *command.arguments]
    return command.arguments if command.program in TRAINED else None


@pytest.mark.parametrize(("page", "command"), ALL, ids=lambda value: value if isinstance(value, str) else value.program)
def test_its_program_is_here_or_it_is_named(page: str, command: Command) -> None:
    program, first = command.program, command.words[0]
    assert "python" not in first or first == ".venv/bin/python", f"{page}: {' '.join(command.words)}"
    assert here(program) or program in NAMED or program in COMING, f"{page}: {' '.join(command.words)}"
    if program.endswith(".sh"):
        subprocess.run(["bash", "-n", str(ROOT / program)], check=True)


@pytest.mark.parametrize(("page", "command"), ALL, ids=lambda value: value if isinstance(value, str) else value.program)
def test_what_trains_loads(page: str, command: Command, tmp_path: Path) -> None:
    arguments = trained(command)
    if arguments is None:
        return
    argument = [item for item in arguments if not PLACEHOLDER.match(item)]
    options = [item for item in argument if item.startswith("-")]
    assert set(options) <= {"--dry-run", "--keys"}, f"{page}: {options}"
    remaining = [item for item in argument if not item.startswith("-")]
    overrides = [item for item in remaining if OVERRIDE.match(item)]
    configs = [item for item in remaining if item not in overrides]
    assert len(configs) <= 1, f"{page}: {configs}"
    if configs and not (file := ROOT / configs[0]).is_file():
        # One of the reader's own, which the page shows, or a run's.
        shown = [block.text for block in blocks((ROOT / page).read_text()) if block.language == "yaml"]
        assert configs[0].startswith(("runs/", "my")), f"{page}: there is no {configs[0]}"
        file = tmp_path / "shown.yaml"
        file.write_text(shown[0] if shown else "")
        load_config(file, overrides)
    elif configs:
        load_config(file, overrides)


def test_their_options_are_known() -> None:
    requested = {}
    for page, command in ALL:
        program = command.program
        if program.endswith(".sh") or not here(program) or program in NAMED or trained(command) is not None:
            continue
        if program != "-m megarl.torchrun":
            requested[json.dumps([program, command.arguments])] = page
    script = Path(__file__).parent / "parse_commands.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        input=f"[{', '.join(requested)}]",
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    wrong = [f"{page}: {item}: {what}" for (item, page), what in zip(requested.items(), said, strict=True) if what]
    assert not wrong, "\n".join(wrong)
    assert len(requested) > 15


def test_a_wrong_option_would_be_found() -> None:
    script = Path(__file__).parent / "parse_commands.py"
    requested = [["tools/report.py", ["RUN", "--nonsense"]], ["tools/report.py", ["RUN"]]]
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(requested),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    first, second = json.loads(done.stdout)
    assert "--nonsense" in first and second == ""


def test_named_ones_are_used() -> None:
    """A list of exceptions that nobody needs hides the next mistake."""
    used = {command.program for _, command in ALL}
    assert "-m megarl.train" in used and "tools/report.py" in used
    with pytest.raises(ConfigError):
        load_config(ROOT / "configs/quickstart.yaml", ["train.nonsense=1"])
