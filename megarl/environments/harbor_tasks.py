"""Read task folders in Harbor's format: `task.toml`, `instruction.md`, `environment/`, `tests/test.sh`.

An unsupported feature is an error that names it: without it the task would be another one.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from megarl.config import ConfigError

REWARD_FILES = ("reward.json", "reward.txt")
"""Files in /logs/verifier, in order of precedence."""
MAX_REWARD_BYTES = 1 << 20
_MAX_DEPTH = 6  # levels of subfolders searched


_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _EnvironmentTable(BaseModel, strict=True):
    """`[environment]` of task.toml, in seconds and MiB; 0 means unspecified."""

    docker_image: str = ""
    workdir: str = ""
    env: dict[str, str] = {}
    build_timeout_sec: _Number = 600.0
    memory_mb: _Number = 0
    storage_mb: _Number = 0
    cpus: _Number = 0


class _VerifierTable(BaseModel, strict=True):
    env: dict[str, str] = {}
    user: str = ""
    timeout_sec: _Number = 600.0


class _AgentTable(BaseModel, strict=True):
    user: str = ""


class Task(BaseModel, strict=True, frozen=True):
    """A task, with the tables of its task.toml.

    Attributes:
        name: its folder, relative to the one given
        has_container: whether it has an image or a Dockerfile; otherwise it runs in the sandbox
        has_network: whether its container may use the network
    """

    name: str
    folder: Path
    instruction: str
    has_container: bool
    has_network: bool
    environment: _EnvironmentTable = _EnvironmentTable()
    verifier: _VerifierTable = _VerifierTable()
    agent: _AgentTable = _AgentTable()


def read_tasks(folder: str) -> tuple[Task, ...]:
    """Read the tasks in a folder, sorted by name. Raises ConfigError if there are none, or one cannot run."""
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"no folder {folder}")
    folders = [root] if (root / "task.toml").exists() else sorted(_find_tasks(root, _MAX_DEPTH))
    if not folders:
        raise ConfigError(f"{folder} has no folder with a task.toml")
    return tuple(_read_task(root, path) for path in folders)


def _find_tasks(folder: Path, depth: int) -> list[Path]:
    subfolders = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink() and path.name[0] != "."]
    tasks = [path for path in subfolders if (path / "task.toml").exists()]
    if depth > 1:
        tasks += [task for path in subfolders if path not in tasks for task in _find_tasks(path, depth - 1)]
    return tasks


def _read_task(root: Path, folder: Path) -> Task:
    name = folder.resolve().name if folder == root else folder.relative_to(root).as_posix()
    where = f"task {name}"

    def need(fine: bool, what: str) -> None:
        if not fine:
            raise ConfigError(f"{where}: {what}")

    try:
        settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: task.toml cannot be read, {error}") from None
    need("steps" not in settings, "has several steps; only tasks of one step can be run")
    need((folder / "instruction.md").is_file(), "has no instruction.md")
    need((folder / "tests" / "test.sh").is_file(), "has no verifier, tests/test.sh; without one there is no reward")
    for key in ("environment", "verifier", "agent"):
        need(isinstance(settings.setdefault(key, {}), dict), f"`{key}` in task.toml must be a table")
    environment, verifier = settings["environment"], settings["verifier"]
    need(verifier.get("environment_mode", "shared") == "shared", "needs a separate container for its verifier")
    for key, what in (("environment", "a separate environment"), ("collect", "hooks that collect files")):
        need(key not in verifier, f"has {what} for its verifier, which is not supported")
    for key in ("healthcheck", "mcp_servers", "skills_dir"):
        need(not environment.get(key), f"has `{key}` in its environment, which is not supported")
    need(not environment.get("gpus"), "wants GPUs")
    need(environment.get("os", "linux") == "linux", f"requires the operating system {environment.get('os')!r}")
    compose_files = [path.name for path in (folder / "environment").glob("docker-compose.y*ml")]
    need(not compose_files, f"has {compose_files[:1]}; only a single container is supported")
    mode = environment.get("network_mode", "public" if environment.get("allow_internet", True) else "no-network")
    need(mode in ("public", "no-network"), f"wants the network mode {mode!r}; supported are public and no-network")
    lines = (folder / "instruction.md").read_text(encoding="utf-8").split("\n")
    # Leading lines may only mark the text as excluded from training data.
    while lines and (not lines[0].strip() or ("canary" in lines[0].lower() and lines[0].startswith(("#", "<!--")))):
        lines.pop(0)
    try:
        return Task(
            **{key: settings[key] for key in ("environment", "verifier", "agent")},
            name=name,
            folder=folder,
            instruction="\n".join(lines).strip(),
            has_container=bool(environment.get("docker_image")) or (folder / "environment" / "Dockerfile").is_file(),
            has_network=mode == "public",
        )
    except ValidationError as error:
        fault = error.errors()[0]
        keys = ".".join(map(str, fault["loc"]))
        raise ConfigError(f"{where}: `{keys}` in task.toml: {fault['msg']}") from None


def parse_reward(files: Mapping[str, bytes]) -> tuple[float, dict[str, float]]:
    """Return the reward and its parts from the files in /logs/verifier.

    Raises ValueError if there is no reward, or it is not a finite number.
    """
    name = next((name for name in REWARD_FILES if name in files), None)
    if name is None:
        raise ValueError("it wrote neither /logs/verifier/reward.json nor /logs/verifier/reward.txt")
    text = files[name].decode("utf-8", errors="replace").strip()
    try:
        values = json.loads(text) if name == "reward.json" else {"reward": float(text)}
    except ValueError:
        raise ValueError(f"its {name} cannot be read: {text[:100]!r}") from None
    is_valid = isinstance(values, dict) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        for value in values.values()
    )
    if not is_valid or not values:
        raise ValueError(f"its {name} is not made of finite numbers: {text[:100]!r}")
    if "reward" not in values and len(values) > 1:
        raise ValueError(f"its {name} has no `reward`, but {', '.join(sorted(values))}")
    key = "reward" if "reward" in values else next(iter(values))
    return float(values[key]), {name: float(value) for name, value in values.items() if name != key}
