"""Read Hugging Face safetensors folders lazily, slice by slice, and write them atomically and bitwise exactly.

FP8 matrices are dequantised to bfloat16 on reading. FP8 folders are never written.

Tensors are streamed into files of bounded size. The safetensors library needs all tensors of a file in memory and
copies them. Here a tensor may be read just before it is written, so that only one is in memory at a time. The bytes are
the same as the library's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megarl.config import ConfigError
from megarl.config.strict import describe_lfs_pointer, read_json
from megarl.models.fp8 import SCALE_SUFFIX, dequantise, grid_shape, is_fp8
from megarl.models.layout_algebra import PADDING, Param, split_param
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
DTYPES_BY_NAME = {kind: dtype for dtype, kind in _DTYPE_NAMES.items()}
"""torch dtypes by their safetensors names."""
_ORDER = {dtype: number for number, dtype in enumerate(_DTYPE_NAMES)}


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
    names = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))
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
            file.write(_tensor_bytes(tensors[name], name))


def _tensor_bytes(tensor: TensorSource, name: str) -> memoryview:
    """Return the tensor's bytes, without a copy if it is contiguous on the host."""
    data = tensor.read() if isinstance(tensor, LazyTensor) else tensor
    if (tuple(data.shape), data.dtype) != (tuple(tensor.shape), tensor.dtype):
        raise ValueError(
            f"{name} was declared as {tensor.dtype} {tuple(tensor.shape)} and is {data.dtype} {tuple(data.shape)}"
        )
    return data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


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


COPIED_SUFFIXES = {
    ".json",
    ".txt",
    ".model",
    ".jinja",
    ".tiktoken",
    ".py",
}  # config, tokenizer, and custom code that config.json names
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.\d+\.")
_MTP_COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}
"""Tensors that checkpoints duplicate in multi-token prediction layers, and their originals."""
FLOATS = ("BF16", "F16", "F32", "F64", "F8_E4M3")
"""Supported dtypes of stored weights, by safetensors name."""


