"""Costs and modelled duration of a plan, compared with the bound: as metrics, sentences, and one HTML page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np

from megarl.reshard.plan.bound import NETWORK_SLACK, Bound, Floats
from megarl.reshard.plan.planner import FORWARD_RECEIVE, FORWARD_SEND, LOCAL, SEND, RankPlan, ReshardPlan, align

Colour = tuple[int, int, int]

# Of the HTML page.
CELLS = 64  # maximum cells per side of the map; more nodes share cells
SIDE = 640  # side of the map in pixels
WIDTH, HEIGHT = 900, 150  # size of a chart in pixels
LABEL_WIDTH = 80  # pixels for labels
NETWORK_COLOUR, INTRANODE_COLOUR = (27, 79, 156), (200, 90, 20)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60em; margin: 2em auto;
       padding: 0 1em; }
svg { display: block; max-width: 100%; height: auto; }
text { font: 11px system-ui, sans-serif; fill: #444; }
table { border-collapse: collapse; } td, th { padding: 0 1em 0 0; text-align: right; font-weight: normal; }
th { color: #666; border-bottom: 1px solid #ccc; } .note { color: #666; }
"""

HASH_BYTES = 8  # per piece, after the pieces of the message


class Messages(NamedTuple):
    """The messages that one rank sends and receives; arrays. Data that stay on the rank count as a message from itself.

    nbytes: bytes of all pieces; forwarded: of those that are forwarded; staged: in the buffer, aligned, with hashes.
    """

    round: np.ndarray
    is_send: np.ndarray
    peer: np.ndarray
    nbytes: np.ndarray
    forwarded: np.ndarray
    staged: np.ndarray


@dataclass(frozen=True)
class LinkSpeeds:
    """Assumed link speeds and overheads.

    network_bandwidth, nvlink_bandwidth: bytes per second and direction of one GPU: 400 Gbit/s of network per GPU,
    NVLink of an H100 or H200.
    round_overhead: seconds between two rounds, when nothing is on the wire: wait for the end, copy what is forwarded
    and start the next.
    send_overhead: seconds from one order to an engine to the next, while a round is on the wire; no round takes less.
    It covers the message and its answer, and the loader's work per slice. On a CPU the former took 0.1 ms at best with
    SGLang, the latter 11 us; with 512 GPUs there are up to 120 slices per rank and round. This excludes waiting for a
    device.
    """

    network_bandwidth: float = 50e9
    nvlink_bandwidth: float = 450e9
    round_overhead: float = 300e-6
    send_overhead: float = 5e-3

    def transfer_seconds(self, network: Any, inside: Any) -> Any:
        """Return the time of the slower of the two links, which run in parallel."""
        return np.maximum(network / self.network_bandwidth, inside / self.nvlink_bandwidth)


@dataclass(frozen=True, eq=False)
class CostReport:
    """A plan with all ranks' messages.

    network, inside, staged: [2, rounds, ranks] bytes that each rank sends and receives over the network (between nodes)
    and inside a node, and stages for that. node_matrix: [nodes, nodes] bytes from node to node.
    """

    plan: ReshardPlan
    plan_seconds: float
    all_ranks_seconds: float
    num_messages: int
    message_bytes: int
    network: Floats
    inside: Floats
    staged: Floats
    node_matrix: Floats

    def round_seconds(self, links: LinkSpeeds) -> Floats:
        """Return the duration of each round, that of its busiest rank, if all ranks go through them in step."""
        busiest = links.transfer_seconds(self.network, self.inside).max(axis=(0, 2))
        seconds: Floats = np.maximum(busiest, links.send_overhead) + links.round_overhead
        return seconds

    def busiest_seconds(self, links: LinkSpeeds) -> float:
        """Return the duration for the busiest rank if no rank waited for another."""
        busiest = float(links.transfer_seconds(self.network.sum(1), self.inside.sum(1)).max())
        return max(busiest, self.plan.rounds * links.send_overhead) + self.plan.rounds * links.round_overhead


