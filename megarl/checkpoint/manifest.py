"""The manifest of a checkpoint, and how to find valid checkpoints. Pure: it only reads files.

`manifest.json` lists every file with size and SHA-256. Hashing takes a core per 1.5 GB/s: files are hashed while they
are written, and by all ranks together.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from megarl.config import ConfigError

T = TypeVar("T")
FILE_NAME = "manifest.json"


class Entry(NamedTuple):
    bytes: int
    sha256: str


Write = Callable[[Path], Mapping[Path, Entry]]
"""Writes what it knows into a checkpoint's folder, in whatever thread, and returns the files, which are on the disk by
then. Raises OSError."""


def write_nothing(folder: Path) -> dict[Path, Entry]:
    return {}


class HashingFile:
    """A new file that is hashed as it is written, front to back. `failure`: what the file system said no with, since
    torch makes a RuntimeError of it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self.failure = error
            raise
        self._digest.update(data)
        return written

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> Entry:
        """Everything is on the disk from here on."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return Entry(self._file.tell(), self._digest.hexdigest())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, which has been said
            self._file.close()


def write_hashed(path: Path, write: Callable[[HashingFile], T]) -> tuple[T, Entry]:
    """A file of what `write` writes, and its entry. Raises OSError where the file system does not take it."""
    stream = HashingFile(path)
    try:
        return write(stream), stream.finish()
    except Exception as error:
        raise stream.failure or error from None
    finally:
        stream.close()


def sync(path: Path) -> None:
    """What is in a file or folder is on the disk from here on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> Entry:
    with path.open("rb") as stream:
        return Entry(os.fstat(stream.fileno()).st_size, hashlib.file_digest(stream, "sha256").hexdigest())


def split_by_size(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """The files in `parts` shares of about equal bytes; the same whoever asks."""
    result: list[list[str]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        result[least].append(name)
        loads[least] += sizes[name] + 1  # so that empty files are shared, too
    return result


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Entry]] | str:
    """The manifest and its files, or what is wrong with it."""
    try:
        tree = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        files = {name: Entry(entry["bytes"], entry["sha256"]) for name, entry in tree["files"].items()}
    except FileNotFoundError:
        return f"{FILE_NAME} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{FILE_NAME} is broken ({type(error).__name__})"
    for name, entry in files.items():
        inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
        if not inside or type(entry.bytes) is not int or not isinstance(entry.sha256, str):
            return f"{FILE_NAME} is broken (its entry {name!r})"
    if missing := next((name for name in ("host.json",) if name not in files), None):
        return f"{FILE_NAME} does not list {missing}"
    return tree, files


def check_sizes(folder: Path, files: Mapping[str, Entry], names: Iterable[str]) -> str | None:
    for name in names:
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if not (folder / name).is_file() or size != files[name].bytes:
            return f"{name} is truncated or of another size"
    return None


def check_hashes(folder: Path, files: Mapping[str, Entry], names: Iterable[str]) -> str | None:
    for name in names:
        try:
            found = hash_file(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found.sha256 != files[name].sha256:
            return f"{name} differs from its checksum"
    return None


def host_state(folder: Path) -> dict[str, Any] | str:
    """host.json, or what is wrong with it."""
    try:
        tree = json.loads((folder / "host.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"host.json is broken ({type(error).__name__})"
    if not isinstance(tree, dict) or type(tree.get("step")) is not int:
        return "host.json does not say which step it is of"
    return tree


METADATA_FILE = ".metadata"
"""In the folder of a model."""


def list_checkpoints(run: Path) -> list[Path]:
    """Checkpoints of a run, the oldest first, with those that were never finished."""
    found = {}
    for path in (run / "checkpoints").iterdir():
        name = path.name.removesuffix(".tmp")
        if path.is_dir() and name.startswith("step_") and name[5:].isdecimal():
            found[int(name[5:]), path.name] = path
    return [found[key] for key in sorted(found)]


def check_checkpoint(folder: Path, hashes: bool) -> str | None:
    """What is wrong with a checkpoint."""
    if folder.name.endswith(".tmp"):
        return "was never finished"
    found = read(folder)
    if isinstance(found, str):
        return found
    files = found[1]
    fault = check_sizes(folder, files, files)
    if fault is None and hashes:
        fault = check_hashes(folder, files, files)
    host = host_state(folder)
    return fault or (host if isinstance(host, str) else None)


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means. Raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}; name a run folder or a checkpoint in it")
    if (path / FILE_NAME).is_file():
        return path
    if path.name.startswith("step_"):
        raise ConfigError(f"{path} is no whole checkpoint: {check_checkpoint(path, hashes=False)}")
    if not (path / "checkpoints").is_dir():
        raise ConfigError(f"{path} is no checkpoint ({FILE_NAME} is missing) and no run folder with checkpoints")
    for folder in reversed(list_checkpoints(path)):
        if check_checkpoint(folder, hashes=False) is None:
            return folder
    raise ConfigError(f"{path / 'checkpoints'} has no whole checkpoint")


def list_models(files: Mapping[str, Entry]) -> list[str]:
    return sorted(name.removesuffix(f"/{METADATA_FILE}") for name in files if name.endswith(f"/{METADATA_FILE}"))
