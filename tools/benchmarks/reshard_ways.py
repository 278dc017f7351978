"""Ways to bring weights from a trainer's ranks to engines' shards, for `bench.py reshard`, which describes each."""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.workloads import moe_config
from megarl.config import Config, LoraConfig, ParallelConfig
from megarl.engine import weight_loader
from megarl.engine.external_engines import ExternalEngines
from megarl.engine.external_server import describe_engine, hash_data
from megarl.engine.external_wire import Wire, WireError
from megarl.models.layout_algebra import HFTensor, Param, split_with
from megarl.models.lora_tables import MergedWeights, adapted_weights, factor_params, merge_adapter
from megarl.models.registry import family_of
from megarl.parallel import ranks, shared_memory
from megarl.reshard.plan.adapters import AdapterTable, factor_shapes, list_merges
from megarl.reshard.plan.cells import LayerTable
from megarl.reshard.plan.expert_placement import place_experts
from megarl.reshard.plan.layout import EngineLayout, ShardSlice, TrainLayout, engine_shapes, even_stages
from megarl.reshard.plan.planner import ReshardPlan
from megarl.reshard.run.executor import Executor

Tensors = dict[str, torch.Tensor]
FullTensor = Callable[[Param, int], torch.Tensor]
"""Returns the expected values of HF tensor number n of a parameter."""
LAYOUTS = {2: (2, 1, 2, 2), 4: (2, 2, 2, 4), 8: (2, 2, 4, 4)}
"""Layouts by number of ranks: tp, pp, ep of the trainer, tp of an engine (and its ep)."""


def model(hidden: int) -> dict[str, Any]:
    """Return the config of a Qwen3-MoE with 8 layers and 16 experts; 60 M parameters with a hidden size of 512."""
    return moe_config(
        vocab_size=16384,  # no padding in any layout: Megatron refuses to reshard between different paddings
        hidden_size=hidden,
        intermediate_size=hidden * 2,
        moe_intermediate_size=hidden // 2,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        num_experts=16,
    )


def full_tensor(tensor: HFTensor, update: int = 0) -> torch.Tensor:
    """Return the values of a full HF tensor, which any rank can compute. update: 0 or 1; no value is in both."""
    seed = zlib.crc32(f"{tensor.name} {update}".encode())
    return torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) + update


def trained(param: Param, source: int) -> torch.Tensor:
    """Return the full HF tensor number `source` of a parameter, without adapter."""
    return full_tensor(param.hf[source])


class Case:
    """This rank's shards in the trainer, and the layout of its engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.hf, self.options, self.lora = model(options.hidden), options, LoraConfig(rank=options.lora)
        world = int(os.environ["WORLD_SIZE"])
        tp, pp, ep, engine = LAYOUTS[world]
        self.ranks_per_node = world // options.nodes
        parallel = ParallelConfig(tp=tp, pp=pp, ep=ep, world_size=world, ranks_per_node=self.ranks_per_node)
        self.ranks = ranks.initialize(parallel, options.timeout_s)
        self.rank = self.ranks.job.rank
        self.train = TrainLayout(world, tp, ep, even_stages(self.hf["num_hidden_layers"], pp))
        self.engine = EngineLayout(engine, engine)
        self.experts = family_of(self.hf).num_experts(self.hf)
        self.params = family_of(self.hf).params(self.hf, 1)
        self.local = self.shards(self.params)

    def shards(self, params: list[Param], full_of: FullTensor = trained) -> Tensors:
        """Return this rank's shards of the parameters that it holds, by Megatron's names."""
        held = [param for param in params if self.train.has_param(self.rank, param, self.experts)]
        return {param.megatron: self.shard(param, self.train, self.rank, full_of) for param in held}

    def shard(self, param: Param, layout: TrainLayout, rank: int, full_of: FullTensor = trained) -> torch.Tensor:
        """Return the shard of a parameter that a rank of Megatron's layout holds."""
        expert = param.expert is not None
        dim, slices = split_with(param, param.sharding, layout.num_shards(expert), layout.shard_index(rank, expert))
        shape = list(param.hf[0].shape)
        shape[dim] = sum(piece.stop - piece.start for piece in slices)
        return self.fill(torch.zeros(shape), param, layout.slices_of_rank(rank, param), full_of)

    def fill(
        self, target: torch.Tensor, param: Param, intervals: list[ShardSlice], full_of: FullTensor
    ) -> torch.Tensor:
        """Write the expected values: those of the full tensors of `param.hf`, by index."""
        for source, dim, start, stop, offset in intervals:
            full = full_of(param, source)
            target.narrow(dim, offset, stop - start).copy_(full.narrow(dim, start, stop - start))
        return target


