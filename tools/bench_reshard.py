"""Ways to bring a small MoE's weights from a trainer's ranks to engines' shards, side by side in one run:

  reshard   MegaRL's: each rank sends what others need and lack, see megarl/reshard
  changes   the same with rollout.sync_changes_only: between nodes, only words that have changed; before each sync a
            share --changed of the weights gets a new sign
  merged    the same with LoRA: a rank merges adapters of rank --lora into what it sends
  adapters  the same with rollout.sync_adapters_only: the adapters alone are sent, and engines merge them
  gather    every rank gathers all full tensors and slices its own shards out of them, as most frameworks do
  megatron  megatron.core.resharding, which moves weights into another Megatron layout; see `Megatron` below

  .venv/bin/python tools/bench_reshard.py [--ranks 4 8] [--nodes 1|2] [--repeats 5] [--hidden 512] [--json FILE]

All ranks are processes of this machine and communicate by gloo. With --nodes 2 they run in two network namespaces with
a link of --gbit between them (needs root and iproute2). Seconds are the median over repeats, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.config import ConfigError, LoraConfig, ParallelConfig
from megarl.config.command_line import Parser, check_writable_file, float_in_range, int_in_range, run_cli
from megarl.engine.weight_loader import keep_base, merge_adapters
from megarl.models.layout_algebra import HFTensor, Param, split_with
from megarl.models.lora_tables import MergedWeights, adapted_weights, factor_params, merge_adapter
from megarl.models.registry import family_of
from megarl.parallel import ranks
from megarl.reshard.plan.adapters import AdapterTable, factor_shapes, list_merges
from megarl.reshard.plan.cells import LayerTable
from megarl.reshard.plan.layout import EngineLayout, ShardSlice, TrainLayout, engine_shapes, even_stages
from megarl.reshard.plan.planner import ReshardPlan
from megarl.reshard.run.executor import Executor

Tensors = dict[str, torch.Tensor]
TIMEOUT_S = 90.0
LAYOUTS = {2: (2, 1, 2, 2), 4: (2, 2, 2, 4), 8: (2, 2, 4, 4)}
"""Layouts by number of ranks: tp, pp, ep of the trainer, tp of an engine (and its ep)."""


def model(hidden: int) -> dict[str, Any]:
    """Return the config of a Qwen3-MoE with 8 layers and 16 experts; 60 M parameters with a hidden size of 512."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 16384,  # no padding in any layout: Megatron refuses to reshard between different paddings
        "hidden_size": hidden,
        "intermediate_size": hidden * 2,
        "moe_intermediate_size": hidden // 2,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": hidden // 8,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }


def full_tensor(tensor: HFTensor) -> torch.Tensor:
    """Return the values of a full HF tensor, which any rank can compute."""
    return torch.rand(tensor.shape, generator=torch.Generator().manual_seed(zlib.crc32(tensor.name.encode())))


def trained(param: Param, source: int) -> torch.Tensor:
    """Return the full HF tensor number `source` of a parameter, without adapter."""
    return full_tensor(param.hf[source])


