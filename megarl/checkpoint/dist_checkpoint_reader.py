"""Read Megatron's distributed checkpoint of a model as a mapping of whole tensors, without Megatron or ranks.

A folder has files `__RANK_N.distcp`, in which each rank's shards follow one another, and `.metadata`, a pickled table
of the location of each shard. At most the requested tensor and one shard of it are in memory.

Importing this module makes reading a checkpoint safe in this process: torch unpickles `.metadata`, and non-tensors with
`weights_only=False`, either of which could run any code. Here the table may name only the classes that it consists of,
and the rest is loaded like weights. Megatron's `common.pt` and the random states are loaded by torch's safe default.
"""

from __future__ import annotations

import enum
import functools
import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint import default_planner, filesystem, metadata

from megarl.config import ConfigError

UNSAFE_LOAD_ENV = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED_CLASSES = {
    f"{_CHECKPOINT}.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    f"{_CHECKPOINT}.filesystem": ("_StorageInfo",),
    f"{_CHECKPOINT}.planner": ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "collections": ("OrderedDict", "defaultdict"),
    "pathlib": ("PosixPath", "PurePosixPath"),
}


def _enum_member(cls: Any, name: str) -> Any:
    """Replace `getattr`, with which Python 3.11.0 to 3.11.3 pickle the members of an enum."""
    if not isinstance(cls, enum.EnumMeta):
        raise pickle.UnpicklingError(f"it requests an attribute of {cls!r:.80}, which is not an enum")
    return cls[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name not in _ALLOWED_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it requests {module}.{name}, which no checkpoint table contains")
        return super().find_class(module, name)


def load_metadata(file: IO[bytes]) -> Any:
    """Load `.metadata`. Raises pickle.UnpicklingError if it names any class not allowed."""
    return _MetadataUnpickler(file).load()


def _require_safe_load(load_bytes: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load_bytes)
    def checked(planner: Any, item: Any, value: IO[bytes]) -> None:
        torch.load(value, weights_only=True)  # raises for anything but tensors and plain values
        value.seek(0)
        load_bytes(planner, item, value)

    return checked


os.environ.pop(UNSAFE_LOAD_ENV, None)
filesystem.pickle = SimpleNamespace(load=load_metadata, dump=pickle.dump)  # type: ignore[assignment]
default_planner.DefaultLoadPlanner.load_bytes = _require_safe_load(default_planner.DefaultLoadPlanner.load_bytes)  # type: ignore[method-assign]


METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
"""File of everything that is no parameter tensor: the schedule, and the state of guards."""


class StoredShard(NamedTuple):
    """[start, start + size) along each dimension of a tensor, stored in a range of a file."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    offset: int
    length: int


class StoredTensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[StoredShard, ...]


class CheckpointReader(Mapping[str, StoredTensor]):
    """A checkpoint's tensors by Megatron's names. Raises ConfigError if it is damaged or not a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            with (folder / METADATA_FILE).open("rb") as stream:
                contents = load_metadata(stream)
        except FileNotFoundError:
            raise ConfigError(f"{folder} is not a model checkpoint: it has no {METADATA_FILE}") from None
        except Exception as error:  # noqa: BLE001  a broken pickle raises anything
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"{folder / METADATA_FILE} cannot be read ({type(error).__name__}: {reason})") from None
        try:
            self._tensors = {
                name: _parse_tensor(name, stored_metadata, contents.storage_data)
                for name, stored_metadata in contents.state_dict_metadata.items()
                if isinstance(stored_metadata, metadata.TensorStorageMetadata)
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{folder / METADATA_FILE} has another format ({type(error).__name__}: {error})"
            ) from None

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def read(self, name: str, at: Sequence[int] = ()) -> torch.Tensor:
        """Return a whole tensor, or its slice at leading indices, on the host. Raises ConfigError if incomplete."""
        stored = self._tensors[name]
        at, shape = tuple(at), stored.shape[len(at) :]
        result, filled = torch.empty(shape, dtype=stored.dtype), 0
        for piece in stored.shards:
            if all(a <= n < a + size for a, size, n in zip(piece.start, piece.size, at, strict=False)):
                block = self._load_shard(name, piece)[tuple(n - a for n, a in zip(at, piece.start, strict=False))]
                extents = zip(piece.start[len(at) :], block.shape, strict=True)
                result[tuple(slice(start, start + size) for start, size in extents)] = block
                filled += block.numel()
        if filled != result.numel():
            raise ConfigError(f"{self.folder}: {name} has {filled} of its {result.numel()} elements")
        return result

    def _load_shard(self, name: str, piece: StoredShard) -> torch.Tensor:
        file = self.folder / piece.file
        try:
            with file.open("rb") as stream:
                stream.seek(piece.offset)
                tensor = torch.load(io.BytesIO(stream.read(piece.length)), map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001  a damaged archive raises anything
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"{file}: {name} cannot be read ({type(error).__name__}: {reason})") from None
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != piece.size:
            raise ConfigError(f"{file}: at byte {piece.offset} does not match {METADATA_FILE} for {name}")
        return tensor


def _parse_tensor(name: str, about: Any, places: Mapping[Any, Any]) -> StoredTensor:
    pieces = []
    for chunk in about.chunks:
        start = tuple(chunk.offsets)
        location = places[metadata.MetadataIndex(name, chunk.offsets)]
        if location.transform_descriptors:
            raise ValueError(f"{name} is compressed with {location.transform_descriptors}")
        if Path(location.relative_path).name != location.relative_path:
            raise ValueError(f"{name} is listed in {location.relative_path!r}")
        pieces.append(
            StoredShard(start, tuple(chunk.sizes), location.relative_path, int(location.offset), int(location.length))
        )
    return StoredTensor(tuple(about.size), about.properties.dtype, tuple(pieces))
