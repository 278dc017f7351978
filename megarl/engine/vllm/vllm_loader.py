"""Weights of a vLLM engine: where the layout tables expect them, under the tables' names.

On a CPU vLLM 0.32 repacks the weights of linear layers and experts while it loads a model, so that a write to the
parameters would be lost or corrupt them. `PlainLoader` keeps the parameters as they are in the checkpoint; kernels that
need another form get a copy, which `refresh_derived` renews after a weight sync.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.deepseek_v2 import DeepseekV2Attention

LOAD_FORMAT = "megarl"
"""vLLM's `load_format` that selects `PlainLoader`."""


class PlainExperts:
    """Mixed into vLLM's CPU experts: `w13_weight` [experts, 2 I, H], rows of gate before those of up, and `w2_weight`
    [experts, H, I] stay in this layout; the kernel computes with a packed copy."""

    moe_config: Any
    isa: str
    _padded_intermediate_size: Any

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack a copy, in place of vLLM's own packing of the parameters."""
        self._layer_weights: tuple[torch.nn.Parameter, torch.nn.Parameter] = layer.w13_weight, layer.w2_weight  # type: ignore[assignment]
        self._packed: list[torch.Tensor] = []
        self.refresh()

    def refresh(self) -> None:
        """Pack the parameters again, after they were written."""
        w13, w2 = (weight.data for weight in self._layer_weights)
        size = self.moe_config.intermediate_size_per_partition
        padded = self._padded_intermediate_size(self.moe_config)
        if padded != size:
            wide = w13.new_zeros(w13.shape[0], 2 * padded, w13.shape[2])
            wide[:, :size], wide[:, padded : padded + size] = w13[:, :size], w13[:, size:]
            w13, w2 = wide, F.pad(w2, (0, padded - size))
        packed = [cpu_prepack_moe_weight(weight.contiguous(), self.isa) for weight in (w13, w2)]
        if not self._packed:
            self._packed = packed
        for old, new in zip(self._packed, packed, strict=True):
            old.copy_(new)

    def apply(self, **kwargs: Any) -> None:
        """Compute with the packed copy. vLLM passes all arguments by name."""
        kwargs["w1"], kwargs["w2"] = self._packed
        if (expert_map := kwargs["expert_map"]) is not None:
            # The kernel indexes its local experts by global numbers. Give it local ones, and weight 0 to experts of
            # other ranks.
            local = expert_map[kwargs["topk_ids"].long()]
            kwargs["topk_weights"] = torch.where(local < 0, 0.0, kwargs["topk_weights"]).contiguous()
            kwargs["topk_ids"] = local.clamp(min=0).to(torch.int32).contiguous()
        super().apply(**kwargs)  # type: ignore[misc]


_PLAIN_CLASSES: dict[type, type] = {}


def _plain_class(experts: type) -> type:
    return _PLAIN_CLASSES.setdefault(experts, type(f"Plain{experts.__name__}", (PlainExperts, experts), {}))


@register_model_loader(LOAD_FORMAT)
class PlainLoader(DefaultModelLoader):
    """Loads like vLLM's load format "auto", and leaves all weights where the layout tables say."""

    def __init__(self, load_config: Any) -> None:
        load_config = copy.copy(load_config)  # vLLM loads the draft model with the original
        load_config.load_format = "auto"
        super().__init__(load_config)

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load, then mark layers before vLLM processes their weights."""
        super().load_weights(model, model_config)
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedLinearMethod):
                module._cpu_skip_gemm_dispatch = True  # type: ignore[assignment]  # vLLM's own mark: compute by F.linear
            elif isinstance(method, UnquantizedFusedMoEMethod):
                method.experts_cls = _plain_class(method.experts_cls)

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Load and process a model."""
        model = super().load_model(*args, **kwargs)
        for module in model.modules():
            if _is_head(module):
                module.cpu_linear = F.linear  # type: ignore[assignment]  # vLLM computes logits with a packed copy
            if isinstance(module, DeepseekV2Attention) and hasattr(module, "q_a_proj"):
                _join_projections(module)
        return model


