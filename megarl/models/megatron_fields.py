"""`model.megatron` against Megatron's own TransformerConfig, read from its source so that a plan needs no Megatron."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import ConfigError
from megarl.models.family import PLAIN, Extras

OURS = {
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "virtual_pipeline_model_parallel_size": "parallel.vpp",
    "context_parallel_size": "parallel.cp",
    "expert_model_parallel_size": "parallel.ep",
    "expert_tensor_parallel_size": "parallel.etp",
    "params_dtype": "model.dtype",
    "bf16": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "deterministic_mode": "train.deterministic",
    "mtp_num_layers": "train.mtp",
    "mtp_loss_scaling_factor": "train.mtp",
}
"""Fields that have a key of ours."""

FIXED = {
    "fp16": "training in fp16 is not implemented",
    "sequence_parallel": "it is on exactly where parallel.tp > 1",
    "pipeline_model_parallel_layout": "give num_layers_in_first_pipeline_stage and ..._last_... instead",
    "account_for_embedding_in_pipeline_split": "give num_layers_in_first_pipeline_stage instead",
    "account_for_loss_in_pipeline_split": "give num_layers_in_last_pipeline_stage instead",
    "calculate_per_token_loss": "losses are sums over tokens",
    "variable_seq_lengths": "micro-batches differ in length",
    "window_size": "config.json says which layers have windows",
    "window_attn_skip_freq": "config.json says which layers have windows",
    "layernorm_zero_centered_gamma": "weights of norms are what they are in the checkpoint",
    "finalize_model_grads_func": "it is a function",
}
"""Fields that cannot be set at all, and why."""

DDP_FIXED = {
    "use_distributed_optimizer": "it is always on",
    "grad_reduce_in_fp32": "it is always on",
    "overlap_param_gather": "weights must be whole after a step, for the push",
    "average_in_collective": "losses are sums over tokens",
    "use_megatron_fsdp": "weights are cut by the layout, not by FSDP",
    "use_custom_fsdp": "weights are cut by the layout, not by FSDP",
}
"""Fields of DistributedDataParallelConfig that cannot be set at all, and why."""

_DDP = ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig")
_CLASSES = (
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("transformer/transformer_config.py", "TransformerConfig"),
)
_MLA = ("transformer/transformer_config.py", "MLATransformerConfig")


def known_fields(mla: bool) -> frozenset[str]:
    """Names of the fields of TransformerConfig, or of MLATransformerConfig. Raises ConfigError without Megatron."""
    return _fields(*_CLASSES, *([_MLA] if mla else []))


@functools.cache
def _fields(*classes: tuple[str, str]) -> frozenset[str]:
    spec = importlib.util.find_spec("megatron.core")  # finds the package without running it
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("Megatron-Core is not installed; run `bash launch/install.sh`")
    names: set[str] = set()
    for file, name in classes:
        source = Path(spec.submodule_search_locations[0], file).read_text()
        body = next(n.body for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
        annotated = (node.target for node in body if isinstance(node, ast.AnnAssign))
        names |= {target.id for target in annotated if isinstance(target, ast.Name)}
    return frozenset(names)


def check(settings: Mapping[str, Any], mla: bool, extras: Extras = PLAIN) -> None:
    """Raise ConfigError for a key of `model.megatron` that Megatron does not know, with the nearest, or is not free;
    also because of what a model has beyond Megatron."""
    for name in settings:
        if name in OURS:
            raise ConfigError(f"model.megatron.{name} has a key of its own: set {OURS[name]}")
        if name in FIXED:
            raise ConfigError(f"model.megatron.{name} cannot be set: {FIXED[name]}")
        if name not in known_fields(mla):
            kind = "MLATransformerConfig" if mla else "TransformerConfig"
            raise ConfigError(_unknown("model.megatron", name, kind, known_fields(mla)))
    if extras.groups_by_best and settings.get("moe_router_fusion"):
        raise ConfigError("model.megatron.moe_router_fusion: the fused router does not rank groups as this model does")
    if extras.attention_cap and settings.get("attention_dropout"):
        raise ConfigError("model.megatron.attention_dropout is not implemented for attention with a soft cap")


def check_ddp(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key of `train.ddp` that Megatron does not know, with the nearest, or is not free."""
    for name in settings:
        if name in DDP_FIXED:
            raise ConfigError(f"train.ddp.{name} cannot be set: {DDP_FIXED[name]}")
        if name not in _fields(_DDP):
            raise ConfigError(_unknown("train.ddp", name, _DDP[1], _fields(_DDP)))


def _unknown(section: str, name: str, kind: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{section}.{name} is not a field of Megatron's {kind}{hint}"
