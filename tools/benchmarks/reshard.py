"""Ways to bring a small MoE's weights from a trainer's ranks to engines' shards, side by side in one run:

  reshard        MegaRL's: each rank sends what others need and lack, see megarl/reshard
  changes        the same with rollout.sync_changes_only: between nodes, only words that have changed; before each sync
                 a share --changed of the weights changes
  changes-dense  the same after an update of all weights
  merged         the same with LoRA: a rank merges adapters of rank --lora into what it sends
  adapters       the same with rollout.sync_adapters_only: the adapters alone are sent, and engines merge them
  experts        the same with rollout.rebalance_experts_every: each sync places the experts anew, one copy more on each
                 rank of an engine; so it is planned anew, and verified in full
  external       the same, and each engine rank sends on all that it gets to that of an external engine, on the other
                 node if there are two
  gather         every rank gathers all full tensors and slices its own shards out of them, as most frameworks do
  megatron       megatron.core.resharding, which moves weights into another Megatron layout; see `reshard_ways.py`

    .venv/bin/python tools/bench.py reshard [--ranks 4 8] [--nodes 1 2] [--repeats 5] [--hidden 512]

All ranks are processes of this machine and communicate by gloo. Of two nodes, each is a network namespace, with a link
of --gbit between them (needs root and iproute2). The ways take turns: each syncs once, then each once more. Seconds are
the median over repeats, of the slowest rank; processor seconds are those of all ranks together. "of bound" is what
arrived over the wire, with TCP's own bytes, over the fewest bytes that any sync of the whole model could take
(megarl/reshard/plan/bound.py).
"""

from __future__ import annotations

import argparse
import math
import os
import secrets
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from local_ranks import run_function

from benchmarks.measure import compute_ratio
from benchmarks.output import Report
from benchmarks.reshard_ways import LAYOUTS, WAYS, Case
from megarl.config import ConfigError
from megarl.config.command_line import float_in_range, int_in_range
from megarl.parallel import job_secret, ranks
from megarl.reshard.plan.bound import compute_bound


class MeasuredWay:
    """A way, and what rank 0 reports of it. Each method is collective."""

    def __init__(self, case: Case, name: str) -> None:
        self.case, self.way = case, None
        self.result: dict[str, Any] = {"seconds": [], "cpu_s": []}
        begin = time.perf_counter()
        self.way = self.agree(lambda: WAYS[name](case))
        self.result["prepare_s"] = time.perf_counter() - begin

    def agree(self, work: Callable[[], Any]) -> Any:
        """Return the result of some work; if it fails on a rank, note that as the problem of this way on all."""
        result, problem = None, ""
        try:
            result = work()
        except Exception as error:  # after a failure of all ranks alike the other ways go on
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:150]
        problems = [text for text in ranks.all_gather_objects(problem) if text]
        if problems:
            self.result["problem"] = problems[0]
        return result

    def measure(self, is_first: bool) -> None:
        """Sync once. The first time includes connecting, and planning if that happens on the first call."""
        if "problem" in self.result or self.way is None:
            return
        result, interface = self.result, os.environ["GLOO_SOCKET_IFNAME"]
        Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark of memory
        before_memory, before_bytes = _memory("VmRSS"), _received(interface)
        dist.barrier(group=ranks.host_group())
        begin, cpu_begin = time.perf_counter(), time.process_time()
        self.agree(self.way)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        reports = ranks.all_gather_objects((seconds, _memory("VmHWM") - before_memory, cpu_seconds))
        wire = ranks.all_gather_objects(_received(interface) - before_bytes)
        if is_first:
            result["first_s"] = max(row[0] for row in reports)
            return
        result["seconds"].append(max(row[0] for row in reports))
        result["cpu_s"].append(sum(row[2] for row in reports))
        result["peak_mib"] = max(row[1] for row in reports) / 2**20
        nodes = wire[:: self.case.ranks_per_node]  # ranks of a node have the same interface
        sent = sum(nodes) / 2**20
        result["wire_mib"] = min(sent, result.get("wire_mib", sent))  # loopback has other programs' traffic, too

    def check(self) -> None:
        if "problem" in self.result or self.way is None:
            return
        wrong = [name for names in ranks.all_gather_objects(self.way.find_wrong()) for name in names]
        self.result["wrong"] = f"{len(wrong)} tensors have wrong values, such as {wrong[0]}" if wrong else ""


def measure(**options: Any) -> dict[str, Any]:
    """Run as one of the ranks."""
    torch.manual_seed(0)
    case = Case(argparse.Namespace(**options))
    bound = compute_bound(case.hf, case.train, case.engine, case.ranks_per_node, "fp32")
    ways = {name: MeasuredWay(case, name) for name in options["ways"]}
    for turn in range(options["repeats"] + 1):
        for way in ways.values():
            way.measure(is_first=turn == 0)
    for way in ways.values():
        way.check()
    return {
        "model_mib": bound.model_bytes / 2**20,
        "bound_mib": (bound.cross_bytes if options["nodes"] == 1 else bound.internode_bytes) / 2**20,
        "ways": {name: way.result for name, way in ways.items()},
    }