def tabulate_messages(rank: RankPlan) -> Messages:
    """Return a rank's messages, computed from its tables without an object per piece."""
    by_table: dict[tuple[int, int], np.ndarray] = {}
    for number, table in rank.tables.items():
        size = (table.r1 - table.r0) * rank.plan.assignment.byte_index.row_bytes[table.cell]
        sends = (table.operation == SEND) | (table.operation == FORWARD_SEND)
        forward = table.operation >= FORWARD_RECEIVE
        peer = np.where(table.operation == LOCAL, rank.rank, table.peer)
        values = np.stack([size, np.where(forward, size, 0), align(size), np.ones_like(size)])
        by_table[number] = _sum_by_key(np.stack([table.block_round, sends, peer]), values)
    all_rounds = []
    for block in rank.plan.round_blocks:
        for group, _ in block.members:
            number, *others = by_table[group, block.num_parts]
            all_rounds.append(np.stack([number + block.first_round, *others]))
    all_messages = np.concatenate(all_rounds, axis=1)
    number, sends, peer, nbytes, forwarded, aligned, pieces = _sum_by_key(all_messages[:3], all_messages[3:])
    staged = aligned + align(HASH_BYTES * pieces)
    return Messages(number, sends.astype(bool), peer, nbytes, forwarded, staged)


