"""Render a plan as one self-contained HTML page: who sends how much to whom, how busy each GPU is, and each round."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from megarl.reshard.plan.bound import Bound
from megarl.reshard.plan.cost_report import CostReport, Floats, LinkSpeeds, format_bytes, stage_of

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


def render_page(title: str, report: CostReport, bound: Bound, links: LinkSpeeds, sentences: Sequence[str]) -> str:
    """Return the HTML page. sentences: paragraphs at its top, in order."""
    has_several_nodes = len(report.node_matrix) > 1
    sent, received = report.network_out.sum(0), report.network_in.sum(0)
    scope, least_out, least_in = "over the network", bound.nic_send, bound.nic_recv
    if not has_several_nodes:
        sent, received = report.inside_out.sum(0), report.inside_in.sum(0)
        scope, least_out, least_in = "", bound.send, bound.recv
    seconds = report.round_seconds(links) * 1e3
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(sentence)}</p>" for sentence in sentences),
        "<h2>Who sends to whom</h2>",
        f"<p class='note'>{_legend(report)}</p>",
        _render_map(report) if has_several_nodes else "<p>There is one node: nothing leaves it.</p>",
        f"<h2>Each GPU's bytes {scope}</h2>",
        "<p class='note'>GPUs in order, the stages behind one another. Dashed: the least that is possible for the "
        "busiest one; dotted: the mean.</p>",
        _render_chart(sent, least_out, f"sent {scope}", NETWORK_COLOUR, _stage_marks(report)),
        _render_chart(received, least_in, f"received {scope}", NETWORK_COLOUR, _stage_marks(report)),
        "<h2>The busiest GPUs</h2>",
        _render_busiest(report),
        "<h2>Rounds</h2>",
        "<p class='note'>Modelled milliseconds of each round: what the busiest GPU of the round takes. A model, not a "
        f"measurement: {links.network_bandwidth / 1e9:g} GB/s of network, {links.nvlink_bandwidth / 1e9:g} GB/s inside "
        "of a node.</p>",
        _render_chart(seconds, 0.0, "ms", INTRANODE_COLOUR, [(0, "")], unit="ms"),
        "</html>",
    ]
    return "\n".join(parts)


def _legend(report: CostReport) -> str:
    nodes = len(report.node_matrix)
    step = -(-nodes // CELLS)
    unit = "a node" if step == 1 else f"{step} nodes together"
    return (
        f"Rows send, columns receive; a row or column is {unit}. "
        f"{_swatch(NETWORK_COLOUR)} over the network, {_swatch(INTRANODE_COLOUR)} inside of a node; the darker, the "
        "more. Lines divide the stages of the trainer (rows) and the engines (columns). Hover for figures."
    )


def _swatch(colour: tuple[int, int, int]) -> str:
    return f"<span style='background:{_shade(colour, 0.8)}'>&emsp;</span>"


def _shade(colour: tuple[int, int, int], amount: float) -> str:
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
    cells = []
    for i, row in enumerate(remote):
        for j, value in enumerate(row):
            x, y = LABEL_WIDTH + j * size, 20 + i * size
            title, colour = (
                f"{_node_label(i, step, nodes)} to {_node_label(j, step, nodes)}: {format_bytes(value)}",
                NETWORK_COLOUR,
            )
            amount = (value / max_remote) ** 0.5  # keeps small values visible
            if i == j and not value:
                title, colour = f"inside of {_node_label(i, step, nodes)}: {format_bytes(local[i])}", INTRANODE_COLOUR
                amount = (local[i] / max_local) ** 0.5
            cells.append(
                f"<rect x='{x:.1f}' y='{y:.1f}' width='{size:.1f}' height='{size:.1f}' fill='{_shade(colour, amount)}'>"
                f"<title>{title}</title></rect>"
            )
    train, engine, ranks_per_node = report.plan.train, report.plan.engine, report.plan.assignment.ranks_per_node
    unit = ranks_per_node * step
    lines = []
    rank_map = report.plan.rank_map
    for ranks, is_row, side_ranks in ((train.stage_ranks, True, rank_map.train), (engine.tp, False, rank_map.engine)):
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
    inside = "".join(cells) + "".join(lines)
    width = LABEL_WIDTH + SIDE + 10
    return f"<svg viewBox='0 0 {width} {SIDE + 30}' width='{width}'>{inside}</svg>"


def _node_label(cell: int, step: int, nodes: int) -> str:
    first, last = cell * step, min(nodes, (cell + 1) * step) - 1
    return f"node {first}" if first == last else f"nodes {first}-{last}"


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
    values: Floats,
    lower_bound: float,
    name: str,
    colour: tuple[int, int, int],
    marks: list[tuple[int, str]],
    unit: str = "",
) -> str:
    """Render one column per value. least: drawn as a dashed line if not 0. marks: (first index, label) of each
    section."""

    def format_value(value: float) -> str:
        return f"{value:.3g} {unit}" if unit else format_bytes(value)

    maximum = max(float(values.max()), lower_bound) or 1.0
    step = (WIDTH - LABEL_WIDTH) / len(values)
    bars = []
    path = f"M{LABEL_WIDTH} {HEIGHT}"
    for index, value in enumerate(values):
        path += f"V{HEIGHT - value / maximum * (HEIGHT - 20):.1f}H{LABEL_WIDTH + (index + 1) * step:.1f}"
    bars.append(f"<path d='{path}V{HEIGHT}Z' fill='{_shade(colour, 0.7)}'/>")
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
        "sent over the network": report.network_out.sum(0),
        "received over the network": report.network_in.sum(0),
        "sent in the node": report.inside_out.sum(0),
        "received in the node": report.inside_in.sum(0),
    }
    order = np.argsort(-(columns["sent over the network"] + columns["sent in the node"]), kind="stable")[:count]
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in ("GPU", "stage", "node", "engine", *columns)) + "</tr>"]
    for rank in order.tolist():
        stage, engine = stage_of(report.plan, rank), report.plan.rank_map.engine_rank(rank)
        cells = (rank, stage, rank // ranks_per_node, None if engine is None else engine // report.plan.engine.tp)
        values = [
            *("-" if cell is None else str(cell) for cell in cells),
            *(format_bytes(column[rank]) for column in columns.values()),
        ]
        rows.append("<tr>" + "".join(f"<td>{value}</td>" for value in values) + "</tr>")
    return f"<table>{''.join(rows)}</table>"
