"""Ranks that push random weights to stand-ins of engines in their own memory. argv: seed of each case, for 4 ranks."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from random_layouts import random_case

from megarl.config import ConfigError
from megarl.models import blocks
from megarl.models.layout import Param
from megarl.models.registry import family_of
from megarl.reshard.executor import Executor, PushError
from megarl.reshard.layout import engine_shapes
from megarl.reshard.planner import Plan
from megarl.rollout import loader

Tensors = dict[str, torch.Tensor]


class Stand(torch.nn.Module):
    """Has an engine rank's tensors, by SGLang's names."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.tensors = tensors

    def named_parameters(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        return ((name, torch.nn.Parameter(tensor, requires_grad=False)) for name, tensor in self.tensors.items())


def table(case: Any) -> list[Param]:
    family = family_of(case.hf)
    layers = case.hf["num_hidden_layers"] + (family.mtp_layers(case.hf) if case.engine.draft else 0)
    experts = range(family.num_experts(case.hf))
    rows = [row for layer in range(layers) for row in family.layer(case.hf, layer, experts)]
    return blocks.embedding(case.hf) + rows + blocks.final(case.hf)


def full_weights(params: list[Param], dtype: torch.dtype, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        tensor.name: torch.randn(tensor.shape, generator=generator).to(param.dtype or dtype)
        for param in params
        for tensor in param.hf
    }


def fill(target: torch.Tensor, param: Param, held: list[Any], full: Tensors) -> None:
    for source, dim, start, stop, offset in held:
        target.narrow(dim, offset, stop - start).copy_(full[param.hf[source].name].narrow(dim, start, stop - start))


def shards(case: Any, params: list[Param], full: Tensors, rank: int) -> Tensors:
    """What Megatron holds on this rank, with rubbish for padding."""
    experts = family_of(case.hf).num_experts(case.hf)
    found = {}
    for param in params:
        if case.train.holds(rank, param, experts):
            held = case.train.held(rank, param)
            size = max((h.offset + h.stop - h.start for h in held), default=0)
            shape = list(param.hf[0].shape)
            shape[held[0].dim if held else 0] = size
            dtype = full[param.hf[0].name].dtype
            found[param.megatron] = torch.full(shape, 7.0, dtype=dtype)
            fill(found[param.megatron], param, held, full)
    return found


def wanted(case: Any, params: list[Param], full: Tensors, rank: int, empty: Tensors) -> Tensors:
    """What the engine's rank must hold in the end."""
    experts = family_of(case.hf).num_experts(case.hf)
    result = {name: tensor.clone() for name, tensor in empty.items()}
    position = rank % case.engine.tp
    for param in params:
        slot = case.engine.slot(param)
        if slot is None:
            continue
        for index in case.engine.indices(position, param, experts):
            target = result[slot.name][index] if slot.grid == "expert" else result[slot.name]
            fill(target, param, case.engine.held(position, param), full)
    return result


def smallest_plan(case: Any) -> Plan:
    """With the buckets of the case, or as small ones as will do."""
    hf, train, engine, node, bucket, wire, piece = case.arguments
    while True:
        try:
            return Plan(hf, train, engine, node, bucket, wire, piece)
        except ConfigError as error:
            assert "too small" in str(error)
            bucket *= 2


def main() -> None:
    dist.init_process_group("gloo")
    rank, results = dist.get_rank(), {}
    for seed in map(int, sys.argv[1:]):
        case = random_case(seed, worlds=(dist.get_world_size(),))
        if case.wire == "fp8":
            case = type(case)(**{**vars(case), "wire": "bf16"})
        dtype = torch.float32 if case.wire == "fp32" else torch.bfloat16
        params, experts = table(case), family_of(case.hf).num_experts(case.hf)
        shapes = engine_shapes(params, case.engine, rank % case.engine.tp, experts)
        kept = {slot.name: p.dtype for p in params if p.dtype and (slot := case.engine.slot(p))}
        empty = {name: torch.full(shape, -5.0, dtype=kept.get(name) or dtype) for name, shape in sorted(shapes.items())}
        held = {name: tensor.clone() for name, tensor in empty.items()}
        stand, orders, answers = Stand(held), [], []
        flip = os.environ.get("FLIP")

        def hand_over(buffer: torch.Tensor, order: dict[str, Any]) -> None:
            orders.append(order)
            if flip and rank == 0 and order["slices"]:
                buffer[order["slices"][0][6]] ^= 1
            answers.append(loader._obey(stand, order, buffer))

        executor = Executor(
            smallest_plan(case), rank, period=3, allocate=lambda size: torch.empty(size, dtype=torch.uint8)
        )
        equal, verified = [], []
        for push in range(4):
            full = full_weights(params, dtype, seed + push)
            first = len(orders)
            executor.push(shards(case, params, full, rank), hand_over, push)
            expected = wanted(case, params, full, rank, empty)
            equal.append(all(torch.equal(held[name], expected[name]) for name in expected))
            slices = [entry for order in orders[first:] for entry in order["slices"]]
            verified.append([sum(entry[7] >= 0 for entry in slices), len(slices)])
        wrong = [name for answer in answers for name in answer.get("wrong", ["no answer"])]
        results[seed] = {"equal": equal, "verified": verified, "wrong": wrong, "rounds": executor.plan.rounds}
    if os.environ.get("DIE"):
        if rank == 1:
            os._exit(0)
        try:
            executor.push(shards(case, params, full, rank), hand_over, 9)
        except PushError as error:
            results["died"] = str(error)
    print("RESULT " + json.dumps(results), flush=True)
    if not os.environ.get("DIE"):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