class HFWeights:
    """The tensors of an HF folder by name, read on demand. Files stay open.

    A matrix with FP8 block scales is returned in bfloat16, and its scales are not listed as tensors.
    """

    def __init__(self, folder: Path, files: dict[str, str]):
        self.folder = folder
        self._files = files  # tensor name -> file name
        self._open_files: dict[str, Any] = {}

    def names(self) -> list[str]:
        return [name for name in self._files if not self._is_scale(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def get(self, name: str) -> torch.Tensor:
        """Return the full tensor on the host, in the file's dtype (bfloat16 for FP8)."""
        tensor = self._tensor(name)
        return dequantise(tensor, self._tensor(name + SCALE_SUFFIX)) if name + SCALE_SUFFIX in self._files else tensor

    def get_lazy(self, name: str) -> LazyTensor:
        """Return the full tensor as a `LazyTensor`."""
        dtype = torch.bfloat16 if name + SCALE_SUFFIX in self._files else DTYPES_BY_NAME[self._slice(name).get_dtype()]
        return LazyTensor(self.shape(name), dtype, lambda: self.get(name))

    def get_slice(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """Return [start, stop) along `dim`. With `dim` 0, only that part is read from disk."""
        index = (slice(None),) * dim + (slice(start, stop),)
        values: torch.Tensor = self._read(name, lambda file: file.get_slice(name)[index])
        if name + SCALE_SUFFIX not in self._files:
            return values
        return dequantise(values, self._tensor(name + SCALE_SUFFIX), *((start, 0) if dim == 0 else (0, start)))

    def get_shard(self, param: Param, tp: int, rank: int) -> torch.Tensor:
        """Return the shard of rank `rank` of `tp`, a new tensor. Like `layout_algebra.shard`, without full tensors."""
        dim, slices = split_param(param, tp, rank)
        parts = [self.get_slice(param.hf[s.source].name, dim, s.start, s.stop) for s in slices if s.source != PADDING]
        padding = sum(s.stop - s.start for s in slices if s.source == PADDING)
        if padding:
            shape = list(param.hf[0].shape)
            shape[dim] = padding
            dtype = parts[0].dtype if parts else self.get_slice(param.hf[0].name, 0, 0, 1).dtype
            parts.append(torch.zeros(shape, dtype=dtype))
        return torch.cat(parts, dim=dim)

    def check(self, hf: dict[str, Any], optional: Collection[str] = (), mtp: bool = False) -> None:
        """Raise ConfigError, naming the tensor, unless these are exactly the tensors of the model in `hf`.

        Tensors named in `optional`, such as the heads for a critic, may be absent or have any shape. So may multi-token
        prediction layers, unless `mtp` is set.
        """
        family = family_of(hf)
        expected = {tensor.name: tensor.shape for param in family.params(hf, 1, mtp=mtp) for tensor in param.hf}
        expected = {name: shape for name, shape in expected.items() if name not in optional}
        where = f"{self.folder}:"
        self._check_fp8(is_fp8(hf))
        if missing := [name for name in expected if name not in self._files]:
            hint = "; config.json has tie_word_embeddings=false, is it tied?" if missing == [HEAD] else ""
            raise ConfigError(f"{where} {_summarize_names(missing)} missing{hint}")
        prefixes = family.untrained_prefixes(hf)
        allowed = expected.keys() | set(optional)
        extra = [name for name in self.names() if name not in allowed and not _is_ignored(name, prefixes)]
        if HEAD in extra:  # the config ties the embeddings
            extra.remove(HEAD)  # some checkpoints duplicate the tied weight
            if not torch.equal(self.get(HEAD), self.get(EMBEDDING)):
                raise ConfigError(
                    f"{where} {HEAD} differs from {EMBEDDING}, but config.json has tie_word_embeddings=true"
                )
        if extra:
            raise ConfigError(
                f"{where} {_summarize_names(extra)} not part of {family.architecture} with this config.json"
            )
        for name, shape in expected.items():
            if self.shape(name) != shape:
                raise ConfigError(f"{where} {name} has shape {self.shape(name)}; config.json asks for {shape}")
        for name in (*expected, *(head for head in optional if head in self._files)):
            if (dtype := str(self._slice(name).get_dtype())) not in FLOATS:
                raise ConfigError(
                    f"{where} {name} has {dtype} numbers; weights must be {', '.join(FLOATS)}; convert the model to "
                    f"bfloat16, without integers or another quantisation"
                )

    def _check_fp8(self, promised: bool) -> None:
        """Raise ConfigError for an FP8 matrix without matching scales, or for any FP8 matrix unless `promised`."""
        for name in self.names():
            if self._slice(name).get_dtype() != "F8_E4M3":
                continue
            if not promised:
                raise ConfigError(f"{self.folder}: {name} is FP8, but config.json has no quantization_config")
            scales = name + SCALE_SUFFIX
            if scales not in self._files:
                raise ConfigError(f"{self.folder}: {scales} is missing: FP8 weights mean nothing without their scales")
            if self.shape(scales) != (expected := grid_shape(self.shape(name))):
                raise ConfigError(f"{self.folder}: {scales} has shape {self.shape(scales)}; {name} needs {expected}")

    def _is_scale(self, name: str) -> bool:
        return name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in self._files

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
    load_hf_config(path)
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
        return HFWeights(path, files)
    if not (path / SINGLE).is_file():
        raise ConfigError(f"{folder} has no {SINGLE} and no {INDEX}: only safetensors are read")
    return HFWeights(path, dict.fromkeys(_open(path / SINGLE).keys(), SINGLE))


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

    Everything is written to `<folder>.tmp`, which replaces `folder` when it is complete.

    dtype: target dtype of tensors whose dtype the table does not fix; None casts nothing.
    max_shard_bytes: about the size of a file, which is also held in memory; of `LazyTensor`s only one is.
    write: if False, only drain the stream, for ranks that take part in a gather but do not write. The writer also
        drains it before raising, so that no rank is left waiting in a collective.
    table, config: those of another model on the same trunk, instead of the source's: a classifier made from a policy,
        or a model with multi-token prediction layers.

    Raises ConfigError for a missing, unknown, repeated or misshapen tensor, or if `folder` holds something else.
    Raises OSError if writing fails. In either case nothing is left behind.
    """
    stream = iter(tensors)
    try:
        if write:
            _write(Path(folder), stream, Path(source_folder), dtype, max_shard_bytes, table, config)
    except Exception:
        shutil.rmtree(_staging(Path(folder)), ignore_errors=True)
        _drain(stream)
        raise
    _drain(stream)


def _write(
    folder: Path,
    stream: Iterator[tuple[str, TensorSource]],
    source: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    table: Sequence[Param] | None,
    config: Mapping[str, Any] | None,
) -> None:
    check_target(folder, source)
    hf = load_hf_config(source)
    family = family_of(hf)
    rows = [(param, tensor) for param in table or family.params(hf, 1) for tensor in param.hf]
    open_shapes = {tensor.name: tensor.shape for _, tensor in rows}
    trained = set(open_shapes)
    mtp_tensors = _mtp_tensors(source, family.untrained_prefixes(hf))
    copies: dict[str, list[str]] = {}
    for name in mtp_tensors:
        if original := _MTP_COPIES.get(_LAYER.sub("", name)):
            copies.setdefault(original, []).append(name)
    fixed_dtype = {tensor.name for param, tensor in rows if param.dtype is not None}

    staging = _staging(folder)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    files = ShardWriter(staging, max_shard_bytes)
    for name, tensor in stream:
        if name not in open_shapes:
            raise ConfigError(f"{name} is repeated or not part of {family.architecture} with this config.json")
        if (expected := open_shapes.pop(name)) != tuple(tensor.shape):
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}; config.json asks for {expected}")
        is_float = tensor.dtype.is_floating_point
        cast = dtype if dtype is not None and name not in fixed_dtype and is_float else tensor.dtype
        host_tensor = _cast_on_host(tensor, cast)
        for name_or_copy in (name, *copies.get(name, ())):
            files.add(name_or_copy, host_tensor)
    if open_shapes:
        raise ConfigError(f"{folder}: {_summarize_names(list(open_shapes))} missing")
    for name, weights in mtp_tensors.items():
        if name not in trained and not any(name in names for names in copies.values()):
            files.add(name, weights.get_lazy(name))
    files.finish()

    for file in source.iterdir():
        if file.is_file() and file.suffix in COPIED_SUFFIXES and not file.name.endswith(".safetensors.index.json"):
            shutil.copyfile(file, staging / file.name)
    _update_config(staging / "config.json", hf, dict(config or hf), dtype)
    _replace(folder, staging)


def save_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write or replace a folder in PEFT's format: adapter_config.json and adapter_model.safetensors.

    Raises OSError if writing fails, and leaves nothing behind.
    """
    staging = _staging(folder)
    shutil.rmtree(staging, ignore_errors=True)
    host_tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    try:
        staging.mkdir(parents=True)
        write_file(host_tensors, staging / "adapter_model.safetensors")
        (staging / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    _replace(folder, staging)


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


def _staging(folder: Path) -> Path:
    return folder.with_name(folder.name + ".tmp")


def _replace(folder: Path, staging: Path) -> None:
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(staging, folder)
    shutil.rmtree(old, ignore_errors=True)


def _mtp_tensors(source: Path, prefixes: tuple[str, ...]) -> dict[str, HFWeights]:
    """Return the names of the source's multi-token prediction tensors, each with the weights to read it from."""
    if not prefixes or not ((source / SINGLE).is_file() or (source / INDEX).is_file()):
        return {}
    weights = open_hf(source)
    return {name: weights for name in weights.names() if name.startswith(prefixes)}


def _update_config(file: Path, written: dict[str, Any], hf: dict[str, Any], dtype: torch.dtype | None) -> None:
    """Update the model and dtype in config.json; leave the file untouched if it is correct already."""
    key = "dtype" if "dtype" in hf else "torch_dtype"
    name = hf.get(key) if dtype is None else str(dtype).removeprefix("torch.")
    unquantized = {field: value for field, value in hf.items() if field != "quantization_config"}
    if unquantized != written or written.get(key) != name:
        file.write_text(json.dumps({**unquantized, key: name}, indent=2) + "\n")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing") from None
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            describe_lfs_pointer(file) or f"{file} is truncated or not a safetensors file: {error}"
        ) from None


def _drain(stream: Iterator[Any]) -> None:
    for _ in stream:
        pass


def _is_ignored(name: str, prefixes: tuple[str, ...]) -> bool:
    return name.startswith(prefixes) or name.endswith(
        "rotary_emb.inv_freq"
    )  # the latter is derived; only old files have it


def _summarize_names(names: list[str]) -> str:
    """Return up to three names, the number of further ones, and the verb."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more + (" is" if len(names) == 1 else " are")
