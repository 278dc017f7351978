"""Convert a checkpoint's model to an HF folder without ranks, byte-identical to the run's own export.

Works tensor by tensor: memory holds one Megatron tensor and, with LoRA, what merging an adapter takes, at most 6 times
the largest tensor in fp32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint import disk_space
from megarl.checkpoint.dist_checkpoint_reader import CheckpointReader
from megarl.config import Config, ConfigError
from megarl.models.hf_folder import LazyTensor, save_adapter, save_hf
from megarl.models.layout_algebra import FUSED_NORMS, PADDING, Param, SectionSharding, VocabSharding, split_with
from megarl.models.lora_tables import (
    adapted_weights,
    adapter_params,
    factor_names,
    merge_adapter,
    peft_config,
    peft_tensors,
)

_LAYER = re.compile(r"((?:decoder|mtp)\.layers)\.(\d+)\.(transformer_layer\.)?(.*)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.*)")


class CheckpointParams:
    """Whole parameters of a checkpoint by the table's canonical names, as with tp=1 and with any vocabulary padding.

    merged: canonical name of each weight with an adapter -> its two factors and their scale.
    """

    def __init__(self, reader: CheckpointReader, merged: Mapping[str, tuple[Param, Param, float]]) -> None:
        self._reader, self._merged = reader, merged
        self._cached: tuple[str, torch.Tensor] | None = None

    def locate(self, param: Param) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the tensors whose concatenation holds a parameter, and its leading indices in each.

        Raises ConfigError.
        """
        sections = param.sharding.sections if isinstance(param.sharding, SectionSharding) else ()
        for name, indices in _candidate_locations(param):
            names = tuple(f"{name}.{section.name}" for section in sections if section.name) or (name,)
            if all(part in self._reader for part in names):
                shape = self._reader[names[0]].shape
                is_whole = len(shape) == len(indices) + len(param.hf[0].shape)
                if is_whole and all(number < size for number, size in zip(indices, shape, strict=False)):
                    return names, indices
        raise ConfigError(
            f"{self._reader.folder} has no {param.megatron}: it is of another model than the configuration's, or of "
            "another program"
        )

    def dtype(self, param: Param) -> torch.dtype:
        return self._reader[self.locate(param)[0][0]].dtype

    def _read(self, param: Param) -> torch.Tensor:
        names, indices = self.locate(param)
        parts = [self._reader.read(name, indices) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read(self, param: Param) -> torch.Tensor:
        """Return a parameter, merged with its adapter. The last one is cached."""
        if self._cached is None or self._cached[0] != param.megatron:
            self._cached = None  # never hold two
            whole = self._read(param)
            if param.megatron in self._merged:
                *factors, scale = self._merged[param.megatron]
                a, b = map(self._read, factors)
                whole = merge_adapter(whole, a, b, scale)
            self._cached = param.megatron, whole
        return self._cached[1]

    def check(self, param: Param) -> None:
        """Raise ConfigError if the checkpoint's shape of a parameter differs from the table's."""
        names, indices = self.locate(param)
        shape, (dim, slices) = (
            list(self._reader[names[0]].shape[len(indices) :]),
            split_with(param, param.sharding, 1, 0),
        )
        shape[dim] += sum(self._reader[name].shape[len(indices) + dim] for name in names[1:])
        expected = list(param.hf[0].shape)
        expected[dim] = sum(part.stop - part.start for part in slices if part.source != PADDING)
        if isinstance(param.sharding, VocabSharding):  # the rest is padding, whose size depends on the layout
            shape[dim] = min(shape[dim], expected[dim])
        if expected != shape:
            raise ConfigError(
                f"{self._reader.folder}: {param.megatron} has shape {tuple(shape)}, and the configuration's model has "
                f"{tuple(expected)}"
            )


def _candidate_locations(param: Param) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield where Megatron's checkpoints may store a parameter.

    Homogeneous layers are stacked in one tensor with a leading dimension, and so are the experts of a layer.
    """
    if param.megatron.rpartition(".")[2] in ("lora_a", "lora_b"):
        expert = () if param.expert is None else (param.expert,)
        yield f"adapters.{param.megatron.replace(f'.{param.expert}.linear', '.linear')}", expert
        return
    match = _LAYER.fullmatch(param.megatron)
    if match is None:
        yield param.megatron, ()
        return
    stack, number, inner, rest = match[1], int(match[2]), match[3] or "", match[4]
    indices: tuple[int, ...] = ()
    if expert_of := _EXPERT.fullmatch(rest):
        rest, indices = f"mlp.experts.experts.{expert_of[2]}", (int(expert_of[1]),)
    for name in (rest, *(fused for fused, canonical in FUSED_NORMS.items() if canonical == rest)):
        yield f"{stack}.{inner}{name}", (number, *indices)
        yield f"{stack}.{number}.{inner}{name}", indices


def extract_hf_tensor(param: Param, whole: torch.Tensor, source: int) -> torch.Tensor:
    """Return the part of a whole Megatron tensor that is HF tensor number `source`."""
    dim, slices = split_with(param, param.sharding, 1, 0)
    located, offset = [], 0
    for part in slices:
        size = part.stop - part.start
        if part.source == source:
            located.append((part.start, whole.narrow(dim, offset, size)))
        offset += size
    parts = [part for _, part in sorted(located, key=itemgetter(0))]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def convert(
    folder: Path,
    out: Path,
    config: Config,
    source: Path,
    table: Sequence[Param],
    classifier: Mapping[str, Any] | None = None,
) -> None:
    """Write a role's model in `folder`, part of a checkpoint, as the HF folder `out`; adapters are merged.

    source: the HF folder that training started from, for tokenizer, configuration and layers that are not trained.
    table: the model's parameters. classifier: config.json of a model with a scalar head. Raises ConfigError if the
    checkpoint is of another model, and OSError if writing fails, in which case nothing is left behind.
    """
    merged = {}
    if config.lora.rank:
        scale = config.lora.scale
        factors = {param.megatron: param for param in adapter_params(table, config.lora)}
        for param in adapted_weights(table, config.lora.target_modules):
            a, b = (factors[name] for name in factor_names(param.megatron))
            merged[param.megatron] = a, b, scale
    weights = CheckpointParams(CheckpointReader(folder), merged)

    def read(param: Param, source: int) -> torch.Tensor:
        return extract_hf_tensor(param, weights.read(param), source)

    stream = []
    for param in table:
        weights.check(param)
        stored_dtype = weights.dtype(param)
        for number, tensor in enumerate(param.hf):
            stream.append((tensor.name, LazyTensor(tensor.shape, stored_dtype, partial(read, param, number))))
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    disk_space.check_free_space(out, sum(param.size * (param.dtype or dtype).itemsize for param in table))
    save_hf(out, stream, source, dtype, table=table, config=classifier)


def convert_adapter(folder: Path, out: Path, config: Config, table: Sequence[Param]) -> None:
    """Write only the adapters in `folder`, in PEFT's format. Holds all of them in memory. Raises like `convert`."""
    if not config.lora.rank:
        raise ConfigError("this run has no adapters (lora.rank=0); convert the model itself")
    weights, settings = CheckpointParams(CheckpointReader(folder), {}), config.lora
    factors = {
        tensor.name: extract_hf_tensor(param, weights.read(param), number).clone()
        for param in adapter_params(table, settings)
        for number, tensor in enumerate(param.hf)
    }
    base = str(Path(config.model.path).resolve())
    tensors = peft_tensors(factors, adapted_weights(table, settings.target_modules), settings.rank)
    save_adapter(out, tensors, peft_config(table, settings, base))
