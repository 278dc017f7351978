"""How low a plan's busiest rank can come in two respects at once, by linear programming: for tests.

The bounds of `send` and of `nic_send` are of one respect each. A rank that has to send much inside of its node should
send less over the network, which then others have to: both bounds at once may be out of reach.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from megarl.models.layout import HFConfig
from megarl.reshard.bound import Bools, Bound, Ints, members, whole
from megarl.reshard.layout import EngineLayout, TrainLayout


def least_of_both(hf: HFConfig, train: TrainLayout, engine: EngineLayout, here: int, least: Bound) -> float:
    """The smallest z with which every rank can send at most z * least.send in all and z * least.nic_send over the
    network. Who may do what is as in `reshard/bound.py`; whoever may do a job may do any fraction of it."""
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

    unit = least.send  # of bytes, so that numbers are near 1
    job = np.repeat(np.arange(len(jobs)), [len(ranks) for ranks, _, _ in jobs])
    rank = np.concatenate([ranks for ranks, _, _ in jobs])
    far = np.array([far for _, _, far in jobs])[job]
    count, world = len(job), train.world
    each = coo_matrix((np.ones(count), (job, np.arange(count))), shape=(len(jobs), count + 1))
    rows = np.concatenate([rank, world + rank[far], np.arange(2 * world)])
    columns = np.concatenate([np.arange(count), np.flatnonzero(far), np.full(2 * world, count)])
    levels = np.repeat([-1.0, -least.nic_send / unit], world)
    values = np.concatenate([np.ones(count + far.sum()), levels])
    most = coo_matrix((values, (rows, columns)), shape=(2 * world, count + 1))
    cost = np.zeros(count + 1)
    cost[-1] = 1.0
    found = linprog(
        cost, most, np.zeros(2 * world), each, np.array([total / unit for _, total, _ in jobs]), method="highs"
    )
    assert found.success, found.message
    return float(found.fun)
