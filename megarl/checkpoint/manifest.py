"""Read and verify checkpoint manifests, which list every file with size and SHA-256, and find valid checkpoints."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
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
    """A new file that is hashed as it is written. `failure` is the OSError of a failed write, for torch hides it."""

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


def write_content(path: Path, content: bytes | memoryview) -> Entry:
    """Create a file with this content and return its entry. Raises OSError."""
    return write_hashed(path, lambda stream: stream.write(content))[1]


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


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Return the manifest and its files. Raises ConfigError with its fault."""
    try:
        tree = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        files = {name: Entry(entry["bytes"], entry["sha256"]) for name, entry in tree["files"].items()}
    except FileNotFoundError:
        raise ConfigError(f"{FILE_NAME} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{FILE_NAME} is broken ({type(error).__name__})") from None
    for name, entry in files.items():
        is_relative = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
        if not is_relative or type(entry.bytes) is not int or not isinstance(entry.sha256, str):
            raise ConfigError(f"{FILE_NAME} is broken (its entry {name!r})")
    if "host.json" not in files:
        raise ConfigError(f"{FILE_NAME} does not list host.json")
    return tree, files


def check_sizes(folder: Path, files: Mapping[str, Entry], names: Iterable[str]) -> None:
    """Raise ConfigError for the first of these files that is missing or has another size."""
    for name in names:
        try:
            size = (folder / name).stat().st_size
        except OSError:
            raise ConfigError(f"{name} is missing") from None
        if not (folder / name).is_file() or size != files[name].bytes:
            raise ConfigError(f"{name} is truncated or of another size")


def check_hashes(folder: Path, files: Mapping[str, Entry], names: Iterable[str]) -> None:
    """Raise ConfigError for the first of these files that has other contents."""
    for name in names:
        try:
            entry = hash_file(folder / name)
        except OSError as error:
            raise ConfigError(f"{name} cannot be read ({error.strerror})") from None
        if entry.sha256 != files[name].sha256:
            raise ConfigError(f"{name} differs from its checksum")


def host_state(folder: Path) -> dict[str, Any]:
    """Return host.json. Raises ConfigError with its fault."""
    try:
        tree = json.loads((folder / "host.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"host.json is broken ({type(error).__name__})") from None
    if not isinstance(tree, dict) or type(tree.get("step")) is not int:
        raise ConfigError("host.json does not name its step")
    return tree


def step_of(folder: Path) -> int:
    """Return the step that the name of a checkpoint's folder says."""
    return int(folder.stem.removeprefix("step_"))


def list_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, including unfinished ones, which end in `.tmp`. Raises OSError."""
    folder = run / "checkpoints"
    paths = folder.iterdir() if folder.exists() else ()
    checkpoints = [path for path in paths if path.is_dir() and re.fullmatch(r"step_\d{6,}(\.tmp)?", path.name)]
    return sorted(checkpoints, key=lambda path: (step_of(path), path.name))


def check_checkpoint(folder: Path, hashes: bool) -> None:
    """Raise ConfigError with the fault of a checkpoint."""
    if folder.name.endswith(".tmp"):
        raise ConfigError("was never completed")
    _, files = read(folder)
    check_sizes(folder, files, files)
    if hashes:
        check_hashes(folder, files, files)
    host_state(folder)


def resolve_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path denotes. Raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(f"no folder {path}; name a run folder or a checkpoint in it")
    if (path / FILE_NAME).is_file():
        return path
    if path.name.startswith("step_"):
        fault = "was never completed" if path.suffix == ".tmp" else f"{FILE_NAME} is missing"
        raise ConfigError(f"{path} is not a complete checkpoint: {fault}")
    if not (path / "checkpoints").is_dir():
        raise ConfigError(f"{path} is neither a checkpoint ({FILE_NAME} is missing) nor a run folder with checkpoints")
    for folder in reversed(list_checkpoints(path)):
        with contextlib.suppress(ConfigError):
            check_checkpoint(folder, hashes=False)
            return folder
    raise ConfigError(f"{path / 'checkpoints'} has no complete checkpoint")


def check_model(folder: Path, role: str) -> None:
    """Raise ConfigError unless a checkpoint has the model of a role, undamaged."""
    try:
        _, files = read(folder)
    except ConfigError as fault:
        raise ConfigError(f"{folder} is not a complete checkpoint: {fault}") from None
    if role not in list_models(files):
        raise ConfigError(f"{folder} has no {role}; it has {', '.join(list_models(files)) or 'no model'}")
    names = [name for name in files if name.startswith(f"{role}/")]
    try:
        check_sizes(folder, files, names)
        check_hashes(folder, files, names)
    except ConfigError as fault:
        raise ConfigError(f"{folder} is damaged: {fault}; use another checkpoint") from None


def list_models(files: Mapping[str, Entry]) -> list[str]:
    """Return the roles whose models are among the files of a checkpoint."""
    return sorted(name.removesuffix("/.metadata") for name in files if name.endswith("/.metadata"))
