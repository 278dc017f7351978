"""A weight sync's plan lets no rank wait for ever, and the check of it finds faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from small_configs import DEEPSEEK_V3

from megarl.rehearse import sync_order
from megarl.rehearse.sync_order import SyncRun, Transfer
from megarl.reshard.plan.layout import EngineLayout, TrainLayout, even_stages
from megarl.reshard.plan.planner import ReshardPlan

pytestmark = pytest.mark.alone

Messages = dict[int, list[Transfer]]


def make_plan(tp: int = 2, wire: Any = "fp8") -> ReshardPlan:
    train = TrainLayout(8, tp, 2, even_stages(3, 2))
    return ReshardPlan(DEEPSEEK_V3, train, EngineLayout(2, 2), 4, 4 << 20, wire)


@pytest.fixture(scope="module")
def plan() -> ReshardPlan:
    return make_plan()


def transfers_of(plan: ReshardPlan) -> Messages:
    return {
        rank: sync_order.list_scale_exchanges(plan, rank) + sync_order.list_transfers(plan, rank)
        for rank in plan.rank_map.participants
    }


def test_a_plan_has_no_problems(plan: ReshardPlan) -> None:
    assert sync_order.check_sync(plan) == []
    transfers = transfers_of(plan)
    assert sync_order.check_transfers(transfers) == []
    assert {transfer.round for own in transfers.values() for transfer in own} >= set(range(plan.rounds))


def test_messages_are_as_large_as_the_executors(plan: ReshardPlan) -> None:
    """The sizes are computed without the executor's layout of a buffer."""
    from megarl.reshard.run.executor import Executor

    for rank in plan.rank_map.participants:
        rounds = Executor(plan, rank, 1, lambda size: pytest.fail("allocates")).prepared_rounds
        laid_out = [
            (number, message.peer, is_send, message.end - message.begin, message.end - message.hashes)
            for number, step in enumerate(rounds)
            for is_send, messages in ((False, step.receives), (True, step.sends))
            for message in messages
        ]
        assert [transfer[:5] for transfer in sync_order.list_transfers(plan, rank)] == laid_out


def exchange(number: int, source: int, target: int, nbytes: int = 64) -> Messages:
    sizes = nbytes, 16, 7
    return {source: [Transfer(number, target, True, *sizes)], target: [Transfer(number, source, False, *sizes)]}


def test_a_missing_receive_is_found() -> None:
    transfers = exchange(0, 0, 1)
    transfers[1].clear()
    assert sync_order.check_transfers(transfers) == [
        "round 0: the message from rank 0 to rank 1 is sent, but not received"
    ]


def test_a_missing_send_is_found() -> None:
    transfers = exchange(3, 0, 1)
    transfers[0].clear()
    assert sync_order.check_transfers(transfers) == [
        "round 3: the message from rank 0 to rank 1 is received, but not sent"
    ]


def change(transfers: Messages, rank: int, **fields: Any) -> None:
    transfers[rank][0] = transfers[rank][0]._replace(**fields)


def test_other_bytes_are_found() -> None:
    transfers = exchange(0, 0, 1)
    change(transfers, 1, nbytes=48)
    (problem,) = sync_order.check_transfers(transfers)
    assert problem == "round 0: the message from rank 0 to rank 1 has 64 bytes, but its receive 48"


def test_another_order_of_pieces_is_found() -> None:
    transfers = exchange(0, 0, 1)
    change(transfers, 1, contents=8)
    (problem,) = sync_order.check_transfers(transfers)
    assert (
        problem == "round 0: the message from rank 0 to rank 1 has other pieces than its receive, or in another order"
    )


def test_another_round_is_found() -> None:
    transfers = exchange(0, 0, 1)
    change(transfers, 1, round=1)
    assert len(sync_order.check_transfers(transfers)) == 2


def test_rounds_in_another_order_are_found() -> None:
    transfers = {
        rank: first + second
        for (rank, first), second in zip(exchange(1, 0, 1).items(), exchange(0, 0, 1).values(), strict=True)
    }
    problems = sync_order.check_transfers(transfers)
    assert problems == [f"rank {rank} comes to round 0 after round 1" for rank in (0, 1)]


def test_two_messages_to_a_peer_in_a_round_are_found() -> None:
    transfers = exchange(0, 0, 1)
    transfers[0] *= 2
    assert sync_order.check_transfers(transfers) == [
        "round 0: the message from rank 0 to rank 1 is sent more than once"
    ]