class EngineRank:
    """A rank of an engine. The engines' own loader writes its tensors.

    position: number of the rank within its engine.
    """

    def __init__(self, case: Case, layout: EngineLayout, position: int) -> None:
        self.case, self.layout, self.position = case, layout, position
        self.model = torch.nn.Module()
        for name, shape in engine_shapes(case.params, layout, position, case.experts).items():
            add_parameter(self.model, name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))
        self.tensors = weight_loader.writable_tensors(self.model)
        self.answer = torch.empty(1 << 16, dtype=torch.uint8)

    def write(self, buffer: torch.Tensor, order: dict[str, Any], draft: bool = False) -> None:
        """Execute an order of `weight_loader.py`. Raises RuntimeError unless it succeeds."""
        content = torch.frombuffer(bytearray(json.dumps(order).encode()), dtype=torch.uint8)
        weight_loader.load(self.model, [("order", content), ("answer", self.answer), ("bucket", buffer)])
        answer = weight_loader.read_answer(self.answer)
        if answer.get("error") or answer.get("wrong"):
            raise RuntimeError(f"the engine answers {answer}")

    def find_wrong(self, full_of: FullTensor = trained) -> list[str]:
        """Return the tensors with wrong values."""
        expected = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        for param in self.case.params:
            slot = self.layout.slot_of(param)
            assert slot is not None
            for index in self.layout.expert_indices(self.position, param, self.case.experts):
                target = expected[slot.name][index] if slot.grid == "expert" else expected[slot.name]
                self.case.fill(target, param, self.layout.slices_of_rank(self.position, param), full_of)
        return [name for name in expected if not torch.equal(expected[name], self.tensors[name])]


def add_parameter(root: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """Register a parameter under a name with dots, with the modules that it names."""
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, torch.nn.Module())
        root = getattr(root, part)
    root.register_parameter(leaf, parameter)


class Way(Protocol):
    def __call__(self) -> None:
        """Sync the weights once. Collective."""

    def find_wrong(self) -> list[str]:
        """Return the names of this rank's tensors that have wrong values after the last sync."""


class Reshard:
    def __init__(self, case: Case, layout: EngineLayout | None = None) -> None:
        self.case, layout = case, layout or case.engine
        self.engine = EngineRank(case, layout, case.rank % layout.tp)
        self.executor = self.build_executor(layout)
        self.executor.num_syncs = 1  # do not verify, as in most syncs; the other methods do not either

    def build_executor(self, engine: EngineLayout, table: LayerTable | None = None) -> Executor:
        case = self.case
        plan = ReshardPlan(
            case.hf, case.train, engine, case.ranks_per_node, bucket_bytes=64 << 20, wire="fp32", table=table
        )
        return Executor(plan, case.rank, 1 << 30, lambda size: shared_memory.empty((size,), torch.uint8))

    def __call__(self) -> None:
        self.executor.sync(self.case.local, self.engine.write, version=1)

    def find_wrong(self) -> list[str]:
        return self.engine.find_wrong()


class Changes(Reshard):
    """share: of the weights, the same ones in each update."""

    def __init__(self, case: Case, share: float) -> None:
        super().__init__(case)
        self.share, self.update = share, 0
        self.versions = case.local, case.shards(case.params, self.updated)

    def updated(self, param: Param, source: int) -> torch.Tensor:
        first, second = (full_tensor(param.hf[source], update) for update in (0, 1))
        return torch.where(first < self.share, second, first)

    def __call__(self) -> None:
        self.update = 1 - self.update
        local = self.versions[self.update]
        self.executor.sync(local, self.engine.write, version=1)
        self.executor.keep_base(local)

    def find_wrong(self) -> list[str]:
        return self.engine.find_wrong(self.updated if self.update else trained)


