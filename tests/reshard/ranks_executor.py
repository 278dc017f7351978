"""Ranks that sync random weights to fake engines in their own memory.

argv: a seed for each case, on 4 ranks, or `58/0,1/2,3`, where ranks 0 and 1 train and ranks 2 and 3 have the engines.
With `delta:` before it, the weights change little, and weight syncs send changes alone between nodes.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from random_layouts import Case, random_case

from megarl.config import ConfigError
from megarl.engine import weight_loader
from megarl.models import blocks, int4
from megarl.models.fp8 import BLOCK, is_quantised
from megarl.models.layout_algebra import Param
from megarl.models.registry import family_of
from megarl.parallel import ranks
from megarl.reshard.plan.cells import LayerTable
from megarl.reshard.plan.layout import ShardSlice, engine_shapes
from megarl.reshard.plan.planner import ReshardPlan
from megarl.reshard.run.executor import Executor, WeightSyncError
from megarl.reshard.run.scale_grids import has_split_blocks

Tensors = dict[str, torch.Tensor]
DELTA, CHANGED_EVERY = "delta:", 50
_PLANE = "(_scale_inv|_packed|_scale)$"  # of the names of quantised tensors


class FakeEngineModel(torch.nn.Module):
    """A model with an engine rank's tensors, by SGLang's names."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.tensors = tensors

    def named_parameters(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        return ((name, torch.nn.Parameter(tensor, requires_grad=False)) for name, tensor in self.tensors.items())


def list_params(case: Any) -> list[Param]:
    family = family_of(case.hf)
    layers = case.hf["num_hidden_layers"] + (family.num_mtp_layers(case.hf) if case.engine.draft else 0)
    experts = range(family.num_experts(case.hf))
    rows = [row for layer in range(layers) for row in family.engine_layer(case.hf, layer, experts)]
    return blocks.embedding(case.hf) + rows + blocks.final_params(case.hf)


def full_weights(params: list[Param], dtype: torch.dtype, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        tensor.name: torch.randn(tensor.shape, generator=generator).to(param.dtype or dtype)
        for param in params
        for tensor in param.hf
    }


def fill(target: torch.Tensor, param: Param, slices: list[ShardSlice], full: Tensors, suffix: str = "") -> None:
    for source, dim, start, stop, offset in slices:
        complete = full[param.hf[source].name + suffix]
        target.narrow(dim, offset, stop - start).copy_(complete.narrow(dim, start, stop - start))


def shards(case: Any, params: list[Param], full: Tensors, rank: int) -> Tensors:
    """Return Megatron's shards on this rank, with garbage as padding."""
    experts = family_of(case.hf).num_experts(case.hf)
    tensors = {}
    for param in params:
        local = case.train.trainer_rank(rank)
        if local is not None and case.train.has_param(local, param, experts):
            slices = case.train.slices_of_rank(local, param)
            size = max((h.offset + h.stop - h.start for h in slices), default=0)
            shape = list(param.hf[0].shape)
            shape[slices[0].dim if slices else 0] = size
            dtype = full[param.hf[0].name].dtype
            tensors[param.megatron] = torch.full(shape, 7.0, dtype=dtype)
            fill(tensors[param.megatron], param, slices, full)
    return tensors


def reference_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in FP8 and its scales, independently of megarl.reshard.run.scale_grids."""
    grid = torch.empty(-(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK))
    quantised = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(grid.shape[0]):
        for column in range(grid.shape[1]):
            block = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
            grid[row, column] = weight[block].float().abs().max().clamp(min=1e-4) / 448.0
            quantised[block] = (weight[block].float() * (1.0 / grid[row, column])).to(torch.float8_e4m3fn)
    return quantised, grid


def quantise_weights(params: list[Param], full: Tensors) -> Tensors:
    """Return all weights as the engine must hold them: some in FP8, with scales as `NAME scales`."""
    tensors = dict(full)
    for param in params:
        if is_quantised(param):
            for tensor in param.hf:
                tensors[tensor.name], tensors[tensor.name + " scales"] = reference_fp8(full[tensor.name])
    return tensors


def quantise_experts(params: list[Param], full: Tensors) -> Tensors:
    """Return all weights as the engine must hold them: experts in INT4, with scales as `NAME scales`."""
    tensors = dict(full)
    for tensor in (tensor for param in params if param.expert is not None for tensor in param.hf):
        scales = int4.compute_scales(full[tensor.name])
        tensors[tensor.name], tensors[tensor.name + " scales"] = int4.quantise(full[tensor.name], scales), scales
    return tensors


def engine_tensors(case: Any, params: list[Param], dtype: torch.dtype, rank: int) -> Tensors:
    """Return an engine rank's tensors before the first weight sync; none for a rank without engine."""
    experts = family_of(case.hf).num_experts(case.hf)
    position = position_of(case, rank)
    shapes = {} if position is None else engine_shapes(params, case.engine, position, experts)
    slots = [(engine_slot, param) for param in params if (engine_slot := case.engine.slot_of(param))]
    engine_dtypes = {engine_slot.name: torch.float32 for engine_slot, param in slots if param.is_sent_as_fp32}
    tensors = {
        name: torch.full(shape, -5.0, dtype=engine_dtypes.get(name) or dtype) for name, shape in sorted(shapes.items())
    }
    for name in {engine_slot.name for engine_slot, param in slots if case.wire == "fp8" and is_quantised(param)}:
        if name not in shapes:
            continue
        *stack, rows, columns = shapes[name]
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = torch.full((*stack, -(-rows // BLOCK), -(-columns // BLOCK)), -5.0)
    for name in {engine_slot.name for engine_slot, param in slots if case.wire == "int4" and param.expert is not None}:
        if name in shapes:
            *stack, columns = tensors.pop(name).shape
            tensors[name + "_packed"] = torch.full((*stack, columns // 2), 5, dtype=torch.uint8)
            tensors[name + "_scale"] = torch.full((*stack, columns // 32), -5.0, dtype=torch.bfloat16)
    return tensors


def scale_slices(slices: list[ShardSlice], rows: int, columns: int) -> list[ShardSlice]:
    """Return slices in units of blocks of this size."""
    edges = ((h, (rows, columns)[h.dim]) for h in slices)
    return [h._replace(start=h.start // unit, stop=-(-h.stop // unit), offset=h.offset // unit) for h, unit in edges]


def expected_tensors(case: Any, params: list[Param], full: Tensors, rank: int, empty: Tensors) -> Tensors:
    """Return the tensors that the engine rank must hold in the end."""
    experts = family_of(case.hf).num_experts(case.hf)
    result = {name: tensor.clone() for name, tensor in empty.items()}
    position = position_of(case, rank)
    for param in params:
        engine_slot = case.engine.slot_of(param)
        if engine_slot is None or position is None:
            continue
        for index in case.engine.expert_indices(position, param, experts):
            slices = case.engine.slices_of_rank(position, param)
            if case.wire == "int4" and param.expert is not None:
                packed, scales = result[engine_slot.name + "_packed"], result[engine_slot.name + "_scale"]
                fill(packed[index], param, scale_slices(slices, 1, 2), full)
                fill(scales[index], param, scale_slices(slices, 1, 32), full, " scales")
                continue
            target = result[engine_slot.name][index] if engine_slot.grid == "expert" else result[engine_slot.name]
            fill(target, param, slices, full)
            if case.wire == "fp8" and is_quantised(param):
                grid = result[engine_slot.name + "_scale_inv"]
                fill(
                    grid[index] if engine_slot.grid == "expert" else grid,
                    param,
                    scale_slices(slices, BLOCK, BLOCK),
                    full,
                    " scales",
                )
    return result


def is_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def smallest_plan(case: Any, wire: str = "", table: LayerTable | None = None) -> ReshardPlan:
    """Return a plan with the case's bucket size, doubled until it suffices. wire, table: others than the case's."""
    hf, train, engine, node, bucket, case_wire, piece = case.arguments
    while True:
        try:
            return ReshardPlan(hf, train, engine, node, bucket, wire or case_wire, piece, table)
        except ConfigError as error:
            assert "too small" in str(error)
            bucket *= 2


def case_of(text: str) -> Case:
    seed, *sides = text.removeprefix(DELTA).split("/")
    if not sides:
        return random_case(int(seed), worlds=(dist.get_world_size(),))
    train, engine = (tuple(map(int, side.split(","))) for side in sides)
    case = random_case(int(seed), worlds=(len(train),))
    return replace(case, train=replace(case.train, ranks=train), engine=replace(case.engine, ranks=engine))


def position_of(case: Case, rank: int) -> int | None:
    """Return the position of a rank in its engine."""
    ranks = case.engine.ranks or tuple(range(case.train.world))
    return ranks.index(rank) % case.engine.tp if rank in ranks else None


class Run:
    """A case: four weight syncs, each compared with the tensors that the engine must hold."""

    def __init__(self, text: str, rank: int) -> None:
        self.seed, self.rank = int(text.removeprefix(DELTA).split("/")[0]), rank
        self.is_delta = text.startswith(DELTA)
        self.case = case_of(text)
        self.dtype = torch.float32 if self.case.wire == "fp32" else torch.bfloat16
        self.params = list_params(self.case)
        self.empty = engine_tensors(self.case, self.params, self.dtype, rank)
        self.tensors = {name: tensor.clone() for name, tensor in self.empty.items()}
        drafts = {
            engine_slot.name
            for engine_slot in map(self.case.engine.slot_of, self.params)
            if engine_slot and engine_slot.is_draft
        }
        self.models = {
            draft: FakeEngineModel(
                {name: tensor for name, tensor in self.tensors.items() if (re.sub(_PLANE, "", name) in drafts) == draft}
            )
            for draft in (False, True)
        }
        self.drafts: list[bool] = []
        self.orders: list[dict[str, Any]] = []
        self.replies: list[dict[str, Any]] = []
        self.executor = Executor(
            smallest_plan(self.case), rank, period=3, allocate=lambda size: torch.empty(size, dtype=torch.uint8)
        )

    def send_to_engine(self, buffer: torch.Tensor, order: dict[str, Any], draft: bool) -> None:
        self.orders.append(order)
        self.drafts.append(draft)
        if os.environ.get("FLIP") and self.rank == 0 and order["slices"] and order["do"] == "write":
            buffer[order["slices"][0][6]] ^= 1
        reply = weight_loader._run_order(self.models[draft], order, buffer)
        self.replies += [] if order["do"] == "read" else [reply]

    def settle(self) -> None:
        """Wait until the engine has executed all orders; it does so at once."""

    def sync(self, number: int) -> Tensors:
        """Sync new weights and return them."""
        full = full_weights(self.params, self.dtype, self.seed + (0 if self.is_delta else number))
        if self.is_delta:
            for tensor in full.values():
                tensor.view(-1)[number::CHANGED_EVERY] = number / 8
        local = shards(self.case, self.params, full, self.rank)
        self.executor.sync(local, self.send_to_engine, number, self.settle)
        self.settle()
        if self.is_delta and number != 2:
            self.executor.keep_base(local)
        elif self.is_delta:
            self.executor.drop_base()
        return full

    def result(self) -> dict[str, Any]:
        equal, verified, sent = [], [], []
        for number in range(4):
            first = len(self.orders)
            full = self.sync(number)
            quantise = {"fp8": quantise_weights, "int4": quantise_experts}.get(self.case.wire)
            source = full if quantise is None else quantise(self.params, full)
            expected = expected_tensors(self.case, self.params, source, self.rank, self.empty)
            equal.append(all(is_same_bits(self.tensors[name], expected[name]) for name in expected))
            sent.append([self.executor.sent_bytes, self.executor.whole_bytes])
            written = [order for order in self.orders[first:] if order["do"] == "write"]
            slices = [entry for order in written for entry in order["slices"]]
            verified.append([sum(entry[7] >= 0 for entry in slices), len(slices)])
        return {
            "equal": equal,
            "sent": sent,
            "verified": verified,
            "wrong": [name for answer in self.replies for name in answer.get("wrong", ["no answer"])],
            "rounds": self.executor.plan.rounds,
            "drafts": self.drafts,
            "wire": self.case.wire,
            "trains": bool(shards(self.case, self.params, full, self.rank)),
            "straddling": sum(
                self.case.wire == "fp8" and has_split_blocks(param, self.case.train)
                for param in self.executor.quantised_params
            ),
        }


def run_cases(make_run: Callable[[str, int], Any]) -> None:
    """Run the cases of the command line on this rank, and print their results."""
    dist.init_process_group("gloo")
    ranks.warm_up_group()  # as in a job
    rank, results = dist.get_rank(), {}
    for text in sys.argv[1:]:
        run = make_run(text, rank)
        if rank in run.executor.plan.rank_map.participants:  # other ranks do not take part
            results[text] = run.result()
    if not os.environ.get("DIE"):
        print("RESULT " + json.dumps(results), flush=True)
        dist.destroy_process_group()
        return
    try:
        if rank != 1:
            run.sync(9)
    except WeightSyncError as error:
        results["died"] = str(error)
    print("RESULT " + json.dumps(results), flush=True)
    os._exit(0)  # the process group cannot shut down


if __name__ == "__main__":
    run_cases(Run)
