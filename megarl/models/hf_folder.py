"""Read Hugging Face safetensors folders lazily, slice by slice, and write them atomically and bitwise exactly.

FP8 and INT4 matrices and MXFP4 experts are dequantised to bfloat16 on reading, and written in bfloat16. Experts that a
checkpoint stacks are read and written as parts of the stack, see `family.StoredSlice`.

The safetensors library needs all tensors of a file in memory and copies them. Here a tensor may be read just before it
is written, so that only one is in memory at a time. The bytes are the same as the library's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megarl.config import ConfigError
from megarl.config.strict import describe_lfs_pointer, read_json
from megarl.models import int4, mxfp4
from megarl.models.family import StoredSlice
from megarl.models.fp8 import SCALE_SUFFIX, dequantise, grid_shape, is_fp8
from megarl.models.layout_algebra import Param, assemble_shard
from megarl.models.mxfp4 import BLOCKS_SUFFIX, GROUP, SCALES_SUFFIX, is_mxfp4
from megarl.models.registry import family_of, load_hf_config

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPE_NAMES = {  # in the library's order within a file, which aligns each tensor to its item size
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


class LazyTensor(NamedTuple):
    """A tensor that is not in memory yet. Each call of `read` returns it, with this shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


TensorSource = torch.Tensor | LazyTensor


def num_bytes(tensor: TensorSource) -> int:
    return prod(tensor.shape) * tensor.dtype.itemsize