def drop_operation(operation: int) -> Callable[[Any], Any]:
    """Return a change of a layer's table that leaves out the last piece of an operation."""

    def drop(table: Any) -> Any:
        pieces = (table.operation == operation).nonzero()[0]
        chosen = [index for index in range(len(table.cell)) if not len(pieces) or index != pieces[-1]]
        return type(table)(*(column[chosen] for column in table))

    return drop


def swap_pieces(table: Any) -> Any:
    """Exchange the first two pieces that are received, if both are of one message and of equal size."""
    order = list(range(len(table.cell)))
    same = (table.operation[:-1] == 0) & (table.operation[1:] == 0) & (table.peer[1:] == table.peer[:-1])
    same &= table.block_round[1:] == table.block_round[:-1]
    for index in same.nonzero()[0][:1].tolist():
        order[index], order[index + 1] = index + 1, index
    return type(table)(*(column[order] for column in table))


@pytest.mark.parametrize(
    ("fault", "problem"),
    [(drop_operation(0), "bytes"), (drop_operation(1), "bytes"), (swap_pieces, "in another order")],
    ids=["receive", "send", "order"],
)
def test_a_rank_that_deviates_is_found(
    plan: ReshardPlan, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], Any], problem: str
) -> None:
    class FaultyRankPlan(sync_order.RankPlan):
        def _table(self, *arguments: Any) -> Any:
            table = super()._table(*arguments)
            return fault(table) if self.rank == 5 else table

    monkeypatch.setattr(sync_order, "RankPlan", FaultyRankPlan)
    problems = sync_order.check_sync(plan)
    assert problems and all("rank 5" in line for line in problems)
    assert any(problem in line for line in problems)


# --- records


def record(batches: list[list[Transfer]]) -> list[dict[str, Any]]:
    """Return what the executor records when it posts these batches."""
    call = {"do": "post", "group": "WORLD", "calls": "megarl/reshard/run/executor.py:500 < x.py:1"}
    kinds = {True: "send", False: "receive"}
    posts = [
        call | {"kind": kinds[transfer.is_send], "peer": transfer.peer, "bytes": transfer.nbytes, "batch": number}
        for number, batch in enumerate(batches)
        for transfer in batch
    ]
    posts.append(call | {"kind": "all_reduce", "peer": None, "bytes": 8, "batch": None, "calls": "other.py:1"})
    return [event | {"op": number} for number, event in enumerate(posts)]


def test_a_record_of_the_plan_has_no_problems(plan: ReshardPlan) -> None:
    runs = [SyncRun(plan), SyncRun(plan, only_hashes=True)]
    events = record(sync_order.planned_batches(runs, 1))
    assert sync_order.check_record(events, runs, 1) == []
    assert [event["kind"] for event in sync_order.without_transfers(events)] == ["all_reduce"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda batches: batches.pop(), "batches of transfers, not"),
        (lambda batches: batches[1].pop(), "transfers"),
        (lambda batches: batches[1].reverse(), "batch 1 of the weight sync on rank 1"),
        (lambda batches: batches[1].append(batches[1].pop()._replace(nbytes=1)), ", 1)"),
    ],
    ids=["batch", "transfer", "order", "bytes"],
)
def test_a_record_that_differs_from_the_plan_is_found(
    plan: ReshardPlan, change: Callable[[list[list[Transfer]]], Any], problem: str
) -> None:
    runs = [SyncRun(plan)]
    batches = sync_order.planned_batches(runs, 1)
    change(batches)
    (line,) = sync_order.check_record(record(batches), runs, 1)
    assert problem in line


def test_a_comparison_sends_hashes_alone(plan: ReshardPlan) -> None:
    whole, hashes = (sync_order.planned_batches([SyncRun(plan, only_hashes)], 0) for only_hashes in (False, True))
    assert [[transfer.peer for transfer in batch] for batch in whole] == [
        [transfer.peer for transfer in batch] for batch in hashes
    ]
    assert all(transfer.nbytes == transfer.hash_bytes for batch in hashes for transfer in batch if transfer.round >= 0)


def test_split_blocks_cost_an_exchange_of_scales() -> None:
    """With tp=4, MLA's 192 rows of a head are no whole blocks of 128."""
    exchanges = sync_order.list_scale_exchanges(make_plan(tp=4), 0)
    assert {transfer.peer for transfer in exchanges} == {1, 2, 3}
    assert {transfer.round for transfer in exchanges} == {sync_order.DENSE_SCALES}
    assert sync_order.list_scale_exchanges(make_plan(tp=4, wire="bf16"), 0) == []
