"""Checks of a weight sync's transfers, which differ from rank to rank: of the plan for all ranks, and of records.

Every rank goes through the same rounds, and in each exchanges at most one message with each peer, all at once. So the
ranks neither block each other nor mix messages up if every send has a receive of the same pieces in the same round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from megarl.config import Config
from megarl.controllers.controller import load_requirements
from megarl.engine.engine_backends import plan_from_config
from megarl.models.registry import load_hf_config
from megarl.parallel.placement import role_parallel, split_role
from megarl.parallel.policy_configs import policy_config, syncs_adapters
from megarl.reshard.plan.planner import FORWARD_SEND, LOCAL, SEND, RankPlan, ReshardPlan, align
from megarl.reshard.run.executor import find_quantised_params
from megarl.reshard.run.scale_grids import shard_ranks, shared_grids

DENSE_SCALES, EXPERT_SCALES = -2, -1
"""Numbers of the rounds before the first, in which ranks that share FP8 blocks exchange their maxima."""
_HASH_BYTES = 8
_PRIMES = 0x1E3779B97F4A7C15, 0x42B2AE3D27D4EB4F, 0x165667B19E3779F9  # of digests, which wrap around
_EXECUTOR = "megarl/reshard/run/executor.py:"
MAX_PROBLEMS = 20


class Transfer(NamedTuple):
    """A message that a rank sends to a peer or receives from it.

    nbytes: of the message. hash_bytes: of these, the hashes of its pieces, which alone are sent for a comparison.
    contents: digest of its pieces in their order.
    """

    round: int
    peer: int
    is_send: bool
    nbytes: int
    hash_bytes: int = 0
    contents: int = 0


class _Messages(NamedTuple):
    """The messages of one layer of a group, without hashes, by round within the block, direction and peer; arrays."""

    block_round: np.ndarray
    is_send: np.ndarray
    peer: np.ndarray
    num_pieces: np.ndarray
    nbytes: np.ndarray
    contents: np.ndarray


def _tabulate(plan: ReshardPlan, rank: int) -> dict[tuple[int, int], _Messages]:
    """Return a rank's messages by group and number of parts."""
    row_bytes = plan.assignment.byte_index.row_bytes
    result = {}
    for key, table in RankPlan(plan, rank).tables.items():
        block_round, operation, peer, cell, r0, r1 = (column[table.operation != LOCAL] for column in table)
        is_send = np.isin(operation, (SEND, FORWARD_SEND))
        order = np.lexsort((operation, peer, is_send, block_round))  # stable: pieces stay in order, forwarded ones last
        heads = np.stack([block_round, is_send, peer])[:, order]
        is_first = np.concatenate([[True], (heads[:, 1:] != heads[:, :-1]).any(axis=0)])[: len(order)]
        starts = np.flatnonzero(is_first)
        position = np.arange(len(order)) - starts[np.cumsum(is_first) - 1]
        pieces = (cell * _PRIMES[0] + r0 * _PRIMES[1] + r1 * _PRIMES[2])[order]
        digests = (pieces ^ pieces >> 29) * (2 * position + 1)
        columns = np.ones_like(cell), align((r1 - r0) * row_bytes[cell])[order], digests
        result[key] = _Messages(*heads[:, starts], *(np.add.reduceat(column, starts) for column in columns))
    return result


def list_transfers(plan: ReshardPlan, rank: int) -> list[Transfer]:
    """Return what a rank sends and receives in all rounds, in the executor's order: in each round the receives and then
    the sends, by peer. Without `contents`."""
    messages: dict[tuple[int, int, int], dict[tuple[bool, int], tuple[int, int]]] = {}
    for (group, cut), columns in _tabulate(plan, rank).items():
        for block_round, is_send, peer, *sizes in zip(*(column.tolist() for column in columns[:5]), strict=True):
            messages.setdefault((group, cut, block_round), {})[bool(is_send), peer] = tuple(sizes)
    transfers: list[Transfer] = []
    for number in range(plan.rounds):
        sizes_by_peer: dict[tuple[bool, int], list[int]] = {}
        for block, i in plan.blocks_in_round(number):
            for group, _ in block.members:
                for key, (num_pieces, nbytes) in messages.get((group, block.num_parts, i), {}).items():
                    total = sizes_by_peer.setdefault(key, [0, 0])
                    total[0] += num_pieces
                    total[1] += nbytes
        for (is_send, peer), (num_pieces, nbytes) in sorted(sizes_by_peer.items()):
            hash_bytes = align(_HASH_BYTES * num_pieces)
            transfers.append(Transfer(number, peer, is_send, nbytes + hash_bytes, hash_bytes))
    return transfers


