"""Weight syncs that move LoRA adapters alone: the table that is planned, and where an engine merges what arrives.

An engine rank has a tensor for A and one for B beside each of its own tensors that has adapters, cut so that their
product is the change of what the rank has of the weight: where the engine cuts rows, B is cut and A is whole, and the
other way round for columns. Factors of experts are stacked like the experts. Everything else is as for weights.

    engine's tensor             model.layers.0.self_attn.qkv_proj.weight            [q_r | k_r | v_r, in]
    beside it                   model.layers.0.self_attn.qkv_proj.weight.linear_qkv.lora_a      [rank, in]
                                model.layers.0.self_attn.qkv_proj.weight.linear_qkv.lora_b      [q_r | k_r | v_r, rank]
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.config import LoraConfig
from megarl.models.family import Family
from megarl.models.layout_algebra import Dim1Sharding, EngineSlot, HFConfig, Param, Replicated
from megarl.models.lora_tables import LORA_A, LORA_B, adapted_in_layer, factor_params
from megarl.reshard.plan.layout import EngineLayout, Wire, engine_shapes, planes

Merge = list[Any]
"""[name, first, count, dim, offset, name of A, name of B]: the part of an engine's tensor that a pair of factors
changes. It begins at `offset` of dimension `dim`, 0 for rows. If the tensor is a stack of experts, it is that part of
`count` entries from `first` on, where the factors have theirs, too; else `first` is -1."""


@dataclass(frozen=True)
class AdapterTable:
    """The factors of all adapters, as a `cells.LayerTable`.

    targets: as `lora.target_modules`, checked before for the whole model. engine: where the weights are.
    """

    family: Family
    lora: LoraConfig
    engine: EngineLayout

    def check(self, hf: HFConfig) -> None:
        self.family.check(hf)

    def num_experts(self, hf: HFConfig) -> int:
        return self.family.num_experts(hf)

    def num_mtp_layers(self, hf: HFConfig) -> int:
        return self.family.num_mtp_layers(hf)

    def before_decoder(self, hf: HFConfig) -> list[Param]:
        return []

    def after_decoder(self, hf: HFConfig) -> list[Param]:
        return []

    def engine_layer(self, hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
        """Return A and B of each weight of a decoder layer, once for each tensor of the engine that has part of it."""
        weights = adapted_in_layer(self.family.layer(hf, layer, experts), self.lora.target_modules)
        return [factor for weight in weights for factor in self._factors(weight)]

    def _factors(self, weight: Param) -> Iterable[Param]:
        for part in weight.by_slot():
            if (slot := self.engine.slot_of(part)) is not None:
                yield from engine_factors(part, slot, self.lora.rank)


def engine_factors(weight: Param, slot: EngineSlot, rank: int) -> tuple[Param, Param]:
    """Return A and B of a weight as table rows with their places in the engine. slot: the weight's there."""
    is_cut_by_columns = isinstance(slot.sharding, Dim1Sharding)
    a, b = factor_params(weight, rank)
    a_name, b_name = factor_slots(weight, slot)
    whole, cut = replace(slot, sharding=Replicated(), offset=0), replace(slot, offset=0)
    a_slot, b_slot = (cut, whole) if is_cut_by_columns else (whole, cut)
    return (
        replace(a, slot=replace(a_slot, name=a_name), more_slots=(), dtype=None),
        replace(b, slot=replace(b_slot, name=b_name), more_slots=(), dtype=None),
    )


def factor_slots(weight: Param, slot: EngineSlot) -> tuple[str, str]:
    """Return the names of the engine's tensors for A and B of a weight. Several weights may share a tensor there."""
    module = weight.megatron.removesuffix(".weight").rpartition(".")[2]
    return f"{slot.name}.{module}.{LORA_A}", f"{slot.name}.{module}.{LORA_B}"


def factor_shapes(
    weights: Sequence[Param], rank: int, engine: EngineLayout, position: int, num_experts: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the factors of an engine rank, by name. weights: with adapters, one slot each."""
    slots = [(weight, engine.slot_of(weight)) for weight in weights]
    factors = [factor for weight, slot in slots if slot for factor in engine_factors(weight, slot, rank)]
    return engine_shapes(factors, engine, position, num_experts)


def list_merges(weights: Sequence[Param], engine: EngineLayout, position: int, num_experts: int) -> list[Merge]:
    """Return what an engine rank must merge. weights: with adapters, one slot each."""
    entries: dict[tuple[str, int, int, str, str], list[int]] = {}
    for weight in weights:
        if (slot := engine.slot_of(weight)) is None:
            continue
        dim = int(isinstance(slot.sharding, Dim1Sharding))
        indices = engine.expert_indices(position, weight, num_experts) if slot.grid == "expert" else [-1]
        entries.setdefault((slot.name, dim, slot.offset, *factor_slots(weight, slot)), []).extend(indices)
    return [
        [name, first, count, *where] for (name, *where), indices in entries.items() for first, count in _runs(indices)
    ]


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers, as first number and count, ascending."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))
    return runs


def keeps_codes(weight: Param, adapted: Container[str], wire: Wire) -> bool:
    """Return whether engines that get adapters alone keep the checkpoint's codes of a weight.

    Those are the quantised weights without adapters; a new quantisation by the trainer would have other codes and
    scales. adapted: canonical names of the weights with adapters. wire: of a sync of all weights.
    """
    return weight.megatron not in adapted and len(planes(weight, wire)) > 1
