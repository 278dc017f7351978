"""Ranks that sync random adapters to fake engines in their own memory, which merge them into weights that they have.

argv: as of `ranks_executor.py`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
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
    shards,
    smallest_plan,
)

from megarl.config import LoraConfig
from megarl.engine import weight_loader
from megarl.models.fp8 import dequantise, is_quantised
from megarl.models.layout_algebra import Param
from megarl.models.lora_tables import adapted_weights, factor_params, merge_adapter
from megarl.models.registry import family_of
from megarl.parallel import ranks
from megarl.reshard.plan.adapters import AdapterTable, factor_shapes, list_merges
from megarl.reshard.run.executor import Executor

SCALE = 0.75


class Run:
    """A case: three weight syncs of adapters. The second begins with another "keep", which must not replace the base,
    and the third sends changes."""

    def __init__(self, text: str, rank: int) -> None:
        self.seed, self.rank, self.case = int(text.split("/")[0]), rank, case_of(text)
        wire, self.engine, self.position = self.case.wire, self.case.engine, position_of(self.case, rank)
        self.dtype = torch.float32 if wire == "fp32" else torch.bfloat16
        self.params, self.experts = list_params(self.case), family_of(self.case.hf).num_experts(self.case.hf)
        targets = ("linear_proj",) if wire == "int4" else ()  # experts in INT4 have no adapters
        self.lora = LoraConfig(rank=3, target_modules=targets)
        self.weights = [part for row in adapted_weights(self.params, targets) for part in row.by_slot()]
        self.factors = list({f.megatron: f for w in self.weights for f in factor_params(w, self.lora.rank)}.values())
        self.full = full_weights(self.params, self.dtype, self.seed)
        self.empty = engine_tensors(self.case, self.params, self.dtype, rank)
        self.base = self.expected(self.full, self.dequantised())
        self.tensors = {name: tensor.clone() for name, tensor in self.base.items()}
        drafts = {slot.name for slot in map(self.engine.slot_of, self.params) if slot and slot.is_draft}
        self.models = {
            draft: FakeEngineModel({k: v for k, v in self.tensors.items() if (k.split("_scale")[0] in drafts) == draft})
            for draft in ((False, True) if self.engine.draft else (False,))
        }
        self.replies: list[dict[str, Any]] = []
        table = AdapterTable(family_of(self.case.hf), self.lora, self.engine)
        plan = smallest_plan(self.case, "fp32" if wire == "fp32" else "bf16", table)
        self.executor = Executor(plan, rank, period=1, allocate=lambda size: torch.empty(size, dtype=torch.uint8))

    def dequantised(self) -> Tensors:
        """Return the weights that the trainer has, as read from a checkpoint like the engine's."""
        if self.case.wire != "fp8":
            return self.full
        quantised = quantise_weights(self.params, self.full)
        names = [tensor.name for param in self.params if is_quantised(param) for tensor in param.hf]
        return self.full | {name: dequantise(quantised[name], quantised[f"{name} scales"]) for name in names}

    def expected(self, base: Tensors, merged: Tensors) -> Tensors:
        """Return an engine's tensors: weights with adapters are of `merged`, the others of `base`."""
        names = {tensor.name for weight in self.weights for tensor in weight.hf}
        full = {name: (merged if name in names else base)[name] for name in base}
        if self.case.wire == "fp8":
            # Those that the engine has loaded are the checkpoint's; only merged ones are quantised again.
            quantised = quantise_weights(self.params, base)
            again = quantise_weights(self.params, full)
            full = (
                quantised
                if merged is base
                else {k: again[k] if k.split(" ")[0] in names else quantised[k] for k in again}
            )
        elif self.case.wire == "int4":
            full = quantise_experts(self.params, full)
        return expected_tensors(self.case, self.params, full, self.rank, self.empty)

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
        self.replies += [] if order["do"] == "read" else [reply]

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
        trained = self.dequantised()
        expected = self.expected(self.full, trained | self.merge(trained, factors))
        return all(is_same_bits(self.tensors[name], expected[name]) for name in expected)

    def merge(self, base: Tensors, factors: Tensors) -> Tensors:
        def merge(weight: Param) -> Tensors:
            a, b = factor_params(weight, self.lora.rank)
            pairs = zip(weight.hf, b.hf, strict=True)
            return {
                w.name: merge_adapter(base[w.name], factors[a.hf[0].name], factors[f.name], SCALE) for w, f in pairs
            }

        return {name: tensor for weight in self.weights for name, tensor in merge(weight).items()}

    def result(self) -> dict[str, Any]:
        equal = [self.sync(number) for number in range(3)]
        changed = [name for name, tensor in self.tensors.items() if not is_same_bits(tensor, self.base[name])]
        return {
            "equal": equal,
            "changed": len(changed),
            "wrong": [name for answer in self.replies for name in answer.get("wrong", ["no answer"])],
            "sent": [self.executor.sent_bytes, self.executor.whole_bytes],
            "wire": self.case.wire,
            "has_engine": self.position is not None,
            "drafts": self.engine.draft,
            "fused": self.engine.fuse_shared,
        }


def main() -> None:
    dist.init_process_group("gloo")
    ranks.warm_up_group()  # as in a job
    rank, results = dist.get_rank(), {}
    for text in sys.argv[1:]:
        run = Run(text, rank)
        if rank in run.executor.plan.rank_map.participants:  # other ranks do not take part
            results[text] = run.result()
    print("RESULT " + json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
