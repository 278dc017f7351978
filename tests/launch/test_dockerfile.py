"""The steps of launch/Dockerfile, played in an empty folder without Docker.

pip records its arguments in place of installing packages, except for MegaRL itself; the environment has the packages of
this one. tests/launch/test_cuda_list.py resolves the list that pip would install.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.nightly]

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
UBUNTU = "http://archive.ubuntu.com/ubuntu/dists/noble"
"""Ubuntu 24.04."""
PRIVATE_OR_BIG = (".git", ".venv", "runs", "models", "data")


def read_dockerfile() -> list[tuple[str, str]]:
    """Return the instructions with their arguments, each on one line."""
    lines = (LAUNCH / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if line and not line.startswith("#"))
    steps = (line.split(None, 1) for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines())
    return [(instruction, arguments) for instruction, arguments in steps]


def is_ignored(path: str) -> bool:
    """Whether launch/Dockerfile.dockerignore excludes a file or one of its folders, by Docker's rules."""
    for line in (LAUNCH / "Dockerfile.dockerignore").read_text(encoding="utf-8").split():
        assert not line.startswith(("!", "#")), "the test does not know exceptions and comments"
        anywhere, pattern = line.startswith("**/"), re.escape(line.removeprefix("**/")).replace(r"\*", "[^/]*")
        if re.match(("(.*/)?" if anywhere else "") + pattern + "(/|$)", path):
            return True
    return False


def copy_context(target: Path) -> None:
    """Copy what `COPY .` copies."""
    for folder, names, files in os.walk(ROOT):
        parent = Path(folder).relative_to(ROOT)
        names[:] = [name for name in names if not is_ignored(str(parent / name))]
        (target / parent).mkdir(parents=True, exist_ok=True)
        for name in files:
            if not is_ignored(str(parent / name)):
                shutil.copy(Path(folder) / name, target / parent / name)


STAND_IN = """#!/bin/bash
# The Python next to this file, whose pip records its arguments and installs MegaRL alone.
python=$(dirname "$0")/python3
case "$*" in
"-m venv "*)
    "$python" "$@" --without-pip
    echo "$PACKAGES" >"$("$4/bin/python3" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth"
    ln -sf "$(readlink -f "$4/bin/python3")" "$4/bin/python3"
    rm "$4/bin/python"
    cp "$0" "$4/bin/python" ;;
"-m pip "*" install "*)
    printf '%q ' "$@" >>"$CALLS"
    echo >>"$CALLS"
    case "$*" in *"--editable .") exec "$python" "$@" --no-index --ignore-installed ;; esac ;;
*) exec "$python" "$@" ;;
esac
"""


@dataclass
class Image:
    """What the steps leave behind."""

    folder: Path
    """What WORKDIR names."""
    environment: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Commands of RUN that were not run."""
    calls: list[list[str]] = field(default_factory=list)
    """Arguments of each `pip install`."""

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Play the Dockerfile."""
    root = tmp_path_factory.mktemp("image")
    (root / "bin").mkdir()
    (root / "bin/python3").symlink_to(Path(sys.executable).resolve())
    stand_in = root / "bin/python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    ours = ("MEGARL_", "PYTHON", "VIRTUAL_ENV")
    result = Image(root, {key: value for key, value in os.environ.items() if not key.startswith(ours)})
    result.environment |= {
        "MEGARL_PYTHON": str(stand_in),
        "PACKAGES": sysconfig.get_path("purelib"),
        "CALLS": str(root / "calls"),
    }
    for instruction, arguments in read_dockerfile():
        match instruction:
            case "ENV":
                result.environment |= dict(item.split("=", 1) for item in shlex.split(arguments))
            case "WORKDIR":
                result.folder = root / arguments.lstrip("/")
            case "COPY":
                source, target = arguments.split()
                assert source == "."
                copy_context(root / target.lstrip("/"))
            case "RUN":
                for command in re.split(r"\s*&&\s*", arguments):
                    if "launch/" in command:
                        result.run("bash", "-c", command)
                    else:
                        result.skipped.append(command)
            case "CMD":
                result.command = json.loads(arguments)
            case _:
                assert instruction == "FROM", f"the test does not know {instruction}"
    result.calls = [shlex.split(line) for line in (root / "calls").read_text().splitlines()]
    return result


