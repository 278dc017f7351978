"""Ranks that sync random adapters to fake engines in their own memory, which merge them into weights that they have.

argv: as of `ranks_executor.py`. With `part:` before it, few weights have adapters: some that share a tensor of the
engine with others.
"""

from __future__ import annotations

from typing import Any

import torch
from ranks_executor import (
    FakeEngineModel,
    Tensors,
    case_of,
    engine_tensors,
    expected_tensors,
    full_weights,
    is_same_bits,
    list_params,
    position_of,
    quantise_experts,
    quantise_weights,
    run_cases,
    shards,
    smallest_plan,
)

from megarl.config import LoraConfig
from megarl.engine import weight_loader
from megarl.models.fp8 import dequantise, is_quantised, quantise
from megarl.models.layout_algebra import Param
from megarl.models.lora_tables import MergedWeights, adapted_weights, factor_params, merge_adapter
from megarl.models.registry import family_of
from megarl.reshard.plan.adapters import AdapterTable, factor_shapes, keeps_codes, list_merges
from megarl.reshard.run.executor import Executor

SCALE = 0.75
PART = "part:"


class Run:
    """A case: three weight syncs of adapters. The second begins with another "keep", which must not replace the base,
    and the third sends changes, and is compared with a sync of all weights."""

    def __init__(self, text: str, rank: int) -> None:
        is_part, text = text.startswith(PART), text.removeprefix(PART)
        self.seed, self.rank, self.case = int(text.split("/")[0]), rank, case_of(text)
        wire, self.engine, self.position = self.case.wire, self.case.engine, position_of(self.case, rank)
        self.dtype = torch.float32 if wire == "fp32" else torch.bfloat16
        self.params, self.experts = list_params(self.case), family_of(self.case.hf).num_experts(self.case.hf)
        targets = ("linear_proj",) if wire == "int4" else ()  # experts in INT4 have no adapters
        if is_part:
            targets = ("shared_experts.linear_fc1",) if self.engine.fuse_shared else ("linear_q_down_proj",)
        self.lora = LoraConfig(rank=3, target_modules=targets)
        self.weights = [part for row in adapted_weights(self.params, targets) for part in row.by_slot()]
        self.factors = list({f.megatron: f for w in self.weights for f in factor_params(w, self.lora.rank)}.values())
        self.full = full_weights(self.params, self.dtype, self.seed)
        self.empty = engine_tensors(self.case, self.params, self.dtype, rank)
        self.checkpoint = self.quantise()
        self.trained = self.dequantise()
        self.base = expected_tensors(self.case, self.params, self.checkpoint, rank, self.empty)
        self.tensors = {name: tensor.clone() for name, tensor in self.base.items()}
        drafts = {slot.name for slot in map(self.engine.slot_of, self.params) if slot and slot.is_draft}
        self.models = {
            draft: FakeEngineModel({k: v for k, v in self.tensors.items() if (k.split("_scale")[0] in drafts) == draft})
            for draft in ((False, True) if self.engine.draft else (False,))
        }
        self.replies: list[dict[str, Any]] = []
        self.differing: list[str] = []
        table = AdapterTable(family_of(self.case.hf), self.lora, self.engine)
        plan = smallest_plan(self.case, "fp32" if wire == "fp32" else "bf16", table)
        self.executor = Executor(plan, rank, period=1, allocate=lambda size: torch.empty(size, dtype=torch.uint8))
        self.compared = Executor(
            smallest_plan(self.case),
            rank,
            period=1,
            allocate=lambda size: torch.empty(size, dtype=torch.uint8),
            is_compared=lambda param: not keeps_codes(param, {weight.megatron for weight in self.weights}, wire),
        )

    def quantise(self) -> Tensors:
        """Return a checkpoint. One in FP8 is of a converter with larger scales, so a new quantisation differs."""
        if self.case.wire == "int4":
            return quantise_experts(self.params, self.full)
        if self.case.wire != "fp8":
            return self.full
        tensors, generator = quantise_weights(self.params, self.full), torch.Generator().manual_seed(self.seed)
        for name in self.quantised_names():
            scales = tensors[f"{name} scales"]
            scales *= 1 + torch.rand(scales.shape, generator=generator) / 2
            tensors[name] = quantise(self.full[name], scales, 0, 0)
        return tensors

    def quantised_names(self) -> list[str]:
        return [tensor.name for param in self.params if is_quantised(param) for tensor in param.hf]

    def dequantise(self) -> Tensors:
        """Return the weights that the trainer has, as read from the checkpoint."""
        if self.case.wire != "fp8":
            return self.full
        names, loaded = self.quantised_names(), self.checkpoint
        return self.full | {name: dequantise(loaded[name], loaded[f"{name} scales"]) for name in names}

    def expected(self, merged: Tensors) -> Tensors:
        """Return an engine's tensors: weights with adapters are of `merged`, the others of the checkpoint."""
        if self.case.wire == "fp8":
            adapted = [weight for weight in self.weights if is_quantised(weight)]
            quantised = quantise_weights(adapted, merged)
        else:
            quantised = merged
        return expected_tensors(self.case, self.params, self.checkpoint | quantised, self.rank, self.empty)

    def order(self, action: str) -> None:
        for draft, model in self.models.items() if self.tensors else ():
            weights = [weight for weight in self.weights if weight.slot and weight.slot.is_draft == draft]
            order: dict[str, Any] = {"do": action}
            if not model.tensors:  # a family without drafts
                continue
            if action == "keep":
                shapes = factor_shapes(weights, self.lora.rank, self.engine, self.position, self.experts)
                dtype = str(self.dtype).removeprefix("torch.")
                slots = [slot for weight in weights if (slot := self.engine.slot_of(weight))]
                order |= {"tensors": sorted({slot.name for slot in slots})}
                order |= {"factors": {name: [dtype, shape] for name, shape in shapes.items()}}
            else:
                order |= {"scale": SCALE}
                order |= {"merges": list_merges(weights, self.engine, self.position, self.experts)}
            assert weight_loader._run_order(model, order, None) == {}

    def send_to_engine(self, buffer: torch.Tensor, order: dict[str, Any], draft: bool) -> None:
        reply = weight_loader._run_order(self.models[draft], order, buffer)
        self.differing += reply.get("differ", [])
        self.replies += [reply] if order["do"] == "write" else []

    def sync(self, number: int) -> bool:
        factors = full_weights(self.factors, self.dtype, self.seed + number)
        if number == 2:  # as before but for a few
            factors = full_weights(self.factors, self.dtype, self.seed + 1)
            for tensor in factors.values():
                tensor.view(-1)[::50] = 0.5
        local = shards(self.case, self.factors, factors, self.rank)
        self.order("keep")
        self.executor.sync(local, self.send_to_engine, number)
        self.order("merge")
        if number == 1:
            self.executor.keep_base(local)
        if number == 2:
            weights = MergedWeights(shards(self.case, self.params, self.trained, self.rank), local, SCALE)
            self.compared.sync(weights, self.send_to_engine, number, compare_only=True)
        expected = self.expected(self.merge(self.trained, factors))
        return all(is_same_bits(self.tensors[name], expected[name]) for name in expected)

    def merge(self, base: Tensors, factors: Tensors) -> Tensors:
        def merge(weight: Param) -> Tensors:
            a, b = factor_params(weight, self.lora.rank)
            pairs = zip(weight.hf, b.hf, strict=True)
            return {
                w.name: merge_adapter(base[w.name], factors[a.hf[0].name], factors[f.name], SCALE) for w, f in pairs
            }

        return {name: tensor for weight in self.weights for name, tensor in merge(weight).items()}

    def find_requantised(self) -> bool:
        """Return whether weights without adapters would change by a new quantisation, in a tensor that also has weights
        with adapters."""
        if self.case.wire != "fp8" or self.position is None:
            return False
        rows = [row for param in self.params for row in param.by_slot() if self.engine.slot_of(row)]
        adapted = [row for row in rows if row.megatron in {weight.megatron for weight in self.weights}]
        kept = [row for row in rows if row not in adapted]
        full = {tensor.name: self.trained[tensor.name] for row in kept for tensor in row.hf}
        full = self.checkpoint | quantise_weights(kept, full)
        again = expected_tensors(self.case, self.params, full, self.rank, self.empty)
        names = [{slot.name for row in side if (slot := self.engine.slot_of(row))} for side in (adapted, kept)]
        return any(not is_same_bits(again[name], self.base[name]) for name in set.intersection(*names) & again.keys())

    def result(self) -> dict[str, Any]:
        equal = [self.sync(number) for number in range(3)]
        changed = [name for name, tensor in self.tensors.items() if not is_same_bits(tensor, self.base[name])]
        return {
            "equal": equal,
            "changed": len(changed),
            "differing": self.differing,
            "requantised": self.find_requantised(),
            "wrong": [name for answer in self.replies for name in answer.get("wrong", ["no answer"])],
            "sent": [self.executor.sent_bytes, self.executor.whole_bytes],
            "wire": self.case.wire,
            "has_engine": self.position is not None,
            "drafts": self.engine.draft,
            "fused": self.engine.fuse_shared,
        }


if __name__ == "__main__":
    run_cases(Run)
