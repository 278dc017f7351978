"""A checkpoint's model as an HF folder, without ranks: what the run's own export would have written, byte for byte.

Tensor by tensor, straight from the checkpoint's files into those of the HF folder. What is held at a time is one tensor
of Megatron's, which is several of HF's (a layer's q, k and v, an expert's gate and up), the piece of it that is being
read, and with LoRA what it takes to add an adapter in fp32: `MEMORY_FACTOR` times the largest tensor, however many there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint import disk_space
from megarl.checkpoint.dist_checkpoint_reader import CheckpointReader
from megarl.config import Config, ConfigError
from megarl.models.hf_folder import LazyTensor, save_adapter, save_hf
from megarl.models.layout_algebra import FUSED_NORMS, PADDING, Param, VocabSharding, split_with
from megarl.models.lora_tables import (
    adapted_weights,
    adapter_params,
    factor_names,
    merge_adapter,
    peft_config,
    peft_tensors,
)

MEMORY_FACTOR = 6
"""What is held of the largest tensor of Megatron's at most, in its own type in fp32: itself, a piece as it is read and
as it is unpacked, the sum with its adapter; and the two HF tensors that are made of it."""
_LAYER = re.compile(r"((?:decoder|mtp)\.layers)\.(\d+)\.(transformer_layer\.)?(.*)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.*)")
_FUSED_NAMES = {canonical: fused for fused, canonical in FUSED_NORMS.items()}


class CheckpointParams:
    """Parameters of a table by their canonical names, as they are in a checkpoint, whole: as one tensor parallel rank
    would have them, with whatever padding the vocabulary has. Of the same parameter again nothing is read."""

    def __init__(self, found: CheckpointReader) -> None:
        self._reader = found
        self._cached: tuple[str, torch.Tensor] | None = None

    def locate(self, param: Param) -> tuple[str, tuple[int, ...]]:
        """The tensor that a parameter is in, and at which numbers of its first dimensions. Raises ConfigError."""
        for name, at in _candidate_locations(param):
            if name in self._reader and len(self._reader[name].shape) == len(at) + len(param.hf[0].shape):
                if all(number < size for number, size in zip(at, self._reader[name].shape, strict=False)):
                    return name, at
        raise ConfigError(
            f"{self._reader.folder} has no {param.megatron}: it is of another model than the configuration's, or of "
            "another program"
        )

    def dtype(self, param: Param) -> torch.dtype:
        return self._reader[self.locate(param)[0]].dtype

    def read(self, param: Param) -> torch.Tensor:
        if self._cached is None or self._cached[0] != param.megatron:
            self._cached = None  # so that two are never held
            self._cached = param.megatron, self._reader.read(*self.locate(param))
        return self._cached[1]

    def check(self, param: Param) -> None:
        """Raise ConfigError where the table has the parameter in another shape."""
        name, at = self.locate(param)
        shape, (dim, slices) = list(self._reader[name].shape[len(at) :]), split_with(param, param.sharding, 1, 0)
        wanted = list(param.hf[0].shape)
        wanted[dim] = sum(part.stop - part.start for part in slices if part.source != PADDING)
        if isinstance(param.sharding, VocabSharding):  # what follows is padding, as much as the layout asked for
            shape[dim] = min(shape[dim], wanted[dim])
        if wanted != shape:
            raise ConfigError(
                f"{self._reader.folder}: {param.megatron} has shape {tuple(shape)}, and the configuration's model has "
                f"{tuple(wanted)}"
            )


def _candidate_locations(param: Param) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Where Megatron's checkpoints may have a parameter. Layers that are all alike are one tensor, with a dimension for
    them in front, and so are the experts of a layer."""
    if param.megatron.rpartition(".")[2] in ("lora_a", "lora_b"):
        expert = () if param.expert is None else (param.expert,)
        yield f"adapters.{param.megatron.replace(f'.{param.expert}.linear', '.linear')}", expert
        return
    match = _LAYER.fullmatch(param.megatron)
    if match is None:
        yield param.megatron, ()
        return
    stack, number, inner, rest = match[1], int(match[2]), match[3] or "", match[4]
    at: tuple[int, ...] = ()
    if expert_of := _EXPERT.fullmatch(rest):
        rest, at = f"mlp.experts.experts.{expert_of[2]}", (int(expert_of[1]),)
    for name in (rest, *([_FUSED_NAMES[rest]] if rest in _FUSED_NAMES else [])):
        yield f"{stack}.{inner}{name}", (number, *at)
        yield f"{stack}.{number}.{inner}{name}", at