class Case:
    """This rank's shards in the trainer, and buffers for those of its engine."""

    def __init__(self, hf: dict[str, Any], nodes: int, changed: float, rank: int) -> None:
        self.changed, self.lora = changed, LoraConfig(rank=rank)
        world = int(os.environ["WORLD_SIZE"])
        tp, pp, ep, engine = LAYOUTS[world]
        self.hf, self.ranks_per_node = hf, world // nodes
        self.ranks = ranks.initialize(
            ParallelConfig(tp=tp, pp=pp, ep=ep, world_size=world, ranks_per_node=self.ranks_per_node), TIMEOUT_S
        )
        self.rank = self.ranks.job.rank
        self.train = TrainLayout(world, tp, ep, even_stages(hf["num_hidden_layers"], pp))
        self.engine = EngineLayout(engine, engine)
        self.experts = family_of(hf).num_experts(hf)
        self.params = family_of(hf).params(hf, 1)
        self.local: Tensors = {}
        for param in self.params:
            if self.train.has_param(self.rank, param, self.experts):
                self.local[param.megatron] = self.shard(param, self.train, self.rank)
        position = self.rank % engine
        shapes = engine_shapes(self.params, self.engine, position, self.experts)
        self.engine_tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}

    def shard(self, param: Param, layout: TrainLayout, rank: int) -> torch.Tensor:
        """Return the shard of a parameter that a rank of Megatron's layout holds."""
        expert = param.expert is not None
        dim, slices = split_with(param, param.sharding, layout.num_shards(expert), layout.shard_index(rank, expert))
        shape = list(param.hf[0].shape)
        shape[dim] = sum(piece.stop - piece.start for piece in slices)
        return self.fill(torch.zeros(shape), param, layout.slices_of_rank(rank, param), trained)

    def fill(
        self,
        target: torch.Tensor,
        param: Param,
        intervals: list[ShardSlice],
        full_of: Callable[[Param, int], torch.Tensor],
    ) -> torch.Tensor:
        """Write the expected values: those of the full tensors of `param.hf`, by index."""
        for source, dim, start, stop, offset in intervals:
            full = full_of(param, source)
            target.narrow(dim, offset, stop - start).copy_(full.narrow(dim, start, stop - start))
        return target

    def find_wrong(self, full_of: Callable[[Param, int], torch.Tensor] = trained) -> list[str]:
        """Return the engine's tensors with wrong values. full_of: see `fill`."""
        expected = {name: torch.zeros_like(tensor) for name, tensor in self.engine_tensors.items()}
        position = self.rank % self.engine.tp
        for param in self.params:
            slot = self.engine.slot_of(param)
            assert slot is not None
            for index in self.engine.expert_indices(position, param, self.experts):
                target = expected[slot.name][index] if slot.grid == "expert" else expected[slot.name]
                self.fill(target, param, self.engine.slices_of_rank(position, param), full_of)
        return [name for name in expected if not torch.equal(expected[name], self.engine_tensors[name])]


class Reshard:
    def __init__(self, case: Case, table: LayerTable | None = None) -> None:
        self.case, node = case, case.ranks_per_node
        plan = ReshardPlan(case.hf, case.train, case.engine, node, bucket_bytes=64 << 20, wire="fp32", table=table)
        allocate = lambda size: torch.empty(size, dtype=torch.uint8)  # noqa: E731
        self.executor = Executor(plan, case.rank, period=1 << 30, allocate=allocate)
        self.executor.num_syncs = 1  # do not verify; the other methods do not either

    def __call__(self) -> None:
        self.executor.sync(self.case.local, self.execute, version=1)

    def find_wrong(self) -> list[str]:
        return self.case.find_wrong()

    def execute(self, buffer: torch.Tensor, order: dict[str, Any], draft: bool) -> None:
        """Do what an engine does for an order to write or read."""
        for name, index, r0, r1, c0, c1, offset, _ in order["slices"]:
            tensor = self.case.engine_tensors[name] if index < 0 else self.case.engine_tensors[name][index]
            target = (tensor if tensor.dim() == 2 else tensor[:, None])[r0:r1, c0:c1]
            box = buffer[offset : offset + target.numel() * 4].view(torch.float32).view(target.shape)
            if order["do"] == "read":
                box.copy_(target)
            else:
                target.copy_(box)


class Changes(Reshard):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.changed = {}  # the same weights on all ranks that hold a shard
        for name, shard in case.local.items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            self.changed[name] = torch.rand(shard.shape, generator=generator) < case.changed
        self.is_original = True

    def __call__(self) -> None:
        if self.executor.has_base:
            self.is_original = not self.is_original
            for name, mask in self.changed.items():
                self.case.local[name][mask] *= -1
        super().__call__()
        self.executor.keep_base(self.case.local)

    def find_wrong(self) -> list[str]:
        if not self.is_original:
            self()
        return super().find_wrong()


