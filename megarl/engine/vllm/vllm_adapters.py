"""LoRA adapters of several policies in one vLLM engine: a slot for each, which weight syncs write.

vLLM has two tensors for each adapted layer, A [slots, 1, rank, in] and B [slots, 1, out, rank]; a layer that it fuses
(q, k, v; gate, up) has one of each for every part. Here the parts share one A, as in Megatron, and their B are rows of
one tensor. So an adapter's entries are the factors of `reshard/plan/adapters.py`, and weight syncs write there. A slot
that was never written has zeros: the policy before its first update.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from vllm.lora.worker_manager import WorkerLoRAManager

from megarl.engine.vllm.vllm_settings import adapter_id
from megarl.models.lora_tables import LORA_A, LORA_B


class AdapterSlots(WorkerLoRAManager):
    """The adapters of a worker, in place of vLLM's own, which are read from files.

    rank, scale: of all adapters; a layer computes W x + scale * B (A x).
    """

    def __init__(self, *args: Any, rank: int, scale: float) -> None:
        super().__init__(*args)
        self._rank, self._scale = rank, scale
        self._factors: dict[str, dict[str, torch.Tensor]] = {}  # of all slots, by layer

    def create_lora_manager(self, model: torch.nn.Module, vllm_config: Any) -> Any:
        """Return the model with adapted layers."""
        adapted = super().create_lora_manager(model, vllm_config)
        for name, layer in self._adapter_manager.modules.items():
            old, sizes = layer.lora_a_stacked[0], [b.shape[2] for b in layer.lora_b_stacked]
            a = old.new_zeros(len(old), 1, self._rank, old.shape[3])
            b = old.new_zeros(len(old), 1, sum(sizes), self._rank)
            layer.lora_a_stacked, layer.lora_b_stacked = (a,) * len(sizes), b.split(sizes, 2)
            self._factors[name] = {LORA_A: a, LORA_B: b}
        for wrapper in self._adapter_manager.punica_wrapper_mapping.values():
            wrapper.add_lora_linear = partial(self._add_adapters, wrapper)  # type: ignore[method-assign]
        return adapted

    def _add_adapters(
        self,
        wrapper: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        a_parts: tuple[torch.Tensor, ...],
        b_parts: tuple[torch.Tensor, ...],
        *_: Any,
    ) -> None:
        """Add scale * B (A x) to each token's output `y` [tokens, out], if its request names an adapter.

        In place of vLLM's CPU kernels, which copy the factors once per token and take the last slot for a request
        without an adapter. wrapper: knows each token's slot, -1 for none. x: [tokens, in].
        """
        slots = wrapper.token_lora_indices
        for slot in slots.unique().tolist():
            if slot < 0:
                continue
            rows = (slots == slot).nonzero()[:, 0]
            hidden = x[rows] @ a_parts[0][slot, 0].T  # parts share A
            for part, b in zip(y.split([b.shape[2] for b in b_parts], 1), b_parts, strict=True):
                part.index_add_(0, rows, hidden @ b[slot, 0].T, alpha=self._scale)

    def set_active_adapters(self, requests: set[Any], mapping: Any | None) -> None:
        """Set which adapter each token of the next step is for."""
        for request in requests:
            self._slot_of(request.lora_name)
        if mapping is not None:
            self._adapter_manager.set_adapter_mapping(mapping)

    def find_factors(self, name: str, shapes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of an adapter, as views of its slot. shapes: [dtype, shape] by name. Raises ValueError if
        the engine has others."""
        slot = self._slot_of(name)
        factors = {}
        for factor, (dtype, shape) in shapes.items():
            layer = factor.partition(".weight.")[0]
            if layer not in self._factors:
                raise ValueError(f"the engine serves no adapter of {layer}")
            tensor = self._factors[layer][factor.rpartition(".")[2]][slot, 0]
            if list(tensor.shape) != list(shape):
                raise ValueError(f"{factor} has the shape {list(tensor.shape)} in the engine, not {list(shape)}")
            if tensor.dtype != getattr(torch, dtype):
                raise ValueError(f"{factor} is {tensor.dtype} in the engine, not {dtype}")
            factors[factor] = tensor
        return factors

    def _slot_of(self, name: str) -> int:
        """Return the slot of an adapter, a free one for a new name. Raises ValueError if there is none."""
        number, slots = adapter_id(name), self._adapter_manager.lora_index_to_id
        if number not in slots:
            if None not in slots:
                raise ValueError(f"no slot is left for the adapter {name}; raise rollout.max_loras={len(slots)}")
            slots[slots.index(None)] = number
        return slots.index(number)