def _is_head(module: torch.nn.Module) -> bool:
    return isinstance(getattr(module, "quant_method", None), UnquantizedEmbeddingMethod) and hasattr(module, "weight")


def _join_projections(attention: Any) -> None:
    """Make two matrices views of one, where the tables have one, `fused_qkv_a_proj_with_mqa`. vLLM has it itself with
    MLA's kernels only."""
    parts = attention.q_a_proj, attention.kv_a_proj_with_mqa
    attention.joined_qkv_a = torch.cat([part.weight.data for part in parts])
    start = 0
    for part in parts:
        stop = start + len(part.weight)
        part.weight.data, start = attention.joined_qkv_a[start:stop], stop


def refresh_derived(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Recompute what vLLM derives from weights, after they were written."""
    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
            experts: Any = module.quant_method
            experts.moe_kernel.fused_experts.refresh()
        if isinstance(module, MLAAttention):
            module.process_weights_after_loading(dtype)


def find_layout_oddities(model: torch.nn.Module) -> list[str]:
    """List the layers whose weights are not where the layout tables expect them; one line each."""
    oddities = []
    for name, module in model.named_modules():
        # A layer that serves adapters passes on some attributes of the one within.
        method = None if isinstance(module, BaseLayerWithLoRA) else getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedLinearMethod):
            if not getattr(module, "_cpu_skip_gemm_dispatch", False) or not module.weight.numel():
                oddities.append(f"{name} has its weight repacked")
        elif isinstance(method, UnquantizedFusedMoEMethod):
            if not isinstance(method.moe_kernel.fused_experts, PlainExperts):
                oddities.append(f"{name} has its experts repacked")
        elif _is_head(module):
            if module.cpu_linear is not F.linear:
                oddities.append(f"{name} computes with a copy of its weight")
        elif method is not None and any(True for _ in module.parameters(recurse=False)):
            oddities.append(f"{name} is computed by {type(method).__name__}, which has not been reviewed")
    return oddities


class SlotNames(torch.nn.Module):
    """A model whose parameters have the names of the tables' slots, which are SGLang's.

    Left out are derived parameters and, of a draft model, the embedding and head that it shares with the policy.
    """

    _DERIVED = re.compile(r"\.(W_UV|W_UK_T)$")
    _DRAFT_OWN = re.compile(r"model\.layers\.\d+\.(mtp_block\.)?")
    _JOINED = "fused_qkv_a_proj_with_mqa"
    _SHARED = ("embed_tokens.weight", "shared_head.head.weight", "lm_head.weight")

    def __init__(self, model: torch.nn.Module, is_draft: bool) -> None:
        super().__init__()
        self.target: torch.nn.Module
        self.__dict__["target"], self._is_draft = model, is_draft  # in __dict__, so that it is no submodule

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters by the slots' names."""
        joined = {
            f"{name}.{self._JOINED}.weight": module.joined_qkv_a
            for name, module in self.target.named_modules()
            if isinstance(getattr(module, "joined_qkv_a", None), torch.Tensor)
        }
        yield from ((self._rename(name), tensor) for name, tensor in joined.items())
        for name, parameter in self.target.named_parameters():
            prefix, _, last = name.removesuffix(".weight").rpartition(".")
            is_joined = last in ("q_a_proj", "kv_a_proj_with_mqa") and f"{prefix}.{self._JOINED}.weight" in joined
            is_shared = self._is_draft and name.endswith(self._SHARED)
            if not (is_joined or is_shared or self._DERIVED.search(name)):
                yield self._rename(name), parameter

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:  # type: ignore[override]
        """Yield nothing: these models have no persistent buffers."""
        return iter(())

    def _rename(self, name: str) -> str:
        name = name.replace(".experts.routed_experts.", ".experts.")
        name = name.replace(".base_layer.", ".")  # within a layer that serves adapters
        name = name.replace(".fused_qkv_a_proj.", f".{self._JOINED}.")
        if self._is_draft:  # model.layers.N.mtp_block.x is SGLang's model.decoder.x, and model.layers.N.x its model.x
            name = self._DRAFT_OWN.sub(lambda match: "model.decoder." if match[1] else "model.", name)
        return name
