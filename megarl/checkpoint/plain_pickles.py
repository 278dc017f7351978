"""Reading a checkpoint runs nothing that is in it, whoever has written it.

torch keeps the table of a distributed checkpoint, `.metadata`, as a pickle, and reads what is no tensor with
`weights_only=False`: either could be any code. Here the table may hold what torch makes one of, and nothing else, and
the rest is looked through as weights are. That holds in a process from the import of this file on. Megatron's
`common.pt` and each rank's random states are read so by torch's default, which an environment variable could undo.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch.distributed.checkpoint import default_planner, filesystem

UNDOES = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_CHECKPOINT = "torch.distributed.checkpoint"
_CLASSES = {
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


class _Table(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no table of a checkpoint has")
        return super().find_class(module, name)


def read_table(file: IO[bytes]) -> Any:
    """What `.metadata` says. Raises pickle.UnpicklingError for one that would do more than that."""
    return _Table(file).load()


def _checked(load_bytes: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load_bytes)
    def checked(planner: Any, item: Any, value: IO[bytes]) -> None:
        torch.load(value, weights_only=True)  # raises for what is neither tensors nor plain values
        value.seek(0)
        load_bytes(planner, item, value)

    return checked


os.environ.pop(UNDOES, None)
filesystem.pickle = SimpleNamespace(load=read_table, dump=pickle.dump)  # type: ignore[assignment]
default_planner.DefaultLoadPlanner.load_bytes = _checked(default_planner.DefaultLoadPlanner.load_bytes)  # type: ignore[method-assign]
