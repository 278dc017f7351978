"""Read Megatron's distributed checkpoint of a model as a mapping of whole tensors, without Megatron and without ranks.

A folder has files `__RANK_N.distcp`, in which each rank's pieces follow one another, and `.metadata`, a pickled table
of where each piece lies. At most the requested tensor and one piece of it are in memory.

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
    """Stand in for `getattr`, by which Python 3.11.0 to 3.11.3 pickle the members of an enum."""
    if not isinstance(cls, enum.EnumMeta):
        raise pickle.UnpicklingError(f"it asks for an attribute of {cls!r:.80}, which is no enum")
    return cls[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name not in _ALLOWED_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no table of a checkpoint has")
        return super().find_class(module, name)


def load_metadata(file: IO[bytes]) -> Any:
    """What `.metadata` says. Raises pickle.UnpicklingError for one that would do more than that."""
    return _MetadataUnpickler(file).load()


def _require_safe_load(load_bytes: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load_bytes)
    def checked(planner: Any, item: Any, value: IO[bytes]) -> None:
        torch.load(value, weights_only=True)  # raises for what is neither tensors nor plain values
        value.seek(0)
        load_bytes(planner, item, value)

    return checked


os.environ.pop(UNSAFE_LOAD_ENV, None)
filesystem.pickle = SimpleNamespace(load=load_metadata, dump=pickle.dump)  # type: ignore[assignment]
default_planner.DefaultLoadPlanner.load_bytes = _require_safe_load(default_planner.DefaultLoadPlanner.load_bytes)  # type: ignore[method-assign]


METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
"""What is no tensor of a parameter: the schedule, and what guards remember."""


class StoredShard(NamedTuple):
    """[start, start + size) along each dimension of a tensor, in a part of a file."""

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
    """By Megatron's names. Raises ConfigError for a folder that is none of its checkpoints, or is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            with (folder / METADATA_FILE).open("rb") as stream:
                found = load_metadata(stream)
        except FileNotFoundError:
            raise ConfigError(f"{folder} is no checkpoint of a model: it has no {METADATA_FILE}") from None
        except Exception as error:  # noqa: BLE001  a broken pickle raises whatever its bytes happen to mean
            what = " ".join(str(error).split())[:200]
            raise ConfigError(f"{folder / METADATA_FILE} cannot be read ({type(error).__name__}: {what})") from None
        try:
            self._tensors = {
                name: _parse_tensor(name, about, found.storage_data)
                for name, about in found.state_dict_metadata.items()
                if isinstance(about, metadata.TensorStorageMetadata)
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{folder / METADATA_FILE} is of another form ({type(error).__name__}: {error})"
            ) from None

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def read(self, name: str, at: Sequence[int] = ()) -> torch.Tensor:
        """A whole tensor, or what stands at these numbers of its first dimensions, on the host. Raises ConfigError
        where some of it is not there."""
        whole = self._tensors[name]
        at, shape = tuple(at), whole.shape[len(at) :]
        result, filled = torch.empty(shape, dtype=whole.dtype), 0
        for piece in whole.shards:
            if all(a <= n < a + size for a, size, n in zip(piece.start, piece.size, at, strict=False)):
                part = self._load_shard(name, piece)[tuple(n - a for n, a in zip(at, piece.start, strict=False))]
                where = zip(piece.start[len(at) :], part.shape, strict=True)
                result[tuple(slice(start, start + size) for start, size in where)] = part
                filled += part.numel()
        if filled != result.numel():
            raise ConfigError(f"{self.folder}: {name} has {filled} of its {result.numel()} elements")
        return result

    def _load_shard(self, name: str, piece: StoredShard) -> torch.Tensor:
        file = self.folder / piece.file
        try:
            with file.open("rb") as stream:
                stream.seek(piece.offset)
                found = torch.load(io.BytesIO(stream.read(piece.length)), map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001  what a damaged archive raises is torch's business
            what = " ".join(str(error).split())[:200]
            raise ConfigError(f"{file}: {name} cannot be read ({type(error).__name__}: {what})") from None
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != piece.size:
            raise ConfigError(f"{file}: at byte {piece.offset} is not what {METADATA_FILE} says of {name}")
        return found


def _parse_tensor(name: str, about: Any, places: Mapping[Any, Any]) -> StoredTensor:
    pieces = []
    for chunk in about.chunks:
        start = tuple(chunk.offsets)
        place = places[metadata.MetadataIndex(name, chunk.offsets)]
        if place.transform_descriptors:
            raise ValueError(f"{name} is compressed by {place.transform_descriptors}")
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"{name} is said to be in {place.relative_path!r}")
        pieces.append(StoredShard(start, tuple(chunk.sizes), place.relative_path, int(place.offset), int(place.length)))
    return StoredTensor(tuple(about.size), about.properties.dtype, tuple(pieces))
