"""LoRA adapters (arXiv:2106.09685) as a table like the family's: two factors for each adapted weight.

A weight W [out, in] gets A [rank, in] and B [out, rank]; the layer computes W x + alpha / rank * B (A x). A weight that
Megatron fuses (q, k, v; gate, up) has one A, and a B with rows in the order of W's, so each HF tensor has that A and
its own rows of B. Where tensor parallelism shards W's rows, it shards B's rows and replicates A. Where it shards W's
columns, it shards A's columns and replicates B.

    decoder.layers.0.self_attention.linear_qkv.weight     the base weight, canonical name
    decoder.layers.0.self_attention.linear_qkv.lora_a     Replicated, of ...q_proj.lora_A.weight
    decoder.layers.0.self_attention.linear_qkv.lora_b     QKVSharding, of q_proj, k_proj and v_proj.lora_B.weight
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import filterfalse
from typing import Any

import torch

from megarl.config import ConfigError, LoraConfig
from megarl.models.deepseek_sparse import is_indexer
from megarl.models.layout_algebra import Dim1Sharding, HFTensor, Param, Replicated
from megarl.models.registry import part_of

LORA_A, LORA_B = "lora_a", "lora_b"
MERGED_AT_ONCE = 1 << 22
"""Elements that are merged at a time: all ranks are added while they are in the cache of a GPU."""
PEFT_PREFIX = "base_model.model."
"""Prefix of HF names in PEFT's files, from its model wrappers."""


def factor_names(weight: str) -> tuple[str, str]:
    """Return the canonical names of a weight's A and B."""
    module = weight.removesuffix(".weight")
    return f"{module}.{LORA_A}", f"{module}.{LORA_B}"


def adapted_weights(params: Iterable[Param], targets: Sequence[str]) -> list[Param]:
    """Return the weights of a family's table that get adapters.

    These are the linear layers of attention, MLPs and experts that `targets` name, or all of them if it is empty.
    With sparse attention two kinds have none: indexers, for which the policy's loss has no gradient, and the up
    projection of keys and values, whose weight Megatron multiplies into queries and outputs without calling the layer.
    Raises ConfigError for a target that matches none.
    """
    paths = list(_linear_paths(params))
    for target in targets:
        if not any(path.endswith(f".{target}") for _, path in paths):
            known = ", ".join(sorted({path.rpartition(".")[2] for _, path in paths}))
            raise ConfigError(f"lora.target_modules: {target} names no linear layer of this model; it has {known}")
    return _select(paths, targets)


def adapted_in_layer(params: Iterable[Param], targets: Sequence[str]) -> list[Param]:
    """Return `adapted_weights` of some layers of a model, of which none may have a target."""
    return _select(_linear_paths(params), targets)


def _linear_paths(params: Iterable[Param]) -> Iterator[tuple[Param, str]]:
    """Yield the weights that may have adapters, each with its module's name without the numbers."""
    params, parts = list(params), ("attention", "dense mlp", "experts")
    linear = [p for p in params if len(p.hf[0].shape) == 2 and part_of(p) in parts and p.megatron.endswith(".weight")]
    if any(map(is_indexer, params)):
        linear = [p for p in linear if not is_indexer(p) and ".linear_kv_up_proj." not in p.megatron]
    for param in linear:
        module = param.megatron.removesuffix(".weight").split(".")
        yield param, ".".join(part for part in module if not part.isdigit())


def _select(paths: Iterable[tuple[Param, str]], targets: Sequence[str]) -> list[Param]:
    suffixes = tuple(f".{target}" for target in targets) or ""  # every path ends with ""
    return [param for param, path in paths if path.endswith(suffixes)]


def adapter_params(params: Iterable[Param], lora: LoraConfig) -> list[Param]:
    """Return the table of all adapters of a model, A and B of each weight in turn. Raises as `adapted_weights`."""
    weights = adapted_weights(params, lora.target_modules)
    return [factor for weight in weights for factor in factor_params(weight, lora.rank)]


