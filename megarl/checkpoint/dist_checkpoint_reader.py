"""Read Megatron's distributed checkpoint of a model as a mapping of whole tensors, without Megatron or ranks.

Importing this module makes reading a checkpoint safe in this process: torch unpickles `.metadata`, and non-tensors with
`weights_only=False`, either of which could run any code. Here only the classes of a checkpoint's table are allowed.
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


class CheckpointReader(dict[str, StoredTensor]):
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
            for name, about in contents.state_dict_metadata.items():
                if isinstance(about, metadata.TensorStorageMetadata):
                    self[name] = _parse_tensor(name, about, contents.storage_data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{folder / METADATA_FILE} has another format ({reason})") from None

    def read(self, name: str, at: Sequence[int] = ()) -> torch.Tensor:
        """Return a whole tensor, or its slice at leading indices, on the host. Raises ConfigError if incomplete."""
        stored = self[name]
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
        location = places[metadata.MetadataIndex(name, chunk.offsets)]
        if location.transform_descriptors:
            raise ValueError(f"{name} is compressed with {location.transform_descriptors}")
        if Path(location.relative_path).name != location.relative_path:
            raise ValueError(f"{name} is listed in {location.relative_path!r}")
        file, offset, length = location.relative_path, int(location.offset), int(location.length)
        pieces.append(StoredShard(tuple(chunk.offsets), tuple(chunk.sizes), file, offset, length))
    return StoredTensor(tuple(about.size), about.properties.dtype, tuple(pieces))
