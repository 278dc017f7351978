"""Which checkpoints a run has, which of them are whole, and which one a path means. Pure: it reads files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megarl.checkpoint import manifest
from megarl.checkpoint.manifest import Entry
from megarl.config import ConfigError

INDEX = ".metadata"
"""In the folder of a model."""


def folders_of(run: Path) -> list[Path]:
    """Checkpoints of a run, the oldest first, with those that were never finished."""
    found = {}
    for path in (run / "checkpoints").iterdir():
        name = path.name.removesuffix(".tmp")
        if path.is_dir() and name.startswith("step_") and name[5:].isdecimal():
            found[int(name[5:]), path.name] = path
    return [found[key] for key in sorted(found)]


def fault_in(folder: Path, hashes: bool) -> str | None:
    """What is wrong with a checkpoint."""
    if folder.name.endswith(".tmp"):
        return "was never finished"
    found = manifest.read(folder)
    if isinstance(found, str):
        return found
    files = found[1]
    fault = manifest.size_fault(folder, files, files)
    if fault is None and hashes:
        fault = manifest.content_fault(folder, files, files)
    host = manifest.host_state(folder)
    return fault or (host if isinstance(host, str) else None)


def chosen(path: Path) -> Path:
    """The checkpoint that a path means. Raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}; name a run folder or a checkpoint in it")
    if (path / manifest.NAME).is_file():
        return path
    if path.name.startswith("step_"):
        raise ConfigError(f"{path} is no whole checkpoint: {fault_in(path, hashes=False)}")
    if not (path / "checkpoints").is_dir():
        raise ConfigError(f"{path} is no checkpoint ({manifest.NAME} is missing) and no run folder with checkpoints")
    for folder in reversed(folders_of(path)):
        if fault_in(folder, hashes=False) is None:
            return folder
    raise ConfigError(f"{path / 'checkpoints'} has no whole checkpoint")


def models_in(files: Mapping[str, Entry]) -> list[str]:
    return sorted(name.removesuffix(f"/{INDEX}") for name in files if name.endswith(f"/{INDEX}"))