def list_scale_exchanges(plan: ReshardPlan, rank: int) -> list[Transfer]:
    """Return the exchanges of FP8 scales that precede the rounds on a rank."""
    trainer_rank = plan.train.trainer_rank(rank)
    if plan.assignment.wire != "fp8" or trainer_rank is None:
        return []
    transfers = []
    for expert, shapes in shared_grids(find_quantised_params(plan, rank), plan.train).items():
        nbytes = 4 * sum(rows * columns for rows, columns in shapes.values())
        others = plan.rank_map.train[list(shard_ranks(plan.train, trainer_rank, expert))].tolist()
        number = EXPERT_SCALES if expert else DENSE_SCALES
        for is_send in (False, True) if shapes else ():
            transfers += [Transfer(number, peer, is_send, nbytes) for peer in others if peer != rank]
    return transfers


def check_syncs(config: Config) -> list[str]:
    """Check the plans of all weight syncs of a configuration, see `check_sync`."""
    requirements = load_requirements(config)
    problems = []
    for role in requirements.roles if requirements.trained_roles else ():
        base, policy = split_role(role)
        actor = f"actor_{policy}" if policy else "actor"
        if base != "rollout" or actor not in requirements.trained_roles:
            continue
        own = policy_config(config, role)
        parallel = replace(role_parallel(own, "actor"), world_size=config.parallel.world_size)
        own = replace(own, parallel=parallel)
        for adapters in (True, False) if syncs_adapters(own) else (False,):
            problems += check_sync(plan_from_config(load_hf_config(own.model.path), own, adapters))
    return problems


def check_sync(plan: ReshardPlan) -> list[str]:
    """Check the transfers of all ranks; return one line for each problem, at most `MAX_PROBLEMS`.

    A message of a round has the layers of all blocks in it, in the same order on both sides. So every layer is checked
    as if it had rounds of its own, and of layers that are alike, the first.
    """
    names = {
        (group, block.num_parts, i): f"round {block.first_round + i}, layer {layer}"
        for block in reversed(plan.round_blocks)
        for group, layer in reversed(block.members)
        for i in range(block.rounds)
    }
    numbers = {key: number for number, key in enumerate(names)}
    rows = []
    for rank in plan.rank_map.participants:
        rows.append(_to_rows(rank, list_scale_exchanges(plan, rank)))
        for (group, cut), messages in _tabulate(plan, rank).items():
            _, is_send, peer, num_pieces, nbytes, contents = messages
            number = np.array([numbers[group, cut, i] for i in messages.block_round.tolist()], dtype=np.int64)
            columns = (number, peer, is_send, nbytes, align(_HASH_BYTES * num_pieces), contents)
            rows.append(np.stack([np.full(len(peer), rank), *columns], axis=1))
    scale_names = {DENSE_SCALES: "dense scales", EXPERT_SCALES: "scales of experts"}
    return _check_rows(np.concatenate(rows), dict(enumerate(names.values())) | scale_names)


def check_transfers(transfers: Mapping[int, Sequence[Transfer]]) -> list[str]:
    """Check what ranks send and receive, by rank, in the order of the rounds; return one line for each problem, at most
    `MAX_PROBLEMS`."""
    problems = [
        f"rank {rank} comes to round {after.round} after round {before.round}"
        for rank, own in transfers.items()
        for before, after in pairwise(own)
        if before.round > after.round
    ]
    rows = np.concatenate([_to_rows(rank, own) for rank, own in transfers.items()])
    return (problems + _check_rows(rows, {}))[:MAX_PROBLEMS]


def _to_rows(rank: int, transfers: Sequence[Transfer]) -> np.ndarray:
    """Return [N, 7] int64: rank, then the fields of each transfer."""
    return np.array([(rank, *transfer) for transfer in transfers], dtype=np.int64).reshape(-1, 7)


