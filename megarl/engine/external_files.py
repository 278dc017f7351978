"""Weights that reach engines outside of the job through a folder that both ends see (`rollout.external_weights_dir`).

A rank of the run writes the data of an order into a new file. The order, which names it and has its hash, follows over
the connection once the file is complete; each engine reads it, and the rank removes it when all have answered. So the
folder never has more than one buffer of each rank, and no reader finds a file by itself. File names are never used
twice: a network file system may show the former content of a name for a while.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from pathlib import Path

import torch

from megarl.engine.external_wire import WireError

_KEY = "rollout.external_weights_dir"
SUFFIX = ".weights"


def hash_data(data: torch.Tensor) -> bytes:
    """Return the hash of weights, [n] uint8 on the host, that nobody can find other bytes for."""
    return hashlib.blake2b(data.numpy().data, digest_size=32).digest()


class WeightFiles:
    """The files of one rank, one at a time.

    folder: created if it is missing. prefix: of the files' names; unique among the ranks that use the folder.
    leftovers: beginning of the names of files that a killed run has left, which one rank removes; empty for none.
    """

    def __init__(self, folder: Path, prefix: str, leftovers: str = "") -> None:
        self._folder, self._prefix = folder, prefix
        self._path: Path | None = None
        with contextlib.suppress(OSError):  # then `store` says what is wrong
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob(f"{leftovers}*{SUFFIX}") if leftovers else ():
                old.unlink()

    def store(self, data: torch.Tensor) -> str:
        """Write data, [n] uint8 on the host, to a new file, and return its name. Raises WireError."""
        path = self._path = self._folder / f"{self._prefix}-{secrets.token_hex(8)}{SUFFIX}"
        try:
            with open(path, "xb") as file:
                file.write(data.numpy().data)
        except OSError as error:
            raise WireError(f"the run cannot write {path} ({error.strerror}), see {_KEY}") from None
        return path.name

    def remove(self) -> None:
        """Remove the last file, if there is one."""
        path, self._path = self._path, None
        if path is not None:
            with contextlib.suppress(OSError):  # such as a folder that is gone
                path.unlink(missing_ok=True)


def read_file(folder: str, name: str, target: torch.Tensor, expected_hash: bytes) -> None:
    """Fill `target`, [n] uint8 on the host, from the file of an order. Raises WireError if it has other data."""
    path = Path(folder, name)
    if path.name != name:
        raise WireError(f"{name!r} is no file name")
    try:
        with open(path, "rb") as file:
            count = file.readinto(target.numpy().data)  # type: ignore[attr-defined]
            is_longer = bool(file.read(1))
    except FileNotFoundError:
        raise WireError(f"it does not find {path}: its {_KEY} must be the folder that the run writes to") from None
    except OSError as error:
        raise WireError(f"it cannot read {path} ({error.strerror}), see {_KEY}") from None
    if count < len(target) or is_longer:
        raise WireError(f"{path} has {'more than' if is_longer else f'{count} of'} {len(target)} bytes of weights")
    if hash_data(target) != expected_hash:
        raise WireError(f"{path} does not have the hash of its order")
