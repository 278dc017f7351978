"""LoRA's adapters (arXiv:2106.09685) as a table like the family's own: two factors for each weight that has one.

A weight W [out, in] gets A [rank, in] and B [out, rank]; the layer then computes W x + alpha / rank * B (A x). What
Megatron keeps as one weight (q, k, v; gate, up) has one A, and a B whose rows lie as W's do, so that each of the HF
tensors has that A and rows of its own. Where tensor parallelism cuts W's rows it cuts B's and every rank has A, and
where it cuts W's columns it cuts A's and every rank has B.

    decoder.layers.0.self_attention.linear_qkv.weight     the base weight, canonical name
    decoder.layers.0.self_attention.linear_qkv.lora_a     Replicated, of ...q_proj.lora_A.weight
    decoder.layers.0.self_attention.linear_qkv.lora_b     Qkv, of q_proj, k_proj and v_proj.lora_B.weight
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megarl.config import ConfigError, LoraConfig
from megarl.models.layout_algebra import Dim1Sharding, HFTensor, Param, Replicated
from megarl.models.registry import part_of

LORA_A, LORA_B = "lora_a", "lora_b"
PEFT_PREFIX = "base_model.model."
"""Before the HF names in PEFT's files: its wrappers of a model."""


def factor_names(weight: str) -> tuple[str, str]:
    """Canonical names of A and B of a weight."""
    module = weight.removesuffix(".weight")
    return f"{module}.{LORA_A}", f"{module}.{LORA_B}"


def adapted_weights(params: Iterable[Param], targets: Sequence[str]) -> list[Param]:
    """The weights of a family's table that get adapters: linear layers of attention, MLPs and experts, those that
    `targets` name or all of them. Raises ConfigError for a target that names none."""
    linear = [p for p in params if len(p.hf[0].shape) == 2 and part_of(p) in ("attention", "dense mlp", "experts")]
    paths = {param.megatron: _path(param) for param in linear}
    for target in targets:
        if not any(_matches_target(target, path) for path in paths.values()):
            known = sorted({path.rpartition(".")[2] for path in paths.values()})
            raise ConfigError(f"lora.targets: {target} names no linear layer of this model; it has {', '.join(known)}")
    return [p for p in linear if not targets or any(_matches_target(target, paths[p.megatron]) for target in targets)]


def adapter_params(params: Iterable[Param], lora: LoraConfig) -> list[Param]:
    """The table of all adapters of a model, A and B of each weight in turn; raises as `adapted_weights`."""
    return [factor for param in adapted_weights(params, lora.targets) for factor in factor_params(param, lora.rank)]


def factor_params(param: Param, rank: int) -> tuple[Param, Param]:
    """A and B of a weight."""
    a_name, b_name = factor_names(param.megatron)
    of_rows = isinstance(param.sharding, Dim1Sharding)  # what Megatron calls row parallel
    a = HFTensor(_factor(param.hf[0].name, "lora_A"), (rank, param.hf[0].shape[1]))
    b = tuple(HFTensor(_factor(tensor.name, "lora_B"), (tensor.shape[0], rank)) for tensor in param.hf)
    return (
        replace(param, megatron=a_name, hf=(a,), sharding=param.sharding if of_rows else Replicated(), slot=None),
        replace(param, megatron=b_name, hf=b, sharding=Replicated() if of_rows else param.sharding, slot=None),
    )


def merge_adapter(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + scale * B A, summed in fp32, in the weight's type; of shards what it is of the whole."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)


def peft_tensors(tensors: Mapping[str, torch.Tensor], params: Iterable[Param], rank: int) -> dict[str, torch.Tensor]:
    """Whole factors by the names of `factors` -> all tensors by the names in PEFT's adapter_model.safetensors.

    params: the weights that have adapters. Of several HF tensors that share an A, each gets a copy.
    """
    found = {}
    for param in params:
        a, b = factor_params(param, rank)
        for weight, part in zip(param.hf, b.hf, strict=True):
            found[PEFT_PREFIX + _factor(weight.name, "lora_A")] = tensors[a.hf[0].name]
            found[PEFT_PREFIX + part.name] = tensors[part.name]
    return found


def peft_config(params: Sequence[Param], lora: LoraConfig, base: str) -> dict[str, Any]:
    """PEFT's adapter_config.json for a model with this table, whose base model is the folder `base`."""
    adapted = {tensor.name for param in adapted_weights(params, lora.targets) for tensor in param.hf}
    modules = sorted(name.removesuffix(".weight") for name in adapted)
    leaves = sorted({module.rpartition(".")[2] for module in modules})
    same = {t.name for p in params for t in p.hf if t.name.removesuffix(".weight").rpartition(".")[2] in leaves}
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
        # By their last names, as everybody writes them, unless some of the layers so named have no adapter.
        "target_modules": leaves if same == adapted else modules,
    }


def _factor(weight: str, factor: str) -> str:
    return f"{weight.removesuffix('.weight')}.{factor}.weight"


def _path(param: Param) -> str:
    """The module without numbers: decoder.layers.mlp.experts.linear_fc1."""
    return ".".join(part for part in param.megatron.removesuffix(".weight").split(".") if not part.isdigit())


def _matches_target(target: str, path: str) -> bool:
    return path.endswith(f".{target}")
