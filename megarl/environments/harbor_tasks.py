"""Read task folders in Harbor's format: `task.toml`, `instruction.md`, `environment/`, `tests/test.sh`.

An unsupported feature of a task is an error that names it, never ignored: a task that runs in another setting than its
author's is another task.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config import ConfigError

REWARD_FILES = ("reward.json", "reward.txt")
"""Files in /logs/verifier, in order of precedence."""
MAX_REWARD_BYTES = 1 << 20
_MAX_DEPTH = 6  # levels of subfolders searched


@dataclass(frozen=True)
class Task:
    """A task.

    Without `image` and `has_dockerfile` it runs in the sandbox. Times are in seconds and sizes in MiB; 0 means
    unspecified.

    Attributes:
        name: its folder, relative to the one given
        image: image in a registry
        has_dockerfile: its image is built from a Dockerfile
    """

    name: str
    folder: Path
    instruction: str
    image: str = ""
    has_dockerfile: bool = False
    workdir: str = ""
    has_network: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    verifier_user: str = ""
    verifier_timeout: float = 600.0
    build_timeout: float = 600.0
    memory_mb: int = 0
    storage_mb: int = 0
    cpus: float = 0.0


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
    environment, verifier, agent = (_get_table(settings, key, where) for key in ("environment", "verifier", "agent"))
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
    text = (folder / "instruction.md").read_text(encoding="utf-8")
    return Task(
        name,
        folder,
        _strip_canary(text),
        str(environment.get("docker_image") or ""),
        (folder / "environment" / "Dockerfile").is_file() and not environment.get("docker_image"),
        str(environment.get("workdir") or ""),
        mode == "public",
        _get_strings(environment, "env", f"{where}: [environment]"),
        _get_strings(verifier, "env", f"{where}: [verifier]"),
        str(agent.get("user") or ""),
        str(verifier.get("user") or ""),
        _get_number(verifier, "timeout_sec", 600.0, f"{where}: [verifier]"),
        _get_number(environment, "build_timeout_sec", 600.0, f"{where}: [environment]"),
        int(_get_number(environment, "memory_mb", 0, f"{where}: [environment]")),
        int(_get_number(environment, "storage_mb", 0, f"{where}: [environment]")),
        _get_number(environment, "cpus", 0, f"{where}: [environment]"),
    )


def _get_table(document: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    table = document.get(key) or {}
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: `{key}` in task.toml must be a table")
    return table


def _get_strings(table: Mapping[str, Any], key: str, where: str) -> dict[str, str]:
    strings = table.get(key) or {}
    if not isinstance(strings, dict) or not all(isinstance(value, str) for value in strings.values()):
        raise ConfigError(f"{where}: `{key}` must map names to text")
    return strings


def _get_number(table: Mapping[str, Any], key: str, default: float, where: str) -> float:
    number = table.get(key, default)
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
        raise ConfigError(f"{where}: `{key}` must be a number that is not negative")
    return float(number)


def _strip_canary(text: str) -> str:
    """Strip leading lines that only mark the text as excluded from training data."""
    lines = text.split("\n")
    while lines and (not lines[0].strip() or ("canary" in lines[0].lower() and lines[0].startswith(("#", "<!--")))):
        lines.pop(0)
    return "\n".join(lines).strip()


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