def iter_hf_tensors(
    weights: CheckpointParams, table: Sequence[Param], merged: Mapping[str, tuple[Param, Param, float]]
) -> Iterator[tuple[str, LazyTensor]]:
    """(HF name, tensor) in the table's order, as `gather_hf`. merged: of weights that have an adapter, by their
    canonical names, its factors and what they are scaled by."""

    def whole(param: Param) -> torch.Tensor:
        if param.megatron not in merged:
            return weights.read(param)
        a, b, scale = merged[param.megatron]
        rows, columns = weights.read(a), weights.read(b)
        return merge_adapter(weights.read(param), rows, columns, scale)

    cache: list[tuple[str, torch.Tensor]] = []

    def read(param: Param, source: int) -> torch.Tensor:
        if not cache or cache[0][0] != param.megatron:
            cache.clear()
            cache.append((param.megatron, whole(param)))
        return extract_hf_tensor(param, cache[0][1], source)

    for param in table:
        weights.check(param)
        dtype = weights.dtype(param)
        for source, tensor in enumerate(param.hf):
            yield tensor.name, LazyTensor(tensor.shape, dtype, lambda p=param, s=source: read(p, s))  # type: ignore[misc]


def extract_hf_tensor(param: Param, whole: torch.Tensor, source: int) -> torch.Tensor:
    """An HF tensor out of the whole of Megatron's that it is a part of."""
    dim, slices = split_with(param, param.sharding, 1, 0)
    parts, at = [], 0
    for part in slices:
        size = part.stop - part.start
        if part.source == source:
            parts.append(whole.narrow(dim, at, size))
        at += size
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def convert(
    folder: Path,
    out: Path,
    config: Config,
    source: Path,
    table: Sequence[Param],
    classifier: Mapping[str, Any] | None = None,
) -> None:
    """Write the model in `folder`, which is a role's in a checkpoint, as the HF folder `out`; adapters are merged.

    source: the HF folder that training began with, for tokenizer, configuration and layers that are not trained. table:
    of the model's parameters. classifier: config.json of one with a head of one value. Raises ConfigError where the
    checkpoint is not of this model, OSError where the disk does not take it; nothing is left of it then.
    """
    weights, merged = CheckpointParams(CheckpointReader(folder)), {}
    if config.lora.rank:
        scale = config.lora.alpha / config.lora.rank
        factors = {param.megatron: param for param in adapter_params(table, config.lora)}
        for param in adapted_weights(table, config.lora.targets):
            a, b = (factors[name] for name in factor_names(param.megatron))
            merged[param.megatron] = a, b, scale
    stream = list(iter_hf_tensors(weights, table, merged))
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    kept = {tensor.name: param.dtype for param in table for tensor in param.hf if param.dtype is not None}
    disk_space.check_free_space(
        out, sum(prod(tensor.shape) * kept.get(name, dtype).itemsize for name, tensor in stream)
    )
    save_hf(out, stream, source, dtype, table=table, config=classifier)


def convert_adapter(folder: Path, out: Path, config: Config, table: Sequence[Param]) -> None:
    """Write the adapters in `folder` alone, in PEFT's format. Of these all are held. Raises as `convert`."""
    if not config.lora.rank:
        raise ConfigError("this run has no adapters (lora.rank=0); convert the model itself")
    weights, settings = CheckpointParams(CheckpointReader(folder)), config.lora
    factors = {
        tensor.name: extract_hf_tensor(param, weights.read(param), number).clone()
        for param in adapter_params(table, settings)
        for number, tensor in enumerate(param.hf)
    }
    base = str(Path(config.model.path).resolve())
    tensors = peft_tensors(factors, adapted_weights(table, settings.targets), settings.rank)
    save_adapter(out, tensors, peft_config(table, settings, base))