def test_image_has_the_project_and_nothing_private_or_big(image: Image) -> None:
    names = {file.name for file in image.folder.iterdir()}
    assert names >= {"setup.py", "README.md", "megarl", "launch", "configs", "tools", "tests", "slurm", "docs"}
    assert names & set(PRIVATE_OR_BIG) == {".venv"}  # made there
    files = [file for file in image.folder.rglob("*") if file.is_file() and ".venv" not in file.parts]
    assert [str(file) for file in files if file.stat().st_size > 2**20] == []
    assert sum(file.stat().st_size for file in files) < 30 * 2**20


def test_context_excludes_what_git_ignores() -> None:
    for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split():
        for path in (f"{line.replace('*', 'megarl').rstrip('/')}/file", f"megarl/{line.replace('*', 'x').rstrip('/')}"):
            assert is_ignored(path) or (line in (".venv", "runs/") and path.startswith("megarl/")), path
    assert all(is_ignored(f"{name}/file") and is_ignored(name) for name in PRIVATE_OR_BIG)
    for path in ("megarl/data/table.py", "megarl/models/family.py", ".gitignore", "runs.md", "launch/install.sh"):
        assert not is_ignored(path), path


def test_installer_asks_for_the_list(image: Image) -> None:
    """Each package of the list is given to pip once, with the constraints or without its dependencies."""
    requirements = []
    for call in image.calls:
        pending = call[call.index("install") + 1 :]
        if pending[-2:] != ["--editable", "."]:
            assert "--no-deps" in call or "launch/constraints-cuda.txt" in call, call
        while pending:
            argument = pending.pop(0)
            if argument == "-r":
                requirements += (image.folder / pending.pop(0)).read_text().split()
            elif argument in ("-c", "--progress-bar", "--editable"):
                pending.pop(0)
            elif not argument.startswith("-"):
                requirements.append(argument)
    lines = (LAUNCH / "requirements-cuda.txt").read_text(encoding="utf-8").splitlines()
    expected = [line for line in lines if line and not line.startswith("#")]
    assert sorted(requirements) == sorted([*expected, "setuptools", "wheel", "ninja"])
    assert (image.folder / ".venv/installed-by-megarl").read_text().startswith("cuda ")
    assert image.run("bash", "launch/install.sh") == ""  # a second call finds nothing to do


def test_image_runs_megarl(image: Image) -> None:
    assert image.run(*image.command, "--help").startswith("usage: megarl COMMAND")
    probe = "import megarl; print(megarl.__file__)"
    assert image.run(image.command[0], "-c", probe).strip() == str(image.folder / "megarl/__init__.py")
    location = "import importlib.metadata as m; print(m.distribution('megarl').read_text('direct_url.json'))"
    assert json.loads(image.run(image.command[0], "-c", location))["url"] == image.folder.as_uri()
    tests = ("-m", "pytest", "-c", "tests/pytest.ini", "--rootdir", ".", "-q", "-p", "no:cacheprovider")
    assert re.search(r"^\d+ passed", image.run(image.command[0], *tests, "tests/test_imports.py"), re.MULTILINE)


def test_steps_outside_of_the_project(image: Image) -> None:
    """The base image has torch's CUDA; the other commands install packages and remove caches."""
    (base,) = [arguments for instruction, arguments in read_dockerfile() if instruction == "FROM"]
    pins = (LAUNCH / "constraints-cuda.txt").read_text(encoding="utf-8")
    (cuda,) = re.findall(r"^cuda-toolkit==(\d+\.\d+)\.", pins, re.MULTILINE)
    assert re.fullmatch(rf"nvidia/cuda:{cuda}\.\d-cudnn-devel-ubuntu24\.04", base)
    known = r"apt-get (update$|install )|rm -rf /(var/lib/apt/lists/\*|root/\.cache/pip)$"
    assert [command for command in image.skipped if not re.match(known, command)] == []


def test_ubuntu_has_the_packages(image: Image) -> None:
    (install,) = [command for command in image.skipped if command.startswith("apt-get install")]
    wanted = {name for name in install.split()[2:] if not name.startswith("-")}
    versions: dict[str, str] = {}
    for component in ("main", "universe"):
        try:
            with urllib.request.urlopen(f"{UBUNTU}/{component}/binary-amd64/Packages.xz", timeout=60) as page:
                text = lzma.decompress(page.read()).decode()
        except urllib.error.HTTPError:
            raise
        except OSError as error:
            pytest.skip(f"{UBUNTU} cannot be reached: {error}")
        versions |= re.findall(r"^Package: (\S+)\n(?:.+\n)*?Version: (\S+)", text, re.MULTILINE)
    assert wanted - versions.keys() == set() and "bubblewrap" in wanted
    assert versions["python3"].startswith("3.12.")