class Merged(Reshard):
    """Adapters of all linear layers."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.weights = adapted_weights(case.params, ())
        self.pairs = {weight.megatron: factor_params(weight, case.lora.rank) for weight in self.weights}
        self.factors = case.shards([factor for pair in self.pairs.values() for factor in pair])
        self.scale = case.lora.scale

    def __call__(self) -> None:
        merged = MergedWeights(self.case.local, self.factors, self.scale)
        self.executor.sync(merged, self.engine.write, version=1)

    def find_wrong(self) -> list[str]:
        return self.engine.find_wrong(self.merge)

    def merge(self, param: Param, source: int) -> torch.Tensor:
        """Return a full HF tensor with its adapter merged."""
        full = full_tensor(param.hf[source])
        if param.megatron not in self.pairs:
            return full
        a, b = self.pairs[param.megatron]
        return merge_adapter(full, full_tensor(a.hf[0]), full_tensor(b.hf[source]), self.scale)


class Adapters(Merged):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        Reshard.__call__(self)  # what engines have loaded
        layout = case.engine, self.engine.position, case.experts
        names = {weight.slot.name for weight in self.weights if weight.slot}
        shapes = factor_shapes(self.weights, case.lora.rank, *layout)
        factors = {name: ("float32", shape) for name, shape in shapes.items()}
        self.order({"do": "keep", "tensors": sorted(names), "factors": factors})
        self.merges = {"do": "merge", "scale": self.scale, "merges": list_merges(self.weights, *layout)}
        self.executor = self.build_executor(case.engine, AdapterTable(family_of(case.hf), case.lora, case.engine))
        self.executor.num_syncs = 1

    def order(self, order: dict[str, Any]) -> None:
        self.engine.write(torch.empty(0, dtype=torch.uint8), order)

    def __call__(self) -> None:
        self.executor.sync(self.factors, self.engine.write, version=1)
        self.order(self.merges)


class Experts(Reshard):
    """Experts move between two placements, of two loads."""

    def __init__(self, case: Case) -> None:
        self.placements: list[Mapping[int | None, tuple[int, ...]]] = [
            {layer: self.place(case, turn, layer) for layer in range(case.hf["num_hidden_layers"])} for turn in (0, 1)
        ]
        super().__init__(case, replace(case.engine, experts=self.placements[0]))

    @staticmethod
    def place(case: Case, turn: int, layer: int) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(2 * layer + turn)
        load = torch.randint(1, 1000, (case.experts,), generator=generator).tolist()
        return place_experts(load, case.experts + case.engine.ep, case.engine.ep)

    def __call__(self) -> None:
        self.placements.reverse()
        self.engine.layout = replace(self.engine.layout, experts=self.placements[0])
        self.build_executor(self.engine.layout).sync(self.case.local, self.engine.write, version=1)


class External(Reshard):
    """Each rank has the external engine's rank of another one, which serves it in a thread."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        world = case.ranks.job.world
        peer = (case.rank + world // 2) % world
        self.external_engine = EngineRank(case, case.engine, peer % case.engine.tp)
        host = "127.0.0.1" if case.options.nodes == 1 else f"10.77.0.{case.rank // case.ranks_per_node + 1}"
        listener = socket.create_server((host, 0))
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(case.hf))
            config = Config()
            config = replace(config, model=replace(config.model, path=folder))
            threading.Thread(target=self.serve, args=(listener, describe_engine(config)), daemon=True).start()
            addresses = ranks.all_gather_objects(f"{host}:{listener.getsockname()[1]}")
            self.engines = ExternalEngines(config, 0, 1, 0, lambda payload: [payload])
            self.engines.set_addresses([addresses[peer]])

    def serve(self, listener: socket.socket, facts: dict[str, Any]) -> None:
        """Do what `ExternalServer` does for the weights of a rank."""
        wire = Wire(listener.accept()[0], is_server=True)
        wire.receive()
        wire.send({"engine": facts})
        wire.set_timeout(None)
        bucket = torch.empty(0, dtype=torch.uint8)
        try:
            while True:
                order = wire.receive()
                if order["do"] == "open":
                    bucket = shared_memory.empty((order["bytes"],), torch.uint8)
                elif order["do"] == "write":
                    data = bucket[: order["bytes"]]
                    wire.receive_data(data)
                    if hash_data(data) != order["hash"]:
                        raise RuntimeError("weights do not have the hash of their order")
                    self.external_engine.write(bucket, order["order"])
                wire.send({"errors": []})
        except WireError:
            return  # the run has ended

    def __call__(self) -> None:
        engines = self.engines
        engines.connect()

        def send(buffer: torch.Tensor, order: dict[str, Any], draft: bool) -> None:
            engines.write(buffer, order, draft)
            self.engine.write(buffer, order, draft)

        engines.begin()
        share = lambda buckets: engines.open(len(buckets[0]))  # noqa: E731
        self.executor.sync(self.case.local, send, 1, engines.wait, share_buckets=share)
        engines.close_session()
        engines.commit(1)
        if engines.num_usable != 1:
            raise RuntimeError("; ".join(engines.pop_changes()))

    def find_wrong(self) -> list[str]:
        return super().find_wrong() + self.external_engine.find_wrong()


class Gather:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.targets: dict[str, list[tuple[torch.Tensor, Any]]] = {}
        position = case.rank % case.engine.tp
        self.engine = EngineRank(case, case.engine, position)
        for param in case.params:
            slot = case.engine.slot_of(param)
            assert slot is not None
            for index in case.engine.expert_indices(position, param, case.experts):
                tensor = self.engine.tensors[slot.name]
                target = tensor[index] if slot.grid == "expert" else tensor
                for piece in case.engine.slices_of_rank(position, param):
                    self.targets.setdefault(param.hf[piece.source].name, []).append((target, piece))

    def __call__(self) -> None:
        from megarl.checkpoint.export import gather_hf

        for name, full in gather_hf(self.case.local, self.case.params, self.case.ranks, bucket_bytes=32 << 20):
            for target, (_, dim, start, stop, offset) in self.targets.get(name, ()):
                target.narrow(dim, offset, stop - start).copy_(full.narrow(dim, start, stop - start))

    def find_wrong(self) -> list[str]:
        return self.engine.find_wrong()


