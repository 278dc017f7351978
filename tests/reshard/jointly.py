"""How little a plan's busiest rank can send, by linear programming: for tests.

Who may do what is as in `reshard/bound.py`, whose sets of ranks it judges; whoever may do a job may do any part of it.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from megarl.models.layout import HFConfig
from megarl.reshard.bound import Bools, Ints, members, whole
from megarl.reshard.layout import EngineLayout, TrainLayout


def least_sent(hf: HFConfig, train: TrainLayout, engine: EngineLayout, here: int, within: float) -> float:
    """The fewest bytes that the busiest rank sends in all, where none sends more than `within` over the network."""
    jobs: list[tuple[Ints, float, bool]] = []  # ranks, bytes, whether over the network

    def add(first: Ints, able: Bools, weight: Ints, far: bool) -> None:
        table = np.concatenate([first[:, None], able], axis=1)[weight > 0]
        if len(table):
            different, same = np.unique(table, axis=0, return_inverse=True)
            total = np.bincount(same.ravel(), weight[weight > 0])
            jobs.extend(
                (row[0] + np.flatnonzero(row[1:]), float(t), far) for row, t in zip(different, total, strict=True)
            )

    for member in members(hf, train, engine, here, "bf16"):
        holds, needs = whole(member.columns, member.stage, train, engine)
        weight = member.columns.weight
        held, lacks = (m.reshape(train.world // here, here, -1) for m in (holds, needs & ~holds))
        copies, there = lacks.sum(1), held.any(1)
        enters = (copies > 0) & ~there
        first = np.full(len(weight), member.stage * train.stage_ranks)
        add(first, member.columns.holds.T, weight * enters.sum(0), True)
        node, atom = np.nonzero(enters)
        add(node * here, lacks[node, :, atom], weight[atom] * (copies[node, atom] - 1), False)
        node, atom = np.nonzero((copies > 0) & there)
        add(node * here, held[node, :, atom], weight[atom], False)
        add(node * here, (held | lacks)[node, :, atom], weight[atom] * (copies[node, atom] - 1), False)

    if not jobs:
        return 0.0
    unit = max(total for _, total, _ in jobs)  # of bytes, so that numbers are near 1
    job = np.repeat(np.arange(len(jobs)), [len(ranks) for ranks, _, _ in jobs])
    rank = np.concatenate([ranks for ranks, _, _ in jobs])
    far = np.array([far for _, _, far in jobs])[job]
    count, world = len(job), train.world
    # Unknown: the bytes of each job that each of its ranks does, and, last, what the busiest sends.
    each = coo_matrix((np.ones(count), (job, np.arange(count))), shape=(len(jobs), count + 1))
    rows = np.concatenate([rank, world + rank[far], np.arange(world)])
    columns = np.concatenate([np.arange(count), np.flatnonzero(far), np.full(world, count)])
    values = np.concatenate([np.ones(count + far.sum()), np.full(world, -1.0)])
    sent = coo_matrix((values, (rows, columns)), shape=(2 * world, count + 1))
    most = np.repeat([0.0, min(within, 1e18) / unit], world)
    cost = np.zeros(count + 1)
    cost[-1] = 1.0
    found = linprog(cost, sent, most, each, np.array([total / unit for _, total, _ in jobs]), method="highs")
    assert found.success, found.message
    return float(found.fun) * unit
