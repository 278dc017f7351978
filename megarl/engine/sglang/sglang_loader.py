"""The weight loader of an SGLang engine: what `engine/weight_loader.py` must know about SGLang's models.

SGLang calls `load` when /update_weights_from_tensor names it as the load format.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch

from megarl.engine import weight_loader

LOADER_NAME = f"{__name__}.load"
"""The loader's name in SGLang, as server argument and as load format."""
_WITH_LANGUAGE_MODEL = {"KimiK25ForConditionalGeneration"}
"""SGLang's models of which only `language_model` is trained; the tables have its tensors' names."""


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Execute an order, see `weight_loader.load`.

    On a GPU SGLang moves every tensor to its device before this call. A tensor on another device would arrive as a
    copy, and the trainer would not see what is written to it.
    """
    if type(model).__name__ in _WITH_LANGUAGE_MODEL:
        model = model.language_model  # type: ignore[assignment]
    weight_loader.load(model, named_tensors, weight_loader.LoaderHooks(finish, find_layout_oddities, place_experts))


def finish(model: torch.nn.Module) -> None:
    """Recompute what SGLang derives from weights."""
    from sglang.srt.model_loader.loader import post_load_weights

    if type(model).__name__ == "Glm4MoeLiteForCausalLMNextN":  # SGLang 0.5.23 takes it for a model with layers
        model.post_load_weights(is_nextn=True)  # type: ignore[operator]
    else:
        post_load_weights(model)
    for module in model.modules():  # Gemma's norms cache 1 + weight for fused kernels
        getattr(module, "refresh_gemma_weight", lambda: None)()


def place_experts(experts: Mapping[int, Sequence[int]]) -> None:
    """Send the tokens of these layers' experts to new places, as SGLang's own EPLB does after it has moved weights.

    experts: layer -> the expert in each slot, one rank's slots after another's. The tables are updated in place, since
    CUDA graphs have their addresses. Raises ValueError if the engine has other layers or slots.
    """
    from sglang.srt.eplb import expert_location
    from sglang.srt.runtime_context import get_parallel

    table = expert_location.get_global_expert_location_metadata()
    if table is None:
        raise ValueError("SGLang has no expert locations for this model")
    physical_to_logical = table.physical_to_logical_map_cpu.clone()
    for layer, placement in experts.items():
        if layer >= len(physical_to_logical) or len(placement) != table.num_physical_experts:
            raise ValueError(
                f"layer {layer} with {len(placement)} experts, but the engine has {len(physical_to_logical)} layers "
                f"with {table.num_physical_experts}"
            )
        physical_to_logical[layer] = torch.tensor(placement)
    if torch.equal(physical_to_logical, table.physical_to_logical_map_cpu):
        return
    rank, on = get_parallel().moe_ep_rank, table.physical_to_logical_map.device
    logical_to_physical = expert_location._compute_logical_to_all_physical_map(  # slot by slot, so on the host
        physical_to_logical, table.num_logical_experts, table.ep_size, rank
    )
    new = expert_location.ExpertLocationMetadata._init_raw(
        table.ep_size, physical_to_logical.to(on), logical_to_physical.to(on), rank
    )
    table.update(new, list(range(table.num_layers)))


_LAYOUT_MARKERS = {
    "load_up_proj_weight_first": "has the rows of up before those of gate",
    "use_flashinfer_trtllm_moe": "has the rows of up before those of gate, and packs them into blocks",
    "w13_swiglu_interleaved": "has the rows of gate and up in turn",
    "use_triton_kernels": "has its experts transposed",
    "use_marlin": "has its weights repacked",
    "is_marlin_converted": "has its weights repacked",
    "_mega_moe_weights_built": "has its experts repacked",
    "is_shuffled": "has its weights shuffled",
    "aiter_bpreshuffled": "has its weights shuffled",
    "format_ue8m0": "has scales that are powers of two",
    "hpc_ops_w13_weight_scale": "computes with a copy of its scales",
    "_block_fp8_bf16_weight": "computes with a copy of its weights",
}
"""Attributes that SGLang sets on a layer, its compute method or its weights: layout facts that shapes do not show."""


def find_layout_oddities(model: torch.nn.Module) -> list[str]:
    """List the layers that say that their weights are not where the layout tables expect them; one line each."""
    oddities = []
    for name, module in model.named_modules():
        method = getattr(module, "weight_load_method", None) or getattr(module, "quant_method", None)
        for owner in (module, method, *module.parameters(recurse=False)):
            for marker, meaning in _LAYOUT_MARKERS.items():
                value = getattr(owner, marker, None)
                if value is not None and value is not False:
                    oddities.append(f"{name or 'the model'} {meaning} ({marker})")
    return list(dict.fromkeys(oddities)) + _check_expert_location()


def _check_expert_location() -> list[str]:
    """Check SGLang's expert location table, if it is loaded: each expert must be in the slot of its number."""
    module = sys.modules.get("sglang.srt.eplb.expert_location")
    if module is None or (table := module.get_global_expert_location_metadata()) is None:
        return []
    physical_to_logical = table.physical_to_logical_map_cpu
    is_identity = physical_to_logical == torch.arange(physical_to_logical.shape[1]) % table.num_logical_experts
    return [] if bool(is_identity.all()) else ["the engine's experts are not at their index (init_expert_location)"]