class Megatron:
    """Megatron's planner and its copy service for gloo, on modules with the parameters of the two layouts under
    Megatron's names and attributes. The target has a Megatron layout, since Megatron supports no other."""

    def __init__(self, case: Case) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
        from megatron.core.resharding.refit import swap_model_weights

        source = ProcessGroupCollection.use_mpu_process_groups(["tp", "pp", "ep", "dp", "expt_tp", "expt_dp"])
        target = ProcessGroupCollection()
        single_rank_groups = [dist.new_group([rank], backend="gloo") for rank in range(case.ranks.job.world)]
        size = case.engine.tp
        engines = [
            dist.new_group(list(range(first, first + size)), backend="gloo")
            for first in range(0, case.ranks.job.world, size)
        ]
        peer_groups = [
            dist.new_group(list(range(position, case.ranks.job.world, size)), backend="gloo")
            for position in range(size)
        ]
        engine_group, peers = engines[case.rank // size], peer_groups[case.rank % size]
        target.tp, target.ep, target.dp, target.expt_dp = engine_group, engine_group, peers, peers
        target.pp, target.expt_tp = single_rank_groups[case.rank], single_rank_groups[case.rank]
        self.source, _ = self.module(case, case.train, case.rank, source)
        engine = TrainLayout(size, size, size, even_stages(case.hf["num_hidden_layers"], 1))
        self.target, self.expected = self.module(case, engine, case.rank % size, target)
        for parameter in self.target.parameters():
            parameter.zero_()

        class Service(GlooCopyService):  # type: ignore[misc]
            def __init__(self) -> None:  # the original creates a CUDA stream
                self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
                self.gloo_pg = ranks.host_group()
                self.send_ops: list[Any] = []
                self.recv_ops: list[Any] = []
                self._copy_stream = None

        self.service, self.swap = Service(), swap_model_weights

    def find_wrong(self) -> list[str]:
        """Return the target's parameters with wrong values."""
        return [name for name, tensor in self.target.named_parameters() if not torch.equal(tensor, self.expected[name])]

    def module(self, case: Case, layout: TrainLayout, rank: int, groups: Any) -> tuple[torch.nn.Module, Tensors]:
        """Build a module with the expected values. Return it with a copy of them by name."""
        root, values = torch.nn.Module(), {}
        experts_per_rank = case.experts // layout.ep
        layers = layout.stages[rank // layout.stage_ranks]
        for param in case.params:
            if not layout.has_param(rank, param, case.experts):
                continue
            expert = param.expert is not None
            parts = param.megatron.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(layers.index(int(parts[2])))
            if param.expert is not None:  # as in Transformer Engine's grouped MLP: the only expert names that it knows
                parts.pop(parts.index("experts") + 1)
                parts[-1] += str(param.expert % experts_per_rank)
            data = case.shard(param, layout, rank)
            values[".".join(parts)] = data.clone()
            tensor = torch.nn.Parameter(data, requires_grad=False)
            is_replicated = split_with(param, param.sharding, 1, 0) == split_with(
                param, param.sharding, layout.num_shards(expert), 0
            )
            tensor.tensor_model_parallel = not is_replicated and not expert  # type: ignore[attr-defined]
            tensor.partition_dim = split_with(param, param.sharding, 1, 0).dim  # type: ignore[attr-defined]
            tensor.partition_stride = 1  # type: ignore[attr-defined]
            tensor.allreduce = not expert  # type: ignore[attr-defined]
            add_parameter(root, ".".join(parts), tensor)
        for local, layer in enumerate(layers):
            getattr(root.decoder.layers, str(local)).layer_number = layer + 1  # type: ignore[union-attr]
        root.pg_collection = groups
        root.config = argparse.Namespace(num_moe_experts=case.experts)  # type: ignore[assignment]
        return root, values

    def __call__(self) -> None:
        self.swap(self.source, self.target, self.service)


WAYS: dict[str, Callable[[Case], Way]] = {
    "reshard": Reshard,
    "changes": lambda case: Changes(case, case.options.changed),
    "changes-dense": lambda case: Changes(case, 1.0),
    "merged": Merged,
    "adapters": Adapters,
    "experts": Experts,
    "external": External,
    "gather": Gather,
    "megatron": Megatron,
}