def _check_rows(rows: np.ndarray, names: Mapping[int, str]) -> list[str]:
    """Check that every send has one receive. rows: of all ranks, see `_to_rows`. names: of rounds."""
    ends = []
    for is_send in (True, False):
        rank, number, peer, _, *rest = rows[(rows[:, 3] == 1) == is_send].T
        end = np.stack([number, rank, peer, *rest] if is_send else [number, peer, rank, *rest], axis=1)
        ends.append(end[np.lexsort(end[:, 2::-1].T)])
    sends, receives = ends
    problems = []
    for end, what in ((sends, "sent"), (receives, "received")):
        is_repeated = (end[1:, :3] == end[:-1, :3]).all(axis=1)
        for number, source, target in end[1:][is_repeated][:MAX_PROBLEMS, :3].tolist():
            problems.append(f"{_name_message(number, source, target, names)} is {what} more than once")
    if problems or np.array_equal(sends, receives):
        return problems[:MAX_PROBLEMS]
    sent, received = ({tuple(row[:3]): row[3:] for row in end.tolist()} for end in ends)
    for key in sorted(sent.keys() | received.keys()):
        send, receive = sent.get(key), received.get(key)
        number, source, target = key
        where = _name_message(number, source, target, names)
        if receive is None:
            problems.append(f"{where} is sent, but not received")
        elif send is None:
            problems.append(f"{where} is received, but not sent")
        elif send[:2] != receive[:2]:
            problems.append(f"{where} has {send[0]} bytes, but its receive {receive[0]}")
        elif send != receive:
            problems.append(f"{where} has other pieces than its receive, or in another order")
    return problems[:MAX_PROBLEMS]


def _name_message(number: int, source: int, target: int, names: Mapping[int, str]) -> str:
    return f"{names.get(number, f'round {number}')}: the message from rank {source} to rank {target}"


class SyncRun(NamedTuple):
    """A pass of the executor. only_hashes: it compares, and sends the hashes of all pieces alone."""

    plan: ReshardPlan
    only_hashes: bool = False


def planned_batches(runs: Iterable[SyncRun], rank: int) -> list[list[Transfer]]:
    """Return what a rank posts at once, one after the other, in a weight sync of these passes."""
    batches: list[list[Transfer]] = []
    for plan, only_hashes in runs:
        numbered: dict[int, list[Transfer]] = {}
        for transfer in list_scale_exchanges(plan, rank) + list_transfers(plan, rank):
            if only_hashes and transfer.round >= 0:
                transfer = transfer._replace(nbytes=transfer.hash_bytes)
            numbered.setdefault(transfer.round, []).append(transfer)
        batches += numbered.values()
    return batches


def without_transfers(events: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return a record without the transfers of weight syncs, and the waits for them."""
    events = list(events)
    transfers = {event["op"] for event in events if _is_transfer(event)}
    return [event for event in events if event["op"] not in transfers]


def _is_transfer(event: Mapping[str, Any]) -> bool:
    return event["do"] == "post" and bool(event["calls"].startswith(_EXECUTOR))


def recorded_batches(events: Iterable[Mapping[str, Any]]) -> list[list[Transfer]]:
    """Return what a rank's weight syncs have posted at once, by its record (`CommRecorder.events`)."""
    batches: dict[Any, list[Transfer]] = {}
    for event in events:
        if _is_transfer(event):
            number = len(batches) if event["batch"] not in batches else batches[event["batch"]][0].round
            transfer = Transfer(number, event["peer"], event["kind"] == "send", event["bytes"])
            batches.setdefault(event["batch"], []).append(transfer)
    return list(batches.values())


def check_record(events: Iterable[Mapping[str, Any]], runs: Iterable[SyncRun], rank: int) -> list[str]:
    """Compare the record of a rank's weight sync with the plan; return one line for each problem."""
    planned, recorded = planned_batches(runs, rank), recorded_batches(events)
    problems = []
    for number, (plan, record) in enumerate(zip(planned, recorded, strict=False)):
        wanted, actual = ([transfer[1:4] for transfer in batch] for batch in (plan, record))
        if wanted != actual:
            first = next(
                (pair for pair in zip(wanted, actual, strict=False) if pair[0] != pair[1]),
                (f"{len(wanted)} transfers", f"{len(actual)}"),
            )
            where = f"batch {number} of the weight sync on rank {rank} (round {plan[0].round})"
            problems.append(f"{where} has {first[1]}, not {first[0]}")
    if len(planned) != len(recorded):
        problems.append(f"rank {rank} has {len(recorded)} batches of transfers, not {len(planned)}")
    return problems[:MAX_PROBLEMS]