def _sum_by_key(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the distinct columns of keys, stacked on the sums of their values."""
    distinct, inverse = np.unique(keys, axis=1, return_inverse=True)
    total = np.zeros((len(values), distinct.shape[1]), dtype=np.int64)
    for row, value in zip(total, values, strict=True):
        np.add.at(row, inverse.ravel(), value)
    return np.concatenate([distinct, total])


def build_report(build_plan: Callable[[], ReshardPlan]) -> CostReport:
    """Compute the plan of all ranks, repeatedly in order to time it, and add up what they do."""
    seconds, ranks = [], build_plan().rank_map.participants
    for rank in sorted({ranks[0], ranks[len(ranks) // 2], ranks[-1]}):
        begin = time.perf_counter()
        RankPlan(build_plan(), rank)
        seconds.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    plan = build_plan()
    all_seconds = time.perf_counter() - begin
    world, ranks_per_node = plan.world, plan.assignment.ranks_per_node
    network, inside, staged = np.zeros((3, 2, plan.rounds, world))
    node_matrix = np.zeros((world // ranks_per_node, world // ranks_per_node))
    num_messages = num_bytes = 0
    for rank in range(world):
        begin = time.perf_counter()
        rank_plan = RankPlan(plan, rank)
        all_seconds += time.perf_counter() - begin
        messages = tabulate_messages(rank_plan)
        is_remote, leaves_rank = messages.peer // ranks_per_node != rank // ranks_per_node, messages.peer != rank
        for direction, chosen in enumerate((messages.is_send, ~messages.is_send)):
            for target, mask, value in (
                (network, chosen & is_remote, messages.nbytes),
                (inside, chosen & leaves_rank & ~is_remote, messages.nbytes),
                (staged, chosen, messages.staged),
            ):
                target[direction, :, rank] = np.bincount(messages.round[mask], value[mask], plan.rounds)
        received = ~messages.is_send & leaves_rank
        num_messages += int(received.sum())
        num_bytes += int(messages.nbytes[received].sum())
        node_in = node_matrix[:, rank // ranks_per_node]
        np.add.at(node_in, messages.peer[received] // ranks_per_node, messages.nbytes[received])
    arrays = network, inside, staged, node_matrix
    return CostReport(plan, max(seconds), all_seconds, num_messages, num_bytes, *arrays)


def compute_metrics(report: CostReport, bound: Bound, links: LinkSpeeds) -> dict[str, Any]:
    """Return the plan compared with the bound; bytes of all ranks together, or of the busiest one."""
    network_out, network_in = report.network.sum(1)
    sent, received = (report.network + report.inside).sum(1)
    metrics: dict[str, Any] = {
        "plan_seconds": round(report.plan_seconds, 4),
        "all_ranks_seconds": round(report.all_ranks_seconds, 3),
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
        lower_bound = getattr(bound, name)
        metrics[f"{name}_max"] = int(of_ranks.max())
        metrics[f"{name}_bound"] = round(lower_bound)
        metrics[f"{name}_max_over_bound"] = _ratio(of_ranks.max(), lower_bound)
    metrics |= {
        # Bound on `send` for plans that keep to NETWORK_SLACK over the network.
        "send_capped_bound": round(bound.send_capped),
        "send_max_over_capped_bound": _ratio(sent.max(), bound.send_capped),
        # As allocated: twice the largest round, for each direction.
        "staging_peak_bytes": int(2 * report.staged.max(1).sum(0).max()),
        "bucket_bytes": report.plan.bucket_bytes,
        "messages": report.num_messages,
        "mean_message_bytes": round(report.message_bytes / max(report.num_messages, 1)),
        "rounds": report.plan.rounds,
        "modelled_seconds": float(f"{report.round_seconds(links).sum():.4g}"),
        "modelled_seconds_if_nobody_waits": float(f"{report.busiest_seconds(links):.4g}"),
        "model": {
            "what": "modelled, not measured: these bandwidths per GPU and direction; hand-off and packing overlap with "
            "the transfer of a round",
            "nic_bytes_per_second": links.network_bandwidth,
            "nvlink_bytes_per_second": links.nvlink_bandwidth,
            "seconds_per_round": links.round_overhead,
            "send_overhead_seconds": links.send_overhead,
        },
    }
    if lower_bound := max(bound.nic_send, bound.nic_recv) / links.network_bandwidth:
        metrics["modelled_over_busiest_nic"] = round(metrics["modelled_seconds"] / lower_bound, 4)
    return metrics


def summarize(report: CostReport, bound: Bound, links: LinkSpeeds) -> list[str]:
    """Describe the metrics in sentences."""
    train, ranks_per_node = report.plan.train, report.plan.assignment.ranks_per_node
    engines, nodes = len(report.plan.rank_map.engine), report.plan.world // ranks_per_node
    network_out, network_in = report.network.sum(1)
    sent, received = (report.network + report.inside).sum(1)
    gathered = engines * bound.model_bytes
    sentences = [
        f"Each GPU{'' if report.plan.rank_map.is_colocated else ' of an engine'} needs "
        f"{format_bytes(bound.needed_bytes / engines)}, has {format_bytes(bound.local_bytes / engines)} of it and "
        f"receives {format_bytes(received.sum() / engines)}; "
        f"a gather of the whole model would send it {format_bytes(bound.model_bytes)}"
        + (f", {gathered / received.sum():.0f} times as much." if received.any() else ".")
    ]
    if nodes > 1:
        sentences.append(
            f"{format_bytes(network_in.sum() / engines)} of that cross the network, once for each node that needs "
            f"them, and {format_bytes((received - network_in).sum() / engines)} from GPUs of the same node."
        )
        ends = (
            ("sends", network_out, "nic_send", "the only holders of what they send", train.world),
            ("receives", network_in, "nic_recv", "for what their nodes need and lack", engines),
        )
        for verb, values, name, reason, num_ranks in ends:
            rank, minimum, forced = int(values.argmax()), getattr(bound, name), bound.forced_on[name]
            line = (
                f"GPU {rank} ({_describe_rank(report.plan, rank)}) {verb} most over the network: "
                f"{format_bytes(values[rank])}, where the mean is {format_bytes(values.sum() / num_ranks)}."
            )
            if forced:
                line += (
                    f" No plan needs less than {format_bytes(minimum)}: that is the share of each of "
                    f"{_describe_ranks(forced, report.plan)}, {reason}."
                )
            sentences.append(line)
        if bound.send_capped > 1.001 * bound.send:
            sentences.append(
                f"Over all links the busiest GPU sends {format_bytes(sent.max())}. Were the network of no account, "
                f"{format_bytes(bound.send)} would suffice: GPUs that send most inside their nodes would leave the "
                f"network to others. Some GPU sends {format_bytes(bound.send_capped)} at least, or one sends more than "
                f"{NETWORK_SLACK:g} of the least over the network."
            )
        if (ratio := sent.max() / max(bound.send_capped, 1.0)) > NETWORK_SLACK:
            sentences.append(
                f"The busiest GPU sends {ratio:.2f} of what some GPU has to send in all where the network is spared: "
                "the planner levels what goes over the network first, and what goes inside nodes less well for engines "
                "of this size."
            )
    seconds, busiest = float(report.round_seconds(links).sum()), report.busiest_seconds(links)
    sentences.append(
        f"It goes in {report.plan.rounds} rounds through staging of two buckets of "
        f"{report.plan.bucket_bytes >> 20} MiB. Modelled, not measured, at {links.network_bandwidth / 1e9:g} GB/s of "
        f"network and {links.nvlink_bandwidth / 1e9:g} GB/s inside a node per GPU and direction, "
        f"{1e6 * links.round_overhead:g} us between rounds and {1e3 * links.send_overhead:g} ms at least for each, to "
        f"hand over the one before: {seconds:.3g} s if all ranks run the rounds in lockstep, {busiest:.3g} s if no "
        "rank waited for another."
    )
    if minimum := max(bound.nic_send, bound.nic_recv) / links.network_bandwidth:
        sentences[-1] += (
            f" The busiest network card needs {minimum:.3g} s in any plan: {seconds / minimum:.2f} of that."
        )
    return sentences


def format_bytes(value: float) -> str:
    """Format with three or four digits, in a suitable unit."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            digits = max(0, 3 - len(f"{value / size:.0f}"))
            return f"{value / size:,.{digits}f} {unit}"
    return f"{value:.0f} B"


def stage_of(plan: ReshardPlan, rank: int) -> int | None:
    """Return the stage of a job rank; None if it does not train."""
    trainer_rank = plan.train.trainer_rank(rank)
    return None if trainer_rank is None else trainer_rank // plan.train.stage_ranks


def _describe_rank(plan: ReshardPlan, rank: int) -> str:
    """Name the stage, or else the engine, and the node of a rank."""
    stage, engine = stage_of(plan, rank), plan.rank_map.engine_rank(rank)
    node = f"node {rank // plan.rank_map.ranks_per_node}"
    if stage is not None:
        return f"stage {stage}, {node}"
    return node if engine is None else f"engine {engine // plan.engine.tp}, {node}"


def _describe_ranks(ranks: tuple[int, ...], plan: ReshardPlan) -> str:
    if len(ranks) == 1:
        return f"one GPU, {ranks[0]}"
    ranks_per_node = plan.rank_map.ranks_per_node
    stages, nodes = {stage_of(plan, rank) for rank in ranks}, {rank // ranks_per_node for rank in ranks}
    of_stage = f" of stage {next(iter(stages))}" if len(stages) == 1 and None not in stages else ""
    if of_stage and len(ranks) == plan.train.stage_ranks:
        return f"the {len(ranks)} GPUs{of_stage}"
    if len(ranks) == ranks_per_node and len(nodes) == 1:
        return f"the {len(ranks)} GPUs of node {min(nodes)}"
    return f"{len(ranks)} GPUs" + (of_stage or " together")


def _ratio(value: float, minimum: float) -> float:
    """Return the ratio; 1 if both are 0."""
    if not minimum:
        return 1.0 if not value else float("inf")
    return round(float(value) / minimum, 6)


def render_page(title: str, report: CostReport, bound: Bound, links: LinkSpeeds, sentences: Sequence[str]) -> str:
    """Return the HTML page. sentences: paragraphs at its top, in order."""
    has_several_nodes = len(report.node_matrix) > 1
    if has_several_nodes:
        values, scope, bounds = report.network, "over the network", (bound.nic_send, bound.nic_recv)
    else:
        values, scope, bounds = report.inside, "", (bound.send, bound.recv)
    sent, received = values.sum(1)
    seconds = report.round_seconds(links) * 1e3
    nodes_per_cell = -(-len(report.node_matrix) // CELLS)
    unit = "a node" if nodes_per_cell == 1 else f"{nodes_per_cell} nodes together"
    network, intranode = (
        f"<span style='background:{_shade(colour, 0.8)}'>&emsp;</span>" for colour in (NETWORK_COLOUR, INTRANODE_COLOUR)
    )
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(sentence)}</p>" for sentence in sentences),
        "<h2>Traffic between GPUs</h2>",
        f"<p class='note'>Rows send, columns receive; a row or column is {unit}. {network} over the network, "
        f"{intranode} inside a node; the darker, the more. Lines divide the stages of the trainer (rows) and the "
        "engines (columns). Hover for figures.</p>",
        _render_map(report) if has_several_nodes else "<p>There is one node: nothing crosses the network.</p>",
        f"<h2>Each GPU's bytes {scope}</h2>",
        "<p class='note'>GPUs in order, the stages behind one another. Dashed: the least that is possible for the "
        "busiest one; dotted: the mean.</p>",
        _render_chart(sent, bounds[0], f"sent {scope}", NETWORK_COLOUR, _stage_marks(report)),
        _render_chart(received, bounds[1], f"received {scope}", NETWORK_COLOUR, _stage_marks(report)),
        "<h2>The busiest GPUs</h2>",
        _render_busiest(report),
        "<h2>Rounds</h2>",
        "<p class='note'>Modelled milliseconds of each round: what the busiest GPU of the round takes. A model, not a "
        f"measurement: {links.network_bandwidth / 1e9:g} GB/s of network, {links.nvlink_bandwidth / 1e9:g} GB/s inside "
        f"a node.</p>",
        _render_chart(seconds, 0.0, "ms", INTRANODE_COLOUR, [(0, "")], unit="ms"),
        "</html>",
    ]
    return "\n".join(parts)


def _shade(colour: Colour, amount: float) -> str:
    """Blend from nearly white (0) to the colour (1)."""
    red, green, blue = (round(245 + (part - 245) * amount) for part in colour)
    return f"#{red:02x}{green:02x}{blue:02x}"


def _render_map(report: CostReport) -> str:
    nodes = len(report.node_matrix)
    step = -(-nodes // CELLS)
    edges = range(0, nodes, step)
    local = np.add.reduceat(np.diag(report.node_matrix), edges)
    total = np.add.reduceat(np.add.reduceat(report.node_matrix, edges, axis=0), edges, axis=1)
    remote = total - np.diag(local)
    max_remote, max_local = remote.max() or 1.0, local.max() or 1.0
    size = SIDE / len(total)
    lasts = [min(nodes, first + step) - 1 for first in edges]
    labels = [f"node {a}" if a == b else f"nodes {a}-{b}" for a, b in zip(edges, lasts, strict=True)]
    cells = []
    for i, row in enumerate(remote):
        for j, value in enumerate(row):
            x, y = LABEL_WIDTH + j * size, 20 + i * size
            title, colour = f"{labels[i]} to {labels[j]}: {format_bytes(value)}", NETWORK_COLOUR
            amount = (value / max_remote) ** 0.5  # keeps small values visible
            if i == j and not value:
                title, colour = f"inside of {labels[i]}: {format_bytes(local[i])}", INTRANODE_COLOUR
                amount = (local[i] / max_local) ** 0.5
            cells.append(
                f"<rect x='{x:.1f}' y='{y:.1f}' width='{size:.1f}' height='{size:.1f}' fill='{_shade(colour, amount)}'>"
                f"<title>{title}</title></rect>"
            )
    plan, rank_map, lines = report.plan, report.plan.rank_map, []
    unit = rank_map.ranks_per_node * step
    sides = (plan.train.stage_ranks, True, rank_map.train), (plan.engine.tp, False, rank_map.engine)
    for ranks, is_row, side_ranks in sides:
        if ranks < unit:
            continue  # several share each cell
        for number, first in enumerate(side_ranks[::ranks].tolist()):
            if not _is_contiguous(side_ranks[number * ranks : (number + 1) * ranks]):
                continue
            at = first / unit * size
            x, y = (LABEL_WIDTH, 20 + at) if is_row else (LABEL_WIDTH + at, 20)
            lines.append(f"<path d='M{x:.1f} {y:.1f}{'h' if is_row else 'v'}{SIDE}' stroke='#888' stroke-width='.5'/>")
            space = ranks / unit * size
            if is_row and space >= 11:
                lines.append(
                    f"<text x='{LABEL_WIDTH - 6}' y='{y + space / 2 + 4:.1f}' text-anchor='end'>stage {number}</text>"
                )
            if not is_row and space >= 16:
                word = f"engine {number}" if space >= 60 else str(number)
                lines.append(f"<text x='{x + space / 2:.1f}' y='14' text-anchor='middle'>{word}</text>")
    width = LABEL_WIDTH + SIDE + 10
    return f"<svg viewBox='0 0 {width} {SIDE + 30}' width='{width}'>{''.join(cells + lines)}</svg>"


def _stage_marks(report: CostReport) -> list[tuple[int, str]]:
    train, ranks = report.plan.train, report.plan.rank_map.train
    use_short_labels = train.pp > 8  # long labels would overlap
    stage_ranks = np.split(ranks, train.pp)
    if not all(map(_is_contiguous, stage_ranks)):
        return [(0, "")]
    firsts = sorted((int(members[0]), stage) for stage, members in enumerate(stage_ranks))
    return [(first, f"{stage}" if use_short_labels and stage else f"stage {stage}") for first, stage in firsts]


def _is_contiguous(ranks: np.ndarray) -> bool:
    return bool((np.diff(ranks) == 1).all())


def _render_chart(
    values: Floats, lower_bound: float, name: str, colour: Colour, marks: list[tuple[int, str]], unit: str = ""
) -> str:
    """Render one column per value, and a dashed line at `lower_bound`. marks: (first index, label) of sections."""

    def format_value(value: float) -> str:
        return f"{value:.3g} {unit}" if unit else format_bytes(value)

    maximum = max(float(values.max()), lower_bound) or 1.0
    step = (WIDTH - LABEL_WIDTH) / len(values)
    columns = "".join(
        f"V{HEIGHT - value / maximum * (HEIGHT - 20):.1f}H{LABEL_WIDTH + index * step:.1f}"
        for index, value in enumerate(values, 1)
    )
    bars = [f"<path d='M{LABEL_WIDTH} {HEIGHT}{columns}V{HEIGHT}Z' fill='{_shade(colour, 0.7)}'/>"]
    for level, dash, word in ((lower_bound, "6 3", "least"), (float(values.mean()), "1 3", "mean")):
        if level:
            y = HEIGHT - level / maximum * (HEIGHT - 20)
            bars.append(
                f"<path d='M{LABEL_WIDTH} {y:.1f}H{WIDTH}' stroke='#000' stroke-dasharray='{dash}'>"
                f"<title>{word}: {format_value(level)}</title></path>"
            )
    space = (marks[1][0] - marks[0][0] if len(marks) > 1 else len(values)) * step
    for first, label in marks:
        x = LABEL_WIDTH + first * step
        bars.append(f"<path d='M{x:.1f} {HEIGHT}v6' stroke='#888'/>")
        if space >= 42:
            bars.append(f"<text x='{x + 2:.1f}' y='{HEIGHT + 16}'>{label}</text>")
    bars.append(f"<text x='{LABEL_WIDTH - 6}' y='24' text-anchor='end'>{format_value(maximum)}</text>")
    bars.append(f"<text x='{LABEL_WIDTH}' y='11'>{name}</text>")
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT + 22}' width='{WIDTH}'>{''.join(bars)}</svg>"


def _render_busiest(report: CostReport, count: int = 8) -> str:
    ranks_per_node = report.plan.assignment.ranks_per_node
    columns = {
        f"{verb} {where}": values
        for where, bytes_ in (("over the network", report.network), ("in the node", report.inside))
        for verb, values in zip(("sent", "received"), bytes_.sum(1), strict=True)
    }
    order = np.argsort(-(columns["sent over the network"] + columns["sent in the node"]), kind="stable")[:count]
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in ("GPU", "stage", "node", "engine", *columns)) + "</tr>"]
    for rank in order.tolist():
        stage, engine = stage_of(report.plan, rank), report.plan.rank_map.engine_rank(rank)
        cells = (rank, stage, rank // ranks_per_node, None if engine is None else engine // report.plan.engine.tp)
        values = ["-" if cell is None else str(cell) for cell in cells]
        values += [format_bytes(column[rank]) for column in columns.values()]
        rows.append("<tr>" + "".join(f"<td>{value}</td>" for value in values) + "</tr>")
    return f"<table>{''.join(rows)}</table>"
