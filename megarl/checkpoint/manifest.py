"""Read and verify checkpoint manifests, and find valid checkpoints.

`manifest.json` lists every file with size and SHA-256. Hashing takes one core per 1.5 GB/s, so files are hashed while
they are written, and by all ranks together.
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
"""Writes files into a checkpoint's folder, from any thread, and returns them once they are synced. Raises OSError."""


def write_nothing(folder: Path) -> dict[Path, Entry]:
    return {}


class HashingFile:
    """A new file that is hashed as it is written sequentially.

    `failure` keeps the OSError of a failed write, which torch turns into a RuntimeError.
    """

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
        """Sync the file and return its entry."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return Entry(self._file.tell(), self._digest.hexdigest())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, which has been reported
            self._file.close()


def write_hashed(path: Path, write: Callable[[HashingFile], T]) -> tuple[T, Entry]:
    """Create a file by calling `write`; return its result and the file's entry. Raises OSError if writing fails."""
    stream = HashingFile(path)
    try:
        return write(stream), stream.finish()
    except Exception as error:
        raise stream.failure or error from None
    finally:
        stream.close()


def sync(path: Path) -> None:
    """Sync a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> Entry:
    with path.open("rb") as stream:
        return Entry(os.fstat(stream.fileno()).st_size, hashlib.file_digest(stream, "sha256").hexdigest())


def split_by_size(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Split the files into `parts` shares of about equal bytes. Deterministic."""
    result: list[list[str]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        result[least].append(name)
        loads[least] += sizes[name] + 1  # + 1 distributes empty files, too
    return result


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Entry]] | str:
    """Return the manifest and its files, or a description of its fault."""
    try:
        tree = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        files = {name: Entry(entry["bytes"], entry["sha256"]) for name, entry in tree["files"].items()}
    except FileNotFoundError:
        return f"{FILE_NAME} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{FILE_NAME} is broken ({type(error).__name__})"
    for name, entry in files.items():
        is_relative = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
        if not is_relative or type(entry.bytes) is not int or not isinstance(entry.sha256, str):
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
            entry = hash_file(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if entry.sha256 != files[name].sha256:
            return f"{name} differs from its checksum"
    return None


def host_state(folder: Path) -> dict[str, Any] | str:
    """Return host.json, or a description of its fault."""
    try:
        tree = json.loads((folder / "host.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"host.json is broken ({type(error).__name__})"
    if not isinstance(tree, dict) or type(tree.get("step")) is not int:
        return "host.json does not name its step"
    return tree


METADATA_FILE = ".metadata"
"""Name of the metadata file in a model's folder."""


def list_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, including unfinished ones."""
    folders = {}
    for path in (run / "checkpoints").iterdir():
        name = path.name.removesuffix(".tmp")
        if path.is_dir() and name.startswith("step_") and name[5:].isdecimal():
            folders[int(name[5:]), path.name] = path
    return [folders[key] for key in sorted(folders)]


def check_checkpoint(folder: Path, hashes: bool) -> str | None:
    """Return a description of a checkpoint's fault, or None."""
    if folder.name.endswith(".tmp"):
        return "was never completed"
    contents = read(folder)
    if isinstance(contents, str):
        return contents
    files = contents[1]
    fault = check_sizes(folder, files, files)
    if fault is None and hashes:
        fault = check_hashes(folder, files, files)
    host = host_state(folder)
    return fault or (host if isinstance(host, str) else None)


def resolve_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path denotes. Raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(f"no folder {path}; name a run folder or a checkpoint in it")
    if (path / FILE_NAME).is_file():
        return path
    if path.name.startswith("step_"):
        raise ConfigError(f"{path} is not a complete checkpoint: {check_checkpoint(path, hashes=False)}")
    if not (path / "checkpoints").is_dir():
        raise ConfigError(f"{path} is neither a checkpoint ({FILE_NAME} is missing) nor a run folder with checkpoints")
    for folder in reversed(list_checkpoints(path)):
        if check_checkpoint(folder, hashes=False) is None:
            return folder
    raise ConfigError(f"{path / 'checkpoints'} has no complete checkpoint")


def list_models(files: Mapping[str, Entry]) -> list[str]:
    return sorted(name.removesuffix(f"/{METADATA_FILE}") for name in files if name.endswith(f"/{METADATA_FILE}"))