class Merged(Reshard):
    """Adapters of all linear layers."""

    def __init__(self, case: Case, table: LayerTable | None = None) -> None:
        super().__init__(case, table)
        self.weights = adapted_weights(case.params, ())
        self.pairs = {weight.megatron: factor_params(weight, case.lora.rank) for weight in self.weights}
        factors = [factor for pair in self.pairs.values() for factor in pair]
        trains = [factor for factor in factors if case.train.has_param(case.rank, factor, case.experts)]
        self.factors = {factor.megatron: case.shard(factor, case.train, case.rank) for factor in trains}
        self.scale = case.lora.scale

    def __call__(self) -> None:
        merged = MergedWeights(self.case.local, self.factors, self.scale)
        self.executor.sync(merged, self.execute, version=1)

    def find_wrong(self) -> list[str]:
        return self.case.find_wrong(self.merge)

    def merge(self, param: Param, source: int) -> torch.Tensor:
        """Return a full HF tensor with its adapter merged."""
        full = full_tensor(param.hf[source])
        if param.megatron not in self.pairs:
            return full
        a, b = self.pairs[param.megatron]
        return merge_adapter(full, full_tensor(a.hf[0]), full_tensor(b.hf[source]), self.scale)


class Adapters(Merged):
    def __init__(self, case: Case) -> None:
        Reshard(case)()  # what engines have loaded
        super().__init__(case, AdapterTable(family_of(case.hf), case.lora, case.engine))
        layout = case.engine, case.rank % case.engine.tp, case.experts
        names = {weight.slot.name for weight in self.weights if weight.slot}
        shapes = factor_shapes(self.weights, case.lora.rank, *layout)
        keep = {"tensors": sorted(names), "factors": {name: ("float32", shape) for name, shape in shapes.items()}}
        self.adapted = keep_base(case.engine_tensors, keep)
        self.merges = {"scale": self.scale, "merges": list_merges(self.weights, *layout)}

    def __call__(self) -> None:
        engine_tensors = self.case.engine_tensors
        self.case.engine_tensors = self.adapted.factors
        self.executor.sync(self.factors, self.execute, version=1)
        self.case.engine_tensors = engine_tensors
        merge_adapters(engine_tensors, self.adapted, self.merges)


class Gather:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.targets: dict[str, list[tuple[torch.Tensor, Any]]] = {}
        position = case.rank % case.engine.tp
        for param in case.params:
            slot = case.engine.slot_of(param)
            assert slot is not None
            for index in case.engine.expert_indices(position, param, case.experts):
                target = (
                    case.engine_tensors[slot.name][index] if slot.grid == "expert" else case.engine_tensors[slot.name]
                )
                for piece in case.engine.slices_of_rank(position, param):
                    self.targets.setdefault(param.hf[piece.source].name, []).append((target, piece))

    def __call__(self) -> None:
        from megarl.checkpoint.export import gather_hf

        for name, full in gather_hf(self.case.local, self.case.params, self.case.ranks, bucket_bytes=32 << 20):
            for target, (_, dim, start, stop, offset) in self.targets.get(name, ()):
                target.narrow(dim, offset, stop - start).copy_(full.narrow(dim, start, stop - start))

    def find_wrong(self) -> list[str]:
        return self.case.find_wrong()


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
            node = root
            for part in parts[:-1]:
                if not hasattr(node, part):
                    node.add_module(part, torch.nn.Module())
                node = getattr(node, part)
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
            node.register_parameter(parts[-1], tensor)
        for local, layer in enumerate(layers):
            getattr(root.decoder.layers, str(local)).layer_number = layer + 1  # type: ignore[union-attr]
        root.pg_collection = groups
        root.config = argparse.Namespace(num_moe_experts=case.experts)  # type: ignore[assignment]
        return root, values

    def __call__(self) -> None:
        self.swap(self.source, self.target, self.service)


