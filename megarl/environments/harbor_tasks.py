"""Task folders in Harbor's format: `task.toml`, `instruction.md`, `environment/`, `tests/test.sh`.

What a task asks for and we do not have is an error that names it, never left out in silence: a task that runs in
another place than its author's is another task.
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
"""In /logs/verifier, the first that there is counts."""
MAX_REWARD_BYTES = 1 << 20
_MAX_DEPTH = 6  # folders below the one that is named


@dataclass(frozen=True)
class Task:
    """name: the folder's, relative to the one that was named. image: to be had from a registry; builds: it has a
    Dockerfile; neither: any place will do. Times in seconds, sizes in MiB; 0: the task does not say."""

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
    """Those in a folder, by name. Raises ConfigError where there is none, and for the first that cannot be run."""
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    found = [root] if (root / "task.toml").exists() else sorted(_find_tasks(root, _MAX_DEPTH))
    if not found:
        raise ConfigError(f"{folder} has no folder with a task.toml")
    return tuple(_read_task(root, path) for path in found)


def _find_tasks(folder: Path, depth: int) -> list[Path]:
    inside = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink() and path.name[0] != "."]
    tasks = [path for path in inside if (path / "task.toml").exists()]
    if depth > 1:
        tasks += [task for path in inside if path not in tasks for task in _find_tasks(path, depth - 1)]
    return tasks


def _read_task(root: Path, folder: Path) -> Task:
    name = folder.resolve().name if folder == root else folder.relative_to(root).as_posix()
    where = f"task {name}"

    def need(fine: bool, what: str) -> None:
        if not fine:
            raise ConfigError(f"{where}: {what}")

    try:
        about = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: task.toml cannot be read, {error}") from None
    need("steps" not in about, "has several steps; only tasks of one step can be run")
    need((folder / "instruction.md").is_file(), "has no instruction.md")
    need((folder / "tests" / "test.sh").is_file(), "has no verifier, tests/test.sh; without one there is no reward")
    place, verifier, agent = (_get_table(about, key, where) for key in ("environment", "verifier", "agent"))
    need(verifier.get("environment_mode", "shared") == "shared", "wants its verifier in a container of its own")
    for key, what in (("environment", "an environment of its own"), ("collect", "hooks that collect files")):
        need(key not in verifier, f"has {what} for its verifier, which cannot be had")
    for key in ("healthcheck", "mcp_servers", "skills_dir"):
        need(not place.get(key), f"has `{key}` in its environment, which cannot be had")
    need(not place.get("gpus"), "wants GPUs")
    need(place.get("os", "linux") == "linux", f"wants the system {place.get('os')!r}")
    composed = [path.name for path in (folder / "environment").glob("docker-compose.y*ml")]
    need(not composed, f"has {composed[:1]}; only a single container can be had")
    mode = place.get("network_mode", "public" if place.get("allow_internet", True) else "no-network")
    need(mode in ("public", "no-network"), f"wants the network mode {mode!r}; there are public and no-network")
    text = (folder / "instruction.md").read_text(encoding="utf-8")
    return Task(
        name,
        folder,
        _strip_canary(text),
        str(place.get("docker_image") or ""),
        (folder / "environment" / "Dockerfile").is_file() and not place.get("docker_image"),
        str(place.get("workdir") or ""),
        mode == "public",
        _get_strings(place, "env", f"{where}: [environment]"),
        _get_strings(verifier, "env", f"{where}: [verifier]"),
        str(agent.get("user") or ""),
        str(verifier.get("user") or ""),
        _get_number(verifier, "timeout_sec", 600.0, f"{where}: [verifier]"),
        _get_number(place, "build_timeout_sec", 600.0, f"{where}: [environment]"),
        int(_get_number(place, "memory_mb", 0, f"{where}: [environment]")),
        int(_get_number(place, "storage_mb", 0, f"{where}: [environment]")),
        _get_number(place, "cpus", 0, f"{where}: [environment]"),
    )


def _get_table(about: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    found = about.get(key) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: `{key}` in task.toml must be a table")
    return found


def _get_strings(table: Mapping[str, Any], key: str, where: str) -> dict[str, str]:
    found = table.get(key) or {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ConfigError(f"{where}: `{key}` must map names to text")
    return found


def _get_number(table: Mapping[str, Any], key: str, default: float, where: str) -> float:
    found = table.get(key, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < math.inf:
        raise ConfigError(f"{where}: `{key}` must be a number that is not negative")
    return float(found)


def _strip_canary(text: str) -> str:
    """Without the lines at its beginning that only mark it as not to be trained on."""
    lines = text.split("\n")
    while lines and (not lines[0].strip() or ("canary" in lines[0].lower() and lines[0].startswith(("#", "<!--")))):
        lines.pop(0)
    return "\n".join(lines).strip()


def parse_reward(files: Mapping[str, bytes]) -> tuple[float, dict[str, float]]:
    """The reward and its parts that a verifier wrote, of the files in /logs/verifier. Raises ValueError for what is no
    number, and where there is none."""
    name = next((name for name in REWARD_FILES if name in files), None)
    if name is None:
        raise ValueError("it wrote neither /logs/verifier/reward.json nor /logs/verifier/reward.txt")
    text = files[name].decode("utf-8", errors="replace").strip()
    try:
        found = json.loads(text) if name == "reward.json" else {"reward": float(text)}
    except ValueError:
        raise ValueError(f"its {name} cannot be read: {text[:100]!r}") from None
    fine = isinstance(found, dict) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        for value in found.values()
    )
    if not fine or not found:
        raise ValueError(f"its {name} is not made of finite numbers: {text[:100]!r}")
    if "reward" not in found and len(found) > 1:
        raise ValueError(f"its {name} has no `reward`, but {', '.join(sorted(found))}")
    key = "reward" if "reward" in found else next(iter(found))
    return float(found[key]), {name: float(value) for name, value in found.items() if name != key}