def factor_params(param: Param, rank: int) -> tuple[Param, Param]:
    """Return a weight's A and B as table rows."""
    a_name, b_name = factor_names(param.megatron)
    is_row_parallel = isinstance(param.sharding, Dim1Sharding)  # Megatron's row parallel
    a = HFTensor(_factor(param.hf[0].name, "lora_A"), (rank, param.hf[0].shape[1]))
    b = tuple(HFTensor(_factor(tensor.name, "lora_B"), (tensor.shape[0], rank)) for tensor in param.hf)
    a_sharding, b_sharding = (param.sharding, Replicated()) if is_row_parallel else (Replicated(), param.sharding)
    return (
        replace(param, megatron=a_name, hf=(a,), sharding=a_sharding, slot=None),
        replace(param, megatron=b_name, hf=b, sharding=b_sharding, slot=None),
    )


def merge_adapter(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return W + scale * B A, summed in fp32, in the weight's dtype.

    Each element is computed from its row of B and its column of A alone, in the order of ranks, where a matrix product
    may sum in an order that depends on the shape. So a part of a weight gets the bits of that part of the whole, and a
    stack of weights those of each.

    weight: [rows, columns], or [experts, rows, columns]. a: [rank, columns]. b: [rows, rank]. Both are stacked like it.
    """
    merged, b, a = weight.to(torch.float32, copy=True), b.float() * scale, a.float()
    rows = max(1, MERGED_AT_ONCE // (weight.shape[:-2].numel() * weight.shape[-1]))
    for part, b_part in zip(merged.split(rows, -2), b.split(rows, -2), strict=True):
        for rank in range(a.shape[-2]):
            part.addcmul_(b_part[..., rank : rank + 1], a[..., rank : rank + 1, :])
    return merged.to(weight.dtype)


class MergedWeights(Mapping[str, torch.Tensor]):
    """A rank's weights by canonical name, with their adapters merged on each lookup and not cached."""

    def __init__(self, weights: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor], scale: float) -> None:
        self.weights, self.adapters, self.scale = weights, adapters, scale

    def __getitem__(self, name: str) -> torch.Tensor:
        a, b = factor_names(name)
        if a not in self.adapters:
            return self.weights[name]
        return merge_adapter(self.weights[name], self.adapters[a], self.adapters[b], self.scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def peft_tensors(tensors: Mapping[str, torch.Tensor], params: Iterable[Param], rank: int) -> dict[str, torch.Tensor]:
    """Return the tensors of PEFT's adapter_model.safetensors, by their names there.

    HF tensors that share an A get a copy each. Multi-token prediction layers are left out: transformers' models, which
    PEFT adapts, have none.

    tensors: full factors, by the HF names of `factor_params`.
    params: the adapted weights.
    """
    renamed = {}
    for param in filterfalse(_is_mtp, params):
        a, b = factor_params(param, rank)
        for weight, b_part in zip(param.hf, b.hf, strict=True):
            renamed[PEFT_PREFIX + _factor(weight.name, "lora_A")] = tensors[a.hf[0].name]
            renamed[PEFT_PREFIX + b_part.name] = tensors[b_part.name]
    return renamed


def peft_config(params: Sequence[Param], lora: LoraConfig, base: str) -> dict[str, Any]:
    """Return PEFT's adapter_config.json for a model with this table. base: folder of the base model."""
    weights = filterfalse(_is_mtp, adapted_weights(params, lora.target_modules))
    adapted = {tensor.name for param in weights for tensor in param.hf}
    params = list(filterfalse(_is_mtp, params))
    modules = sorted(name.removesuffix(".weight") for name in adapted)
    last_names = sorted({module.rpartition(".")[2] for module in modules})
    matching = {t.name for p in params for t in p.hf if t.name.removesuffix(".weight").rpartition(".")[2] in last_names}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        # Last name components, as is usual, unless some layers with these names have no adapter.
        "target_modules": last_names if matching == adapted else modules,
    }


def _is_mtp(param: Param) -> bool:
    return param.megatron.startswith("mtp.")


def _factor(weight: str, factor: str) -> str:
    return f"{weight.removesuffix('.weight')}.{factor}.weight"