METHODS: dict[str, type[Reshard] | type[Adapters] | type[Gather] | type[Megatron]] = {
    "reshard": Reshard,
    "gather": Gather,
    "changes": Changes,
    "merged": Merged,
    "adapters": Adapters,
    "megatron": Megatron,
}


def run_rank(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    case = Case(model(options.hidden), options.nodes, options.changed, options.lora)
    begin = time.perf_counter()
    method = METHODS[options.way](case)
    result: dict[str, Any] = {"prepare_s": time.perf_counter() - begin, "seconds": []}
    for turn in range(options.repeats + 1):
        Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark of memory
        before_memory, before_bytes = _memory("VmRSS"), _received(options.interface)
        dist.barrier(group=ranks.host_group())
        begin = time.perf_counter()
        method()
        seconds = time.perf_counter() - begin
        rank_results = ranks.all_gather_objects((seconds, _memory("VmHWM") - before_memory))
        wire = ranks.all_gather_objects(_received(options.interface) - before_bytes)
        if turn == 0:
            result["first_s"] = max(
                row[0] for row in rank_results
            )  # includes connecting, and planning if that happens on the first call
            continue
        result["seconds"].append(max(row[0] for row in rank_results))
        result["peak_mib"] = max(row[1] for row in rank_results) / 2**20
        result["wire_mib"] = sum(wire[:: case.ranks_per_node]) / 2**20 if options.nodes > 1 else wire[0] / 2**20
    wrong_names = [name for names in ranks.all_gather_objects(method.find_wrong()) for name in names]
    result["wrong"] = f"{len(wrong_names)} tensors have wrong values, such as {wrong_names[0]}" if wrong_names else ""
    result["model_mib"] = sum(param.size for param in case.params) * 4 / 2**20
    print("RESULT " + json.dumps(result), flush=True)


def _memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _received(interface: str) -> int:
    """Return the bytes received by a network interface, protocol and acknowledgements included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[0])
    raise RuntimeError(f"there is no network interface {interface}")


def start(world: int, method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run all ranks with one method. Return rank 0's result, or {"problem": text}."""
    ranks_per_node = world // options.nodes
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = "127.0.0.1" if options.nodes == 1 else "10.77.0.1"
    processes: list[subprocess.Popen[str]] = []
    output_files = [tempfile.TemporaryFile("w+") for _ in range(world)]
    for rank in range(world):
        node = rank // ranks_per_node
        interface = "lo" if options.nodes == 1 else f"megarl{node}"
        prefix = [] if options.nodes == 1 else ["ip", "netns", "exec", f"megarl{node}"]
        environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank % ranks_per_node), WORLD_SIZE=str(world))
        environment.update(MASTER_ADDR=address, MASTER_PORT=str(port), OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
        environment.update(GLOO_SOCKET_IFNAME=interface)
        arguments = [
            "--way",
            method,
            "--repeats",
            str(options.repeats),
            "--hidden",
            str(options.hidden),
            "--nodes",
            str(options.nodes),
            "--changed",
            str(options.changed),
            "--lora",
            str(options.lora),
        ]
        command = [*prefix, sys.executable, __file__, "--interface", interface, *arguments]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=output_files[rank], stderr=subprocess.STDOUT, text=True)
        )
    deadline = time.monotonic() + 4 * TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    outputs = []
    for file in output_files:
        file.seek(0)
        outputs.append(file.read().strip().splitlines())
    results = [line for line in outputs[0] if line.startswith("RESULT ")]
    if results:
        return dict(json.loads(results[-1].removeprefix("RESULT ")))
    failed = [lines[-1] for lines, process in zip(outputs, processes, strict=True) if process.returncode and lines]
    return {"problem": failed[0][:150] if failed else f"not done after {4 * TIMEOUT_S:g} s"}