def _memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _received(interface: str) -> int:
    """Return the bytes received by a network interface, protocol and acknowledgements included."""
    return psutil.net_io_counters(pernic=True, nowrap=False)[interface].bytes_recv


def run_ranks(world: int, nodes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run all ranks. Return rank 0's result."""
    ranks_per_node = world // nodes
    names = [job_secret.SECRET_ENV, job_secret.EXTERNAL_SECRET_ENV]
    shared = {"MASTER_ADDR": "127.0.0.1" if nodes == 1 else "10.77.0.1"}
    shared |= {name: secrets.token_hex(16) for name in names}

    def rank_settings(rank: int) -> tuple[list[str], dict[str, str]]:
        node = rank // ranks_per_node
        prefix = [] if nodes == 1 else ["ip", "netns", "exec", f"megarl{node}"]
        interface = "lo" if nodes == 1 else f"megarl{node}"
        return prefix, {"LOCAL_RANK": str(rank % ranks_per_node), "GLOO_SOCKET_IFNAME": interface}

    settings = {name: getattr(options, name) for name in ("ways", "repeats", "hidden", "changed", "lora")}
    result: dict[str, Any] = run_function(
        "benchmarks.reshard:measure",
        world,
        nodes=nodes,
        timeout_s=options.timeout,
        **settings,
        timeout=math.inf,  # each wait of a rank for another ends after --timeout
        environment=shared,
        rank_settings=rank_settings,
    )
    return result


def network(gbit: float) -> Callable[[], None]:
    """Create two network namespaces with a link of `gbit` Gbit/s between them. Return a function that removes them.
    Raises ConfigError."""

    def command(line: str, check: bool = True) -> None:
        needs = "--nodes 2 needs root, iproute2 and a kernel with tbf"
        try:
            process = subprocess.run(line.split(), capture_output=True, text=True)
        except FileNotFoundError as error:
            raise ConfigError(f"{needs}: {error}") from None
        if check and process.returncode:
            raise ConfigError(f"{needs}: {line}: {process.stderr.strip()}")

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
    except ConfigError:
        remove()
        raise
    return remove


def make_rows(world: int, nodes: int, result: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    base: Sequence[float] = ()
    for name, way in result["ways"].items():
        row: dict[str, Any] = {"way": name}
        if "problem" in way:
            rows.append(row | {"errors": f"does not run: {way['problem']}"})
            continue
        base = base or way["seconds"]
        row |= {"seconds": statistics.median(way["seconds"]), "ratio": compute_ratio(way["seconds"], base)}
        row |= {"processor s": statistics.median(way["cpu_s"]), "wire MiB": way["wire_mib"]}
        row["of bound"] = way["wire_mib"] / result["bound_mib"] if result["bound_mib"] else None  # nothing has to move
        row |= {"peak MiB": way["peak_mib"], "prepare s": way["prepare_s"], "first s": way["first_s"]}
        row |= {"errors": way["wrong"], "samples": {"seconds": way["seconds"], "processor s": way["cpu_s"]}}
        rows.append(row)
    job = {"ranks": world, "nodes": nodes, "model MiB": result["model_mib"], "bound MiB": result["bound_mib"]}
    return [row | {"job": job} for row in rows]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], choices=sorted(LAYOUTS))
    parser.add_argument("--nodes", type=int, nargs="+", default=[1], choices=(1, 2))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--gbit", type=float_in_range(most=1000), default=1.0)
    parser.add_argument("--repeats", type=int_in_range(most=10**6), default=5)
    parser.add_argument("--hidden", type=int_in_range(64, 1 << 14), default=512, help="a multiple of 64")
    parser.add_argument("--changed", type=float_in_range(most=1), default=0.02)
    parser.add_argument("--lora", type=int_in_range(1, 1 << 10), default=16)
    parser.add_argument(
        "--timeout",
        type=float_in_range(most=86400),
        default=600.0,
        help="seconds that a rank waits for another, while all of them start or in a sync",
    )


def run(options: argparse.Namespace, report: Report) -> None:
    if options.hidden % 64:
        raise ConfigError(
            f"--hidden must be a multiple of 64, not {options.hidden}: eight heads of a multiple of 8 each"
        )
    remove = network(options.gbit) if 2 in options.nodes else lambda: None
    try:
        report.start()
        for world in options.ranks:
            for nodes in options.nodes:
                result = run_ranks(world, nodes, options)
                setup = "one machine" if nodes == 1 else f"two nodes, {options.gbit:g} Gbit/s between them"
                wire = "between ranks; wire: loopback" if nodes == 1 else "and the wire between the nodes"
                title = f"{world} ranks, {setup}, a model of {result['model_mib']:.0f} MiB, at least "
                title += f"{result['bound_mib']:.1f} MiB {wire}"
                report.table(title, make_rows(world, nodes, result))
    finally:
        remove()
