"""A plan on paper: what it costs and how long it should take, beside the bound, without a process or a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.reshard.plan.bound import NETWORK_SLACK, Bound
from megarl.reshard.plan.planner import ALIGN, FORWARD_RECEIVE, FORWARD_SEND, LOCAL, SEND, RankPlan, ReshardPlan

Floats = NDArray[np.float64]
HASH_BYTES = 8  # of each piece, behind the pieces of its message


class Messages(NamedTuple):
    """What one rank sends and receives; arrays, one entry per message. What stays on the rank is a message from itself.

    nbytes: of the pieces; forwarded: of those that are passed on. staged: in the buffer, with alignment and hashes.
    """

    round: np.ndarray
    is_send: np.ndarray
    peer: np.ndarray
    nbytes: np.ndarray
    forwarded: np.ndarray
    staged: np.ndarray


@dataclass(frozen=True)
class LinkSpeeds:
    """Assumed: bytes per second and direction that one GPU gets of each kind of link, 400 Gbit/s of
    network per GPU, NVLink of an H100 or H200. And seconds of each round:

    round_seconds: between two rounds, when nothing is on the wire: to wait for the end, copy what is forwarded and
    start the next. hand_over: from one order to an engine to the next, while a round is on the wire, so that no round
    takes less: the message and its answer, and what the loader does for each slice. On a CPU the first took 0.1 ms at
    best with SGLang, the second 11 us; of these there are up to 120 for each of 512 GPUs. No device was waited for.
    """

    network_bandwidth: float = 50e9
    nvlink_bandwidth: float = 450e9
    round_overhead: float = 300e-6
    send_overhead: float = 5e-3

    def transfer_seconds(self, network: Any, inside: Any) -> Any:
        """The slower of the two, which run side by side."""
        return np.maximum(network / self.network_bandwidth, inside / self.nvlink_bandwidth)


@dataclass(frozen=True, eq=False)
class CostReport:
    """A plan with all ranks' messages. Arrays are [rounds, ranks] bytes: sent and received over the network (between
    nodes) and inside of a node, and staged; `total`: [nodes, nodes] bytes from node to node."""

    plan: ReshardPlan
    plan_seconds: float
    all_ranks_seconds: float
    num_messages: int
    message_bytes: int
    network_out: Floats
    network_in: Floats
    inside_out: Floats
    inside_in: Floats
    staged_out: Floats
    staged_in: Floats
    node_matrix: Floats

    def round_seconds(self, links: LinkSpeeds) -> Floats:
        """Of each round, if all ranks went through the rounds in step: what the busiest one of that round takes."""
        out = links.transfer_seconds(self.network_out, self.inside_out)
        into = links.transfer_seconds(self.network_in, self.inside_in)
        found: Floats = np.maximum(np.maximum(out, into).max(axis=1), links.send_overhead) + links.round_overhead
        return found

    def busiest_seconds(self, links: LinkSpeeds) -> float:
        """If no rank waited for another: what the busiest one takes."""
        out = links.transfer_seconds(self.network_out.sum(0), self.inside_out.sum(0))
        into = links.transfer_seconds(self.network_in.sum(0), self.inside_in.sum(0))
        rounds = len(self.network_out)
        return max(float(np.maximum(out, into).max()), rounds * links.send_overhead) + rounds * links.round_overhead


def tabulate_messages(rank: RankPlan) -> Messages:
    """Out of the rank's tables, of which there is one for each kind of layer, without an object for every piece."""
    line = rank.plan.assignment.byte_index
    width = np.array([(c.c1 - c.c0) * c.item_bytes for c in line.cells], dtype=np.int64)
    small: dict[tuple[int, int], np.ndarray] = {}
    for number, table in rank.tables.items():
        size = (table.r1 - table.r0) * width[line.cell[table.cell]]
        sends, forward = (
            (table.operation == SEND) | (table.operation == FORWARD_SEND),
            table.operation >= FORWARD_RECEIVE,
        )
        peer = np.where(table.operation == LOCAL, rank.rank, table.peer)
        aligned = -(-size // ALIGN) * ALIGN
        values = np.stack([size, np.where(forward, size, 0), aligned, np.ones_like(size)])
        small[number] = _sum_by_key(np.stack([table.block_round, sends, peer]), values)
    all_rounds = []
    for slot in rank.plan.round_blocks:
        for group, _ in slot.members:
            moved = small[group, slot.num_parts].copy()
            moved[0] += slot.first_round
            all_rounds.append(moved)
    together = np.concatenate(all_rounds, axis=1)
    number, sends, peer, nbytes, forwarded, aligned, pieces = _sum_by_key(together[:3], together[3:])
    staged = aligned + -(-HASH_BYTES * pieces // ALIGN) * ALIGN
    return Messages(number, sends.astype(bool), peer, nbytes, forwarded, staged)


def _sum_by_key(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Columns of keys above the sums of their values."""
    different, same = np.unique(keys, axis=1, return_inverse=True)
    total = np.zeros((len(values), different.shape[1]), dtype=np.int64)
    for row, value in zip(total, values, strict=True):
        np.add.at(row, same.ravel(), value)
    return np.concatenate([different, total])


def build_report(make: Callable[[], ReshardPlan]) -> CostReport:
    """Make the plan of all ranks, as often as is needed to time it, and add up what they do."""
    seconds, ranks = [], make().rank_map.participants
    for rank in sorted({ranks[0], ranks[len(ranks) // 2], ranks[-1]}):
        begin = time.perf_counter()
        make().plan_rank(rank)
        seconds.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    plan = make()
    all_seconds = time.perf_counter() - begin
    world, here = plan.world, plan.assignment.ranks_per_node
    network_out, network_in, inside_out, inside_in, staged_out, staged_in = np.zeros((6, plan.rounds, world))
    total = np.zeros((world // here, world // here))
    count = bytes_ = 0
    for rank in range(world):
        begin = time.perf_counter()
        rank_plan = plan.plan_rank(rank)
        all_seconds += time.perf_counter() - begin
        own = tabulate_messages(rank_plan)
        far, other = own.peer // here != rank // here, own.peer != rank
        for sends, network, inside, staged in (
            (True, network_out, inside_out, staged_out),
            (False, network_in, inside_in, staged_in),
        ):
            chosen = own.is_send == sends
            for figure, which, value in (
                (network, chosen & far, own.nbytes),
                (inside, chosen & other & ~far, own.nbytes),
                (staged, chosen, own.staged),
            ):
                figure[:, rank] = np.bincount(own.round[which], value[which], plan.rounds)
        received = ~own.is_send & other
        count += int(received.sum())
        bytes_ += int(own.nbytes[received].sum())
        np.add.at(total[:, rank // here], own.peer[received] // here, own.nbytes[received])
    return CostReport(
        plan=plan,
        plan_seconds=max(seconds),
        all_ranks_seconds=all_seconds,
        num_messages=count,
        message_bytes=bytes_,
        network_out=network_out,
        network_in=network_in,
        inside_out=inside_out,
        inside_in=inside_in,
        staged_out=staged_out,
        staged_in=staged_in,
        node_matrix=total,
    )


def compute_metrics(paper: CostReport, bound: Bound, links: LinkSpeeds) -> dict[str, Any]:
    """What a program reads: the plan beside the bound; bytes of all ranks together, or of the busiest one."""
    network_out, network_in = paper.network_out.sum(0), paper.network_in.sum(0)
    sent, received = network_out + paper.inside_out.sum(0), network_in + paper.inside_in.sum(0)
    found: dict[str, Any] = {
        "plan_seconds": round(paper.plan_seconds, 4),
        "all_ranks_seconds": round(paper.all_ranks_seconds, 3),
        "model_bytes": bound.model_bytes,
        "needed_bytes": bound.needed_bytes,
        "local_bytes": bound.local_bytes,
        "cross_bytes": int(received.sum()),
        "cross_bound": bound.cross_bytes,
        "cross_ratio": _ratio(received.sum(), bound.cross_bytes),
        "internode_bytes": int(network_in.sum()),
        "internode_bound": bound.internode_bytes,
        "internode_ratio": _ratio(network_in.sum(), bound.internode_bytes),
    }
    busiest = {"send": sent, "recv": received, "nic_send": network_out, "nic_recv": network_in}
    for name, of_ranks in busiest.items():
        least = getattr(bound, name)
        found[f"{name}_max"] = int(of_ranks.max())
        found[f"{name}_bound"] = round(least)
        found[f"{name}_max_over_bound"] = _ratio(of_ranks.max(), least)
    found |= {
        # Of `send`, where nobody sends much more over the network than has to be.
        "send_beside_bound": round(bound.send_beside),
        "send_max_over_beside_bound": _ratio(sent.max(), bound.send_beside),
        # As they are allocated: two halves of the largest round, for each direction.
        "staging_peak_bytes": int((2 * (paper.staged_out.max(0) + paper.staged_in.max(0))).max()),
        "bucket_bytes": paper.plan.bucket_bytes,
        "messages": paper.num_messages,
        "mean_message_bytes": round(paper.message_bytes / max(paper.num_messages, 1)),
        "rounds": paper.plan.rounds,
        "modelled_seconds": float(f"{paper.round_seconds(links).sum():.4g}"),
        "modelled_seconds_if_nobody_waits": float(f"{paper.busiest_seconds(links):.4g}"),
        "model": {
            "what": "modelled, not measured: these bandwidths per GPU and direction; handing over and packing go on "
            "while a round is on the wire",
            "nic_bytes_per_second": links.network_bandwidth,
            "nvlink_bytes_per_second": links.nvlink_bandwidth,
            "seconds_per_round": links.round_overhead,
            "seconds_per_hand_over": links.send_overhead,
        },
    }
    if least := max(bound.nic_send, bound.nic_recv) / links.network_bandwidth:
        found["modelled_over_busiest_nic"] = round(found["modelled_seconds"] / least, 4)
    return found


def summarize(paper: CostReport, bound: Bound, links: LinkSpeeds) -> list[str]:
    """What the figures say, for a reader."""
    train, here = paper.plan.train, paper.plan.assignment.ranks_per_node
    engines, nodes = len(paper.plan.rank_map.engine), paper.plan.world // here
    network_out, network_in = paper.network_out.sum(0), paper.network_in.sum(0)
    received = network_in + paper.inside_in.sum(0)
    gathered = engines * bound.model_bytes
    found = [
        f"Each GPU{'' if paper.plan.rank_map.is_colocated else ' of an engine'} needs {format_bytes(bound.needed_bytes / engines)}, "
        f"has {format_bytes(bound.local_bytes / engines)} of it and receives {format_bytes(received.sum() / engines)}; "
        f"a gather of the whole model would bring it {format_bytes(bound.model_bytes)}"
        + (f", {gathered / received.sum():.0f} times as much." if received.any() else ".")
    ]
    if nodes > 1:
        found.append(
            f"{format_bytes(network_in.sum() / engines)} of that come over the network, once for each node that needs "
            f"them, and {format_bytes((received - network_in).sum() / engines)} from GPUs of the same node."
        )
        ends = (
            ("sends", network_out, "nic_send", "who alone have what they send", train.world),
            ("receives", network_in, "nic_recv", "of what their nodes need and lack", engines),
        )
        for verb, values, name, why, among in ends:
            rank, least, forced = int(values.argmax()), getattr(bound, name), bound.forced_on[name]
            line = (
                f"GPU {rank} ({_describe_rank(paper.plan, rank)}) {verb} most over the network: "
                f"{format_bytes(values[rank])}, where the mean is {format_bytes(values.sum() / among)}."
            )
            if forced:
                line += (
                    f" No plan can do with less than {format_bytes(least)}: that is the share of each of "
                    f"{_describe_ranks(forced, paper.plan)}, {why}."
                )
            found.append(line)
        if bound.send_beside > 1.001 * bound.send:
            sent = network_out + paper.inside_out.sum(0)
            found.append(
                f"Over all links the busiest GPU sends {format_bytes(sent.max())}. Were the network of no account, "
                f"{format_bytes(bound.send)} would do: those that have most to send inside of their nodes would leave the "
                f"network to others. Some GPU sends {format_bytes(bound.send_beside)} at least, or one sends more than "
                f"{NETWORK_SLACK:g} of the least over the network."
            )
        sent = network_out + paper.inside_out.sum(0)
        if (ratio := sent.max() / max(bound.send_beside, 1.0)) > NETWORK_SLACK:
            found.append(
                f"The busiest GPU sends {ratio:.2f} of what some GPU has to send in all where the network is spared: "
                "the planner levels what goes over the network first, and what goes inside of nodes not as well in "
                "engines of such a size."
            )
    seconds, busiest = float(paper.round_seconds(links).sum()), paper.busiest_seconds(links)
    found.append(
        f"It goes in {paper.plan.rounds} rounds through staging of two buckets of {paper.plan.bucket_bytes >> 20} MiB. "
        f"Modelled, not measured, at {links.network_bandwidth / 1e9:g} GB/s of network and {links.nvlink_bandwidth / 1e9:g} GB/s inside of "
        f"a node per GPU and direction, {1e6 * links.round_overhead:g} us between rounds and "
        f"{1e3 * links.send_overhead:g} ms at least for each, to hand over the one before: {seconds:.3g} s if all go "
        f"through the rounds in step, {busiest:.3g} s if nobody waited for another."
    )
    if least := max(bound.nic_send, bound.nic_recv) / links.network_bandwidth:
        found[-1] += f" The busiest network card needs {least:.3g} s in any plan: {seconds / least:.2f} of that."
    return found


def format_bytes(value: float) -> str:
    """Three or four digits, in the unit that fits."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            digits = max(0, 3 - len(f"{value / size:.0f}"))
            return f"{value / size:,.{digits}f} {unit}"
    return f"{value:.0f} B"


def stage_of(plan: ReshardPlan, rank: int) -> int | None:
    """Which stage a rank of the job has; None where it does not train."""
    own = plan.train.trainer_rank(rank)
    return None if own is None else own // plan.train.stage_ranks


def _describe_rank(plan: ReshardPlan, rank: int) -> str:
    """Which stage, or else which engine, and which node."""
    stage, engine = stage_of(plan, rank), plan.rank_map.engine_rank(rank)
    node = f"node {rank // plan.rank_map.ranks_per_node}"
    if stage is not None:
        return f"stage {stage}, {node}"
    return node if engine is None else f"engine {engine // plan.engine.tp}, {node}"


def _describe_ranks(ranks: tuple[int, ...], plan: ReshardPlan) -> str:
    if len(ranks) == 1:
        return f"one GPU, {ranks[0]}"
    inside = {stage_of(plan, rank) for rank in ranks}
    stage, node = inside.pop(), ranks[0] // plan.rank_map.ranks_per_node
    of_stage = f" of stage {stage}" if not inside and stage is not None else ""
    if of_stage and len(ranks) == plan.train.stage_ranks:
        return f"the {len(ranks)} GPUs{of_stage}"
    if len(ranks) == plan.rank_map.ranks_per_node and {rank // plan.rank_map.ranks_per_node for rank in ranks} == {
        node
    }:
        return f"the {len(ranks)} GPUs of node {node}"
    return f"{len(ranks)} GPUs" + (of_stage or " together")


def _ratio(value: float, least: float) -> float:
    """1 where there is nothing to do and nothing is done."""
    if not least:
        return 1.0 if not value else float("inf")
    return round(float(value) / least, 6)