def network(gbit: float) -> Callable[[], None]:
    """Create two network namespaces with a link of `gbit` Gbit/s between them. Return a function that removes them.
    Raises ConfigError."""

    def command(line: str, check: bool = True) -> None:
        process = subprocess.run(line.split(), capture_output=True, text=True)
        if check and process.returncode:
            raise ConfigError(f"--nodes 2 needs root, iproute2 and a kernel with tbf: {line}: {process.stderr.strip()}")

    def remove() -> None:
        for node in (0, 1):
            command(f"ip netns del megarl{node}", check=False)

    if os.getuid():
        raise ConfigError("--nodes 2 makes network namespaces, which needs root")
    remove()
    try:
        for node in (0, 1):
            command(f"ip netns add megarl{node}")
        command("ip link add megarl0 netns megarl0 type veth peer name megarl1 netns megarl1")
        for node in (0, 1):
            in_namespace = f"ip netns exec megarl{node}"
            command(f"{in_namespace} ip addr add 10.77.0.{node + 1}/24 dev megarl{node}")
            command(f"{in_namespace} ip link set megarl{node} up")
            command(f"{in_namespace} ip link set lo up")
            command(f"{in_namespace} tc qdisc add dev megarl{node} root tbf rate {gbit}gbit burst 1mb latency 50ms")
    except (ConfigError, FileNotFoundError) as error:
        remove()
        raise ConfigError(str(error)) from None
    return remove


def show(world: int, results: dict[str, Any], options: argparse.Namespace) -> None:
    setup = "one machine" if options.nodes == 1 else f"two nodes, {options.gbit:g} Gbit/s between them"
    print(
        f"\n{world} ranks, {setup}, a model of {results['reshard']['model_mib']:.0f} MiB; wire: "
        + ("bytes over loopback" if options.nodes == 1 else "bytes between the nodes")
    )
    print(f"  {'':10}{'seconds':>9}{'ratio':>8}{'wire MiB':>10}{'peak MiB':>10}{'prepare s':>11}{'first s':>9}")
    reshard = results["reshard"]
    for name, result in results.items():
        if "problem" in result:
            print(f"  {name:10}does not run: {result['problem']}")
            continue
        seconds, base = statistics.median(result["seconds"]), statistics.median(reshard["seconds"])
        columns = f"{seconds:9.3f}{seconds / base:8.2f}{result['wire_mib']:10.1f}{result['peak_mib']:10.1f}"
        print(f"  {name:10}{columns}{result['prepare_s']:11.3f}{result['first_s']:9.3f}  {result['wrong']}")


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], choices=sorted(LAYOUTS))
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--gbit", type=float_in_range(most=1000), default=1.0)
    parser.add_argument("--repeats", type=int_in_range(most=10**6), default=5)
    parser.add_argument("--hidden", type=int_in_range(64, 1 << 14), default=512, help="a multiple of 64")
    parser.add_argument("--changed", type=float_in_range(most=1), default=0.02)
    parser.add_argument("--lora", type=int_in_range(1, 1 << 10), default=16)
    parser.add_argument("--json", type=Path)
    for hidden in ("--interface", "--way"):  # arguments of a rank, which this program starts
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.interface:
        run_rank(options)
        return 0
    if options.hidden % 64:
        raise ConfigError(
            f"--hidden must be a multiple of 64, not {options.hidden}: eight heads of a multiple of 8 each"
        )
    check_writable_file(options.json, "--json")
    remove = None
    try:
        remove = network(options.gbit) if options.nodes == 2 else None
        results = {}
        for world in options.ranks:
            results[world] = {method: start(world, method, options) for method in METHODS}
            if problem := results[world]["reshard"].get("problem"):
                raise ConfigError(f"the ranks failed: {problem}")
            show(world, results[world], options)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    finally:
        if remove:
            remove()
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
