"""Commands in the documentation: programs exist, options are known, configurations load."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pages import PLANNED, ROOT, Command, blocks, commands, files, pages  # noqa: E402

from megarl.config import ConfigError, load_config  # noqa: E402

pytestmark = [pytest.mark.alone, pytest.mark.nightly]

NOT_RUN = {
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
"""Commands that the tests do not run, and why."""
PLACEHOLDER = re.compile(r"[\[<(]|^[A-Z_]+$|\.\.\.")
COMMANDS = [(str(page.relative_to(ROOT)), command) for page in pages() for command in commands(page.read_text())]
OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_0-9]+)*=")
TRAINING_PROGRAMS = (
    "-m megarl.train",
    "launch/single_node.sh",
    "launch/multi_node.sh",
    "slurm/ppo_moe.sh",
    "launch/quickstart.sh",
)


def exists(program: str) -> bool:
    """Whether the program is part of this project."""
    if program.startswith("-m megarl"):
        file = ROOT / program.removeprefix("-m ").replace(".", "/")
        return file.with_suffix(".py").is_file() or (file / "__main__.py").is_file()
    return "/" in program and (ROOT / program).is_file()


def training_arguments(command: Command) -> list[str] | None:
    """Return the configuration and overrides of a training command, else None."""
    if command.program == "-m megarl.torchrun" and "megarl.train" in command.arguments:
        return command.arguments[command.arguments.index("megarl.train") + 1 :]
    if command.program == "launch/quickstart.sh":
        return ["configs/quickstart.yaml", *command.arguments]
    return command.arguments if command.program in TRAINING_PROGRAMS else None


@pytest.mark.parametrize(
    ("page", "command"), COMMANDS, ids=lambda value: value if isinstance(value, str) else value.program
)
def test_program_exists(page: str, command: Command) -> None:
    program, first = command.program, command.words[0]
    assert "python" not in first or first == ".venv/bin/python", f"{page}: {' '.join(command.words)}"
    is_shown = program in files((ROOT / page).read_text())
    assert exists(program) or is_shown or program in NOT_RUN or program in PLANNED, f"{page}: {' '.join(command.words)}"
    if program.endswith(".sh"):
        subprocess.run(["bash", "-n", str(ROOT / program)], check=True)


@pytest.mark.parametrize(
    ("page", "command"), COMMANDS, ids=lambda value: value if isinstance(value, str) else value.program
)
def test_training_command_loads(page: str, command: Command, tmp_path: Path) -> None:
    arguments = training_arguments(command)
    if arguments is None:
        return
    without_placeholders = [item for item in arguments if not PLACEHOLDER.match(item)]
    options = [item for item in without_placeholders if item.startswith("-")]
    assert set(options) <= {"--dry-run", "--keys", "--rehearse", "--show-prompt"}, f"{page}: {options}"
    positional = [item for item in without_placeholders if not item.startswith("-")]
    overrides = [item for item in positional if OVERRIDE.match(item)]
    configs = [item for item in positional if item not in overrides]
    assert len(configs) <= 1, f"{page}: {configs}"
    if configs and not (file := ROOT / configs[0]).is_file():
        # The reader's own configuration, shown on the page, or one of a run folder.
        text = (ROOT / page).read_text()
        yaml_blocks = [block.text for block in blocks(text) if block.language == "yaml"]
        if configs[0] in files(text):
            yaml_blocks = [files(text)[configs[0]]]
        assert configs[0].startswith(("runs/", "my")), f"{page}: there is no {configs[0]}"
        file = tmp_path / "config.yaml"
        file.write_text(yaml_blocks[0] if yaml_blocks else "")
        load_config(file, overrides)
    elif configs:
        load_config(file, overrides)


def test_options_are_known() -> None:
    command_pages = {}
    for page, command in COMMANDS:
        program = command.program
        if (
            program.endswith(".sh")
            or not exists(program)
            or program in NOT_RUN
            or training_arguments(command) is not None
        ):
            continue
        if program != "-m megarl.torchrun":
            command_pages[json.dumps([program, command.arguments])] = page
    script = Path(__file__).parent / "parse_commands.py"
    process = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        input=f"[{', '.join(command_pages)}]",
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=500,
    )
    assert process.returncode == 0, process.stderr
    messages = json.loads(process.stdout)
    errors = [
        f"{page}: {item}: {message}"
        for (item, page), message in zip(command_pages.items(), messages, strict=True)
        if message
    ]
    assert not errors, "\n".join(errors)
    assert len(command_pages) > 15


def test_detects_unknown_options() -> None:
    script = Path(__file__).parent / "parse_commands.py"
    command_pages = [["-m megarl.observe.run_report", ["RUN", "--nonsense"]], ["-m megarl.observe.run_report", ["RUN"]]]
    process = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(command_pages),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    first, second = json.loads(process.stdout)
    assert "--nonsense" in first and second == ""


def test_pages_contain_the_main_commands() -> None:
    tested = {command.program for _, command in COMMANDS}
    assert "-m megarl.train" in tested and "-m megarl.observe.run_report" in tested
    with pytest.raises(ConfigError):
        load_config(ROOT / "configs/quickstart.yaml", ["train.nonsense=1"])