def write_file(tensors: Mapping[str, TensorSource], path: Path) -> None:
    """Write a safetensors file with permissions according to the umask. Raises OSError."""
    dtypes = list(_DTYPE_NAMES)
    names = sorted(tensors, key=lambda name: (dtypes.index(tensors[name].dtype), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        tensor, end = tensors[name], offset + num_bytes(tensors[name])
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    header_bytes = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    with path.open("wb") as file:
        file.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        for name in names:
            tensor = tensors[name]
            data = tensor.read() if isinstance(tensor, LazyTensor) else tensor
            declared, actual = (tensor.dtype, tuple(tensor.shape)), (data.dtype, tuple(data.shape))
            if declared != actual:
                raise ValueError(f"{name} was declared as {declared[0]} {declared[1]} and is {actual[0]} {actual[1]}")
            file.write(data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


class ShardWriter:
    """Collects tensors into files of bounded size, which get their final names once their number is known."""

    def __init__(self, folder: Path, max_bytes: int):
        self.folder, self.max_bytes = folder, max_bytes
        self.pending: dict[str, TensorSource] = {}
        self.shard_bytes = self.total_bytes = 0
        self.written: list[list[str]] = []

    def add(self, name: str, tensor: TensorSource) -> None:
        size = num_bytes(tensor)
        if self.pending and self.shard_bytes + size > self.max_bytes:
            self._flush()
        self.pending[name] = tensor
        self.shard_bytes += size
        self.total_bytes += size

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
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number}"

    def _flush(self) -> None:
        write_file(self.pending, self._path(len(self.written)))
        self.written.append(list(self.pending))
        self.pending, self.shard_bytes = {}, 0


COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
"""Suffixes of the files of config, tokenizer, and custom code that config.json names."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.\d+\.")
_MTP_COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}
"""Tensors that checkpoints duplicate in multi-token prediction layers, and their originals."""
FLOATS = ("BF16", "F16", "F32", "F64", "F8_E4M3")  # supported dtypes of stored weights, by safetensors name
_INT4_SUFFIXES = (int4.PACKED_SUFFIX, int4.SCALE_SUFFIX, int4.SHAPE_SUFFIX)
_CODES_PER_WORD = 8  # of `weight_packed`, int32


class HFWeights:
    """The tensors of an HF folder by name, read on demand. Files stay open.

    A matrix with FP8 block scales, or in packed INT4, is returned in bfloat16. It is listed by the name of its weight,
    and its scales are not listed. A tensor that the folder stores as a part of another, as `stored_slice` says, is read
    by its own name, too. Blocks and scales of MXFP4 are one tensor, the transposed stack that a checkpoint in bfloat16
    has instead.
    """

    def __init__(self, folder: Path, files: dict[str, str], stored_slice: Callable[[str], StoredSlice | None]):
        self.folder = folder
        self._files = files  # tensor name -> file name
        self._stored_slice = stored_slice
        self._open_files: dict[str, Any] = {}

    def names(self) -> list[str]:
        """Return the names of the tensors as stored, of INT4 matrices without the suffix."""
        packed = [name.removesuffix(int4.PACKED_SUFFIX) for name in self._files if name.endswith(int4.PACKED_SUFFIX)]
        scales = {name + SCALE_SUFFIX for name in self._files}
        stacks = {name.removesuffix(BLOCKS_SUFFIX) for name in self._files if name.endswith(BLOCKS_SUFFIX)}
        hidden = {stack + suffix for stack in stacks for suffix in (BLOCKS_SUFFIX, SCALES_SUFFIX)}
        hidden |= {name + suffix for name in packed for suffix in _INT4_SUFFIXES} | scales
        return [name for name in self._files if name not in hidden] + sorted(stacks) + packed

    def view(self, name: str) -> StoredSlice | None:
        """Return where the folder stores this tensor as a part of another one, if it does."""
        view = None if name in self._files else self._stored_slice(name)
        if view is None or not (view.name in self._files or self._is_mxfp4(view.name) or self._packed_name(view.name)):
            return None
        return view

    def shape(self, name: str) -> tuple[int, ...]:
        if packed := self._packed_name(name):
            packed_rows, words = self._slice(packed + int4.PACKED_SUFFIX).get_shape()
            return packed_rows, words * _CODES_PER_WORD
        view = self.view(name)
        if view is None:
            return self._stored_shape(name)
        shape = self._stored_shape(view.name)[view.expert is not None :]
        rows, *columns = reversed(shape) if view.transposed else shape
        return len(range(rows)[view.rows]), *columns

    def get(self, name: str) -> torch.Tensor:
        """Return the full tensor on the host, in the file's dtype (bfloat16 for FP8 and INT4)."""
        if self.view(name) is not None or self._packed_name(name):
            return self.get_slice(name, 0, 0, self.shape(name)[0])
        tensor = self._tensor(name)
        return dequantise(tensor, self._tensor(name + SCALE_SUFFIX)) if name + SCALE_SUFFIX in self._files else tensor

    def get_lazy(self, name: str) -> LazyTensor:
        if name + SCALE_SUFFIX in self._files or self._packed_name(name):
            dtype = torch.bfloat16
        else:
            stored = self._slice(name).get_dtype()
            dtype = next(dtype for dtype, kind in _DTYPE_NAMES.items() if kind == stored)
        return LazyTensor(self.shape(name), dtype, lambda: self.get(name))

    def get_slice(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Return [start, stop) along `dim`. With `dim` 0, only that part is read from disk."""
        if packed := self._packed_name(name):
            return self._dequantise_packed(packed, dim, start, stop)
        if (view := self.view(name)) is not None:
            if view == StoredSlice(view.name):  # only renamed
                return self.get_slice(view.name, dim, start, stop)
            return self._view_slice(view, dim, start, stop)
        index = (slice(None),) * dim + (slice(start, stop),)
        values: torch.Tensor = self._read(name, lambda file: file.get_slice(name)[index])
        if name + SCALE_SUFFIX not in self._files:
            return values
        return dequantise(values, self._tensor(name + SCALE_SUFFIX), *((start, 0) if dim == 0 else (0, start)))

    def _packed_name(self, name: str) -> str:
        """Return under which name the folder has an INT4 matrix, without the suffix; empty if it is none."""
        if name + int4.PACKED_SUFFIX in self._files:
            return name
        view = None if name in self._files else self._stored_slice(name)
        return view.name if view is not None and view.name + int4.PACKED_SUFFIX in self._files else ""

    def _dequantise_packed(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Return a slice as `get_slice` does, of an INT4 matrix."""
        if dim == 0:
            index = scale_index = slice(start, stop), slice(None)
            skipped = 0
        else:
            first, last = start // int4.GROUP, -(-stop // int4.GROUP)  # whole groups around the slice
            words = int4.GROUP // _CODES_PER_WORD
            index = (slice(None), slice(first * words, last * words))
            scale_index, skipped = (slice(None), slice(first, last)), start - first * int4.GROUP
        packed, scales = name + int4.PACKED_SUFFIX, name + int4.SCALE_SUFFIX
        words = self._read(packed, lambda file: file.get_slice(packed)[index]).contiguous()
        values = self._read(scales, lambda file: file.get_slice(scales)[scale_index])
        weight = int4.dequantise(int4.Int4Matrix(words.view(torch.uint8), values))
        return weight if dim == 0 else weight[:, skipped : skipped + stop - start]

    def _view_slice(self, view: StoredSlice, dim: int, start: int, stop: int) -> torch.Tensor:
        if view.name + SCALE_SUFFIX in self._files:
            raise ConfigError(
                f"{self.folder}: {view.name} is a stack in FP8, which is not implemented; convert the model to bfloat16"
            )
        stored_shape = self._stored_shape(view.name)
        is_stack, matrix = view.expert is not None, len(stored_shape) - (view.expert is not None)
        rows = range(stored_shape[-1 if view.transposed else int(is_stack)])[view.rows]
        rows = rows[start:stop] if dim == 0 else rows
        bounds = [slice(rows.start, rows[-1] + 1 if rows else rows.start), *[slice(None)] * (matrix - 1)]
        if dim > 0:
            bounds[dim] = slice(start, stop)
        index = tuple(reversed(bounds) if view.transposed else bounds)
        if view.expert is not None:
            index = (slice(view.expert, view.expert + 1), *index)
        values: torch.Tensor
        if self._is_mxfp4(view.name):
            values = self._read_mxfp4(view.name, index)
        else:
            values = self._read(view.name, lambda file: file.get_slice(view.name)[index])
        if is_stack:
            values = values[0]
        return (values.mT if view.transposed else values)[:: rows.step].contiguous()

    def get_shard(self, param: Param, tp: int, rank: int) -> torch.Tensor:
        """Return the shard of rank `rank` of `tp`, a new tensor. Like `layout_algebra.shard`, without full tensors."""
        return assemble_shard(param, tp, rank, self.get_slice)

    def check(self, hf: dict[str, Any], optional: Collection[str] = (), mtp: bool = False) -> None:
        """Raise ConfigError, naming the tensor, unless these are exactly the tensors of the model in `hf`.

        Tensors named in `optional`, such as the heads for a critic, may be absent or have any shape. So may multi-token
        prediction layers, unless `mtp` is set.
        """
        family = family_of(hf)
        table = [(tensor, param) for param in family.params(hf, 1, mtp=mtp) for tensor in param.hf]
        expected = {tensor.name: tensor.shape for tensor, _ in table}
        expected = {name: shape for name, shape in expected.items() if name not in optional}
        where = f"{self.folder}:"
        self._check_mxfp4(is_mxfp4(hf))
        self._check_fp8(is_fp8(hf))
        names, views = set(self.names()), {name: view for name in expected if (view := self.view(name)) is not None}
        experts = [tensor.name for tensor, param in table if int4.is_quantised(param)]
        stored_experts = {views[name].name if name in views else name for name in experts}
        self._check_int4(stored_experts if int4.is_int4(hf) else set(), family.untrained_prefixes(hf))
        if missing := [name for name in expected if name not in names and name not in views]:
            hint = "; config.json has tie_word_embeddings=false, is it tied?" if missing == [HEAD] else ""
            raise ConfigError(f"{where} {_summarize_names(missing)} missing{hint}")
        allowed = expected.keys() | set(optional) | {view.name for view in views.values()}
        prefixes = family.untrained_prefixes(hf)
        extra = [name for name in self.names() if name not in allowed and not name.startswith(prefixes)]
        extra = [name for name in extra if not name.endswith("rotary_emb.inv_freq")]  # derived; old files have it
        if HEAD in extra:  # the config ties the embeddings
            extra.remove(HEAD)  # some checkpoints duplicate the tied weight
            embedding = f"{family.embedding_name}.weight"
            if not torch.equal(self.get(HEAD), self.get(embedding)):
                problem = f"{HEAD} differs from {embedding}, but config.json has tie_word_embeddings=true"
                raise ConfigError(f"{where} {problem}")
        if extra:
            problem = f"{_summarize_names(extra)} not part of {family.architecture} with this config.json"
            raise ConfigError(f"{where} {problem}")
        parts: dict[str, list[tuple[StoredSlice, tuple[int, ...]]]] = {}
        for name, view in views.items():
            parts.setdefault(view.name, []).append((view, expected[name]))
        stored_shapes = {name: shape for name, shape in expected.items() if name not in views}
        for name, shape in (stored_shapes | {name: _joined_shape(part) for name, part in parts.items()}).items():
            if self.shape(name) != shape:
                raise ConfigError(f"{where} {name} has shape {self.shape(name)}; config.json asks for {shape}")
        for name in (*stored_shapes, *parts, *(head for head in optional if head in self._files)):
            if (dtype := self._stored_dtype(name)) not in FLOATS:
                raise ConfigError(
                    f"{where} {name} has {dtype} numbers; weights must be {', '.join(FLOATS)}; convert the model to "
                    f"bfloat16, without integers or another quantisation"
                )

    def _check_fp8(self, promised: bool) -> None:
        """Raise ConfigError for an FP8 matrix without matching scales, or for any FP8 matrix unless `promised`."""
        for name in self.names():
            if self._stored_dtype(name) != "F8_E4M3":
                continue
            if not promised:
                raise ConfigError(f"{self.folder}: {name} is FP8, but config.json has no quantization_config")
            scales = name + SCALE_SUFFIX
            if scales not in self._files:
                raise ConfigError(f"{self.folder}: {scales} is missing: FP8 weights mean nothing without their scales")
            if self.shape(scales) != (expected := grid_shape(self.shape(name))):
                raise ConfigError(f"{self.folder}: {scales} has shape {self.shape(scales)}; {name} needs {expected}")

    def _check_int4(self, promised: set[str], untrained_prefixes: tuple[str, ...]) -> None:
        """Raise ConfigError unless exactly the `promised` matrices are INT4, apart from untrained ones, with scales of
        their shape."""
        names = set(self.names())
        packed = {name for name in names if name + int4.PACKED_SUFFIX in self._files}
        if odd := sorted(name for name in packed - promised if not name.startswith(untrained_prefixes)):
            reason = "only routed experts are implemented so" if promised else "config.json does not say so"
            raise ConfigError(f"{self.folder}: {_summarize_names(odd)} INT4, but {reason}")
        if plain := sorted((promised & names) - packed):
            raise ConfigError(
                f"{self.folder}: {_summarize_names(plain)} not INT4; remove quantization_config from config.json"
            )
        for name in packed:
            (rows, columns), scales = self.shape(name), name + int4.SCALE_SUFFIX
            stored = self._slice(name + int4.PACKED_SUFFIX).get_dtype(), self._slice(scales).get_dtype()
            if stored != ("I32", "BF16"):
                raise ConfigError(
                    f"{self.folder}: {name} is stored as {stored[0]} with scales in {stored[1]}, not I32 and BF16"
                )
            if self.shape(scales) != (expected := (rows, columns // int4.GROUP)) or columns % int4.GROUP:
                raise ConfigError(f"{self.folder}: {scales} has shape {self.shape(scales)}; {name} needs {expected}")

    def _check_mxfp4(self, promised: bool) -> None:
        """Raise ConfigError for MXFP4 blocks without matching scales, or for any unless `promised`."""
        for blocks in [name for name in self._files if name.endswith(BLOCKS_SUFFIX)]:
            if not promised:
                raise ConfigError(f"{self.folder}: {blocks} is MXFP4, but config.json has no such quantization_config")
            scales = blocks.removesuffix(BLOCKS_SUFFIX) + SCALES_SUFFIX
            if scales not in self._files:
                raise ConfigError(f"{self.folder}: {scales} is missing: MXFP4 blocks mean nothing without their scales")
            *shape, width = self._slice(blocks).get_shape()
            types = {self._slice(name).get_dtype() for name in (blocks, scales)}
            if 2 * width != GROUP or len(shape) != 3 or self._slice(scales).get_shape() != shape or types != {"U8"}:
                raise ConfigError(
                    f"{self.folder}: {blocks} and its scales are not [experts, rows, columns / {GROUP}, {GROUP // 2}] "
                    f"and [experts, rows, columns / {GROUP}] uint8"
                )

    def _is_mxfp4(self, name: str) -> bool:
        return name + BLOCKS_SUFFIX in self._files

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        if self._is_mxfp4(name):
            experts, rows, groups, _ = self._slice(name + BLOCKS_SUFFIX).get_shape()
            return experts, groups * GROUP, rows
        return tuple(self._slice(name).get_shape())

    def _stored_dtype(self, name: str) -> str:
        return "BF16" if self._is_mxfp4(name) or self._packed_name(name) else str(self._slice(name).get_dtype())

    def _read_mxfp4(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a part of a dequantised stack, [experts, columns, rows], of which only whole rows are read."""
        experts, columns, rows = index
        parts = [
            self._read(file_name, lambda file, part=file_name: file.get_slice(part)[experts, rows])
            for file_name in (name + BLOCKS_SUFFIX, name + SCALES_SUFFIX)
        ]
        return mxfp4.dequantise(*parts)[..., columns].mT

    def _tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._read(name, lambda file: file.get_tensor(name))
        return tensor

    def _slice(self, name: str) -> Any:
        return self._read(name, lambda file: file.get_slice(name))

    def _read(self, name: str, read: Any) -> Any:
        if name not in self._files:
            raise ConfigError(f"{self.folder} has no tensor {name}")
        file = self._files[name]
        if file not in self._open_files:
            self._open_files[file] = _open(self.folder / file)
        try:
            return read(self._open_files[file])
        except SafetensorError as error:
            raise ConfigError(f"cannot read {name} from {self.folder / file}: {error}") from None


def open_hf(folder: str | Path) -> HFWeights:
    """Open the weights of an HF folder, single or sharded safetensors. Raises ConfigError for an incomplete folder."""
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"no model folder {folder}")
    hf = load_hf_config(path)

    def stored_slice(name: str) -> StoredSlice | None:  # asked only for tensors of a table, so that the model has one
        return family_of(hf).stored_slice(hf, name)

    if (path / INDEX).is_file():
        files = read_json(path / INDEX).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise ConfigError(f"{path / INDEX} is not a safetensors index: it has no weight_map")
        for name, file in files.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ConfigError(f"{path / INDEX} lists {name} in {file!r}, which is not a file next to it")
        names_by_file = {file: set(_open(path / file).keys()) for file in sorted(set(files.values()))}
        for name, file in files.items():
            if name not in names_by_file[file]:
                raise ConfigError(f"{path / INDEX} lists {name} in {file}, but it is not")
        return HFWeights(path, files, stored_slice)
    if not (path / SINGLE).is_file():
        raise ConfigError(f"{folder} has no {SINGLE} and no {INDEX}: only safetensors are read")
    return HFWeights(path, dict.fromkeys(_open(path / SINGLE).keys(), SINGLE), stored_slice)


def save_hf(
    folder: str | Path,
    tensors: Iterable[tuple[str, TensorSource]],
    source_folder: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 4 << 30,
    write: bool = True,
    table: Sequence[Param] | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write an HF folder: the streamed tensors, with config, tokenizer and untrained tensors of `source_folder`.

    Everything is written to `<folder>.tmp`, which replaces `folder` when it is complete. Raises ConfigError for a
    missing, unknown, repeated or misshapen tensor, or if `folder` holds something else, and OSError if writing fails.

    dtype: target dtype of tensors whose dtype the table does not fix; None casts nothing.
    max_shard_bytes: about the size of a file, which is also held in memory; of `LazyTensor`s only one is.
    write: if False, only drain the stream, for ranks that take part in a gather but do not write. The writer also
        drains it before raising, so that no rank is left waiting in a collective.
    table, config: those of another model on the same trunk, instead of the source's, such as a classifier.
    """
    stream, error = iter(tensors), None
    if write:
        try:
            check_target(Path(folder), Path(source_folder))
            with _replacing(Path(folder)) as staging:
                _write(staging, stream, Path(source_folder), dtype, max_shard_bytes, table, config)
        except Exception as failure:
            error = failure
    for _ in stream:
        pass
    if error is not None:
        raise error


def _write(
    staging: Path,
    stream: Iterator[tuple[str, TensorSource]],
    source: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    table: Sequence[Param] | None,
    config: Mapping[str, Any] | None,
) -> None:
    hf = load_hf_config(source)
    family = family_of(hf)
    rows = [(param, tensor) for param in table or family.params(hf, 1) for tensor in param.hf]
    open_shapes = {tensor.name: tensor.shape for _, tensor in rows}
    fixed_dtype = {tensor.name for param, tensor in rows if param.dtype is not None}
    prefixes, untrained, copies = family.untrained_prefixes(hf), [], {}
    weights = open_hf(source) if (source / SINGLE).is_file() or (source / INDEX).is_file() else None
    view_of = partial(family.stored_slice, hf) if weights is None else weights.view
    stacks = _Stacks({name: view for name in open_shapes if (view := view_of(name)) is not None})
    if prefixes and weights is not None:
        written = open_shapes.keys() | {view.name for view in stacks.views.values()}
        untrained = [name for name in weights.names() if name.startswith(prefixes) and name not in written]
        originals = {name: _MTP_COPIES.get(_LAYER.sub("", name)) for name in untrained}
        copies = {name: original for name, original in originals.items() if original}

    files = ShardWriter(staging, max_shard_bytes)
    for name, tensor in stream:
        if name not in open_shapes:
            raise ConfigError(f"{name} is repeated or not part of {family.architecture} with this config.json")
        if (expected := open_shapes.pop(name)) != tuple(tensor.shape):
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}; config.json asks for {expected}")
        is_float = tensor.dtype.is_floating_point
        cast = dtype if dtype is not None and name not in fixed_dtype and is_float else tensor.dtype
        host_tensor = _cast_on_host(tensor, cast)
        if name in stacks.views:
            if (stack := stacks.add(name, host_tensor)) is not None:
                files.add(*stack)
            continue
        for name_or_copy in (name, *(copy for copy, original in copies.items() if original == name)):
            files.add(name_or_copy, host_tensor)
    if open_shapes:
        raise ConfigError(f"{staging.with_suffix('')}: {_summarize_names(list(open_shapes))} missing")
    for name in untrained:
        if name not in copies and weights is not None:
            files.add(name, weights.get_lazy(name))
    files.finish()

    for file in source.iterdir():
        if file.is_file() and file.suffix in COPIED_SUFFIXES and not file.name.endswith(".safetensors.index.json"):
            shutil.copyfile(file, staging / file.name)
    # Update the model and dtype in config.json; leave the file untouched if it is correct already.
    file_hf = read_json(source / "config.json")
    new_hf = _without_quantization(config or file_hf)
    key = "dtype" if "dtype" in new_hf else "torch_dtype"
    dtype_name = new_hf.get(key) if dtype is None else str(dtype).removeprefix("torch.")
    if dtype_name is not None:
        new_hf = {name: _with_dtype(value, dtype_name) for name, value in new_hf.items()} | {key: dtype_name}
    if new_hf != file_hf:
        (staging / "config.json").write_text(json.dumps(new_hf, indent=2) + "\n")


def _with_dtype(value: Any, dtype: str) -> Any:
    """Return a value of config.json, with the dtype replaced if it is the configuration of a part that has one."""
    keys = value.keys() & {"dtype", "torch_dtype"} if isinstance(value, dict) else ()
    return {**value, **dict.fromkeys(keys, dtype)} if keys else value


def _without_quantization(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without quantization_config, also within the options of a language model."""
    return {
        key: _without_quantization(value) if key == "text_config" else value
        for key, value in hf.items()
        if key != "quantization_config"
    }


class _Stacks:
    """Joins tensors to those that the checkpoint stores. views: their parts, by the table's names."""

    def __init__(self, views: Mapping[str, StoredSlice]) -> None:
        self.views = views
        self._num_missing = Counter(view.name for view in views.values())
        self._parts: dict[str, list[tuple[StoredSlice, TensorSource]]] = {}

    def add(self, name: str, tensor: TensorSource) -> tuple[str, TensorSource] | None:
        """Add a part. Return the stored tensor with its name if this was the last one."""
        view = self.views[name]
        self._parts.setdefault(view.name, []).append((view, tensor))
        self._num_missing[view.name] -= 1
        if self._num_missing[view.name]:
            return None
        parts = self._parts.pop(view.name)
        if all(isinstance(part, torch.Tensor) for _, part in parts):
            return view.name, _join(parts)
        shape = _joined_shape([(view, tuple(part.shape)) for view, part in parts])
        return view.name, LazyTensor(shape, parts[0][1].dtype, partial(_join, parts))


def _joined_shape(parts: Sequence[tuple[StoredSlice, tuple[int, ...]]]) -> tuple[int, ...]:
    """Return the shape of the stored tensor that consists of these parts, each with the shape of the table's tensor."""
    first, first_shape = parts[0]
    rows = sum(shape[0] for view, shape in parts if view.expert == first.expert)
    shape: tuple[int, ...] = (rows, *first_shape[1:])
    if first.transposed:
        shape = shape[::-1]
    return shape if first.expert is None else (1 + max(view.expert or 0 for view, _ in parts), *shape)


def _join(parts: Sequence[tuple[StoredSlice, TensorSource]]) -> torch.Tensor:
    joined = torch.empty(_joined_shape([(view, tuple(part.shape)) for view, part in parts]), dtype=parts[0][1].dtype)
    for view, part in parts:
        matrix = joined if view.expert is None else joined[view.expert]
        target = (matrix.mT if view.transposed else matrix)[view.rows]
        target.copy_(part.read() if isinstance(part, LazyTensor) else part)
    return joined


def save_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write or replace a folder in PEFT's format: adapter_config.json and adapter_model.safetensors.

    Raises OSError if writing fails, and leaves nothing behind.
    """
    host_tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    with _replacing(folder) as staging:
        write_file(host_tensors, staging / "adapter_model.safetensors")
        (staging / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def check_target(folder: Path, source: Path) -> None:
    """Raise ConfigError if an export to `folder` would overwrite something else."""
    if folder.exists() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} exists and is not an HF folder; it is not overwritten: move it away, or set run.dir to another "
            "folder or run.export=false"
        )
    if folder.resolve() == source.resolve():
        raise ConfigError(f"{folder} is the folder that the weights came from; set run.dir to another folder")


def _cast_on_host(tensor: TensorSource, dtype: torch.dtype) -> TensorSource:
    """Return a host copy with this dtype, as the stream may yield views of one buffer. A LazyTensor stays lazy."""
    if isinstance(tensor, LazyTensor):
        return LazyTensor(tensor.shape, dtype, lambda: tensor.read().to(dtype))
    return tensor.detach().to("cpu", dtype, copy=True).contiguous()


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder`, or is removed on an exception."""
    staging, old = folder.with_name(folder.name + ".tmp"), folder.with_name(folder.name + ".old")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        yield staging
    except Exception:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(staging, folder)
    shutil.rmtree(old, ignore_errors=True)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing") from None
    except (SafetensorError, OSError) as error:
        problem = describe_lfs_pointer(file) or f"{file} is truncated or not a safetensors file: {error}"
        raise ConfigError(problem) from None


def _summarize_names(names: list[str]) -> str:
    """Return up to three names, the number of further ones, and the verb."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more + (" is" if len(names) == 1 else " are")
