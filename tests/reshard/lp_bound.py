"""The least that a plan's busiest rank can send, by linear programming.

`megarl/reshard/README.md` defines which ranks may do which job; any of them may do any part of it.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from megarl.models.layout_algebra import HFConfig
from megarl.reshard.plan.bound import Bools, Ints, expand_to_ranks, list_layer_columns
from megarl.reshard.plan.layout import EngineLayout, TrainLayout, build_rank_map


def least_sent(hf: HFConfig, train: TrainLayout, engine: EngineLayout, node_size: int, within: float) -> float:
    """Return the least total bytes of the busiest sender if no rank sends more than `within` over the network."""
    job_bytes: dict[tuple[bool, tuple[int, ...]], float] = {}  # by (over the network, eligible ranks)

    def add(first: Ints, eligible: Bools, weight: Ints, over_network: bool) -> None:
        table = np.concatenate([first[:, None], eligible], axis=1)[weight > 0]
        if len(table):
            unique_rows, inverse = np.unique(table, axis=0, return_inverse=True)
            total = np.bincount(inverse.ravel(), weight[weight > 0])
            for row, bytes_ in zip(unique_rows, total.tolist(), strict=True):
                job = over_network, tuple((row[0] + np.flatnonzero(row[1:])).tolist())
                job_bytes[job] = job_bytes.get(job, 0.0) + bytes_

    sides = build_rank_map(train, engine, node_size)
    node_size = sides.ranks_per_node
    for member in list_layer_columns(hf, train, engine, "bf16"):
        holds, is_needed = expand_to_ranks(member.columns, member.stage, train, engine, sides)
        weight = member.columns.weight
        is_retained, missing = (
            m.reshape(sides.world // node_size, node_size, len(weight)) for m in (holds, is_needed & ~holds)
        )
        copies, is_present = missing.sum(1), is_retained.any(1)
        is_entering = (copies > 0) & ~is_present
        add(np.zeros(len(weight), np.int64), holds.T, weight * is_entering.sum(0), True)
        node, atom = np.nonzero(is_entering)
        add(node * node_size, missing[node, :, atom], weight[atom] * (copies[node, atom] - 1), False)
        node, atom = np.nonzero((copies > 0) & is_present)
        add(node * node_size, is_retained[node, :, atom], weight[atom], False)
        add(node * node_size, (is_retained | missing)[node, :, atom], weight[atom] * (copies[node, atom] - 1), False)

    if not job_bytes:
        return 0.0
    unit = max(job_bytes.values())  # scales the problem to values near 1
    job = np.repeat(np.arange(len(job_bytes)), [len(ranks) for _, ranks in job_bytes])
    rank = np.concatenate([ranks for _, ranks in job_bytes])
    over_network = np.array([over_network for over_network, _ in job_bytes])[job]
    count, world = len(job), sides.world
    # Unknowns: the bytes of each job that each eligible rank sends, and last, the busiest sender's total.
    unit_rows = coo_matrix((np.ones(count), (job, np.arange(count))), shape=(len(job_bytes), count + 1))
    rows = np.concatenate([rank, world + rank[over_network], np.arange(world)])
    columns = np.concatenate([np.arange(count), np.flatnonzero(over_network), np.full(world, count)])
    values = np.concatenate([np.ones(count + over_network.sum()), np.full(world, -1.0)])
    sent = coo_matrix((values, (rows, columns)), shape=(2 * world, count + 1))
    limit = np.repeat([0.0, min(within / unit, 1e9)], world)
    cost = np.zeros(count + 1)
    cost[-1] = 1.0
    result = linprog(cost, sent, limit, unit_rows, np.array(list(job_bytes.values())) / unit, method="highs")
    assert result.success, result.message
    return float(result.fun) * unit
