"""Files of safetensors, written one tensor after the other, and shared out over files of bounded size.

The library's own writer wants all tensors of a file in memory, and makes a copy of all of them besides. Here they may
be such as are read only when it is their turn, so that what is held is one of them. The bytes are the library's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_KINDS = {  # as the library orders them within a file, so that each is aligned to its own size
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TYPES = {kind: dtype for dtype, kind in _KINDS.items()}
"""By the names that they have in a file."""
_ORDER = {dtype: number for number, dtype in enumerate(_KINDS)}


class Unread(NamedTuple):
    """A tensor that is not in memory yet. `read` makes it, of this shape and type, each time that it is called."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


Entry = torch.Tensor | Unread


def size_of(tensor: Entry) -> int:
    return prod(tensor.shape) * tensor.dtype.itemsize


def write_file(tensors: Mapping[str, Entry], path: Path) -> None:
    """A safetensors file of these, which those who may read what the umask says may read. Raises OSError."""
    names = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        tensor, end = tensors[name], at + size_of(tensors[name])
        header[name] = {"dtype": _KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(_bytes_of(tensors[name], name))


def _bytes_of(tensor: Entry, name: str) -> memoryview:
    """Without a copy of what lies in one piece on the host."""
    found = tensor.read() if isinstance(tensor, Unread) else tensor
    if (tuple(found.shape), found.dtype) != (tuple(tensor.shape), tensor.dtype):
        raise ValueError(
            f"{name} was said to be {tensor.dtype} {tuple(tensor.shape)} and is {found.dtype} {tuple(found.shape)}"
        )
    return found.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class ShardWriter:
    """Collects tensors into files of bounded size; the files get their final names when their number is known."""

    def __init__(self, folder: Path, max_bytes: int):
        self.folder, self.max_bytes = folder, max_bytes
        self.pending: dict[str, Entry] = {}
        self.bytes = self.total = 0
        self.written: list[list[str]] = []

    def add(self, name: str, tensor: Entry) -> None:
        size = size_of(tensor)
        if self.pending and self.bytes + size > self.max_bytes:
            self._flush()
        self.pending[name] = tensor
        self.bytes += size
        self.total += size

    def finish(self) -> None:
        if self.pending:
            self._flush()
        count = len(self.written)
        if count == 1:
            os.rename(self._path(0), self.folder / SINGLE)
            return
        weight_map = {}
        for i, names in enumerate(self.written):
            final = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            os.rename(self._path(i), self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number}"

    def _flush(self) -> None:
        write_file(self.pending, self._path(len(self.written)))
        self.written.append(list(self.pending))
        self.pending, self.bytes = {}, 0
