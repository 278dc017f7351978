"""`nccl_order` detects communication that would hang on NCCL."""

from __future__ import annotations

import pytest
from rank_record import RankRecord

from megarl.rehearse.nccl_order import InvalidCommunication, check

pytestmark = pytest.mark.alone


def make_records(count: int, first_use: bool = True) -> tuple[list[int], list[RankRecord]]:
    members = list(range(count))
    records = [RankRecord(rank) for rank in members]
    for item in records if first_use else ():
        item.post("all_reduce", members)
    return members, records


def find_faults(records: list[RankRecord]) -> str:
    with pytest.raises(InvalidCommunication) as error:
        check([item.events for item in records])
    return str(error.value)


def test_counts_valid_operations() -> None:
    members, (a, b, c) = make_records(3)
    a.batch(members, ("send", 1), ("receive", 2))
    b.batch(members, ("receive", 0), ("send", 2))
    c.batch(members, ("send", 0), ("receive", 1))
    a.post("barrier", [0, 1])
    b.post("barrier", [0, 1])
    assert check([a.events, b.events, c.events]) == {"all_reduce": 3, "send": 3, "receive": 3, "barrier": 2}


def test_rejects_partial_exchange_as_first_use_of_a_group() -> None:
    members, records = make_records(3, first_use=False)
    records[0].batch(members, ("send", 1))
    records[1].batch(members, ("receive", 0))
    assert "rank 0: the first use of the group of the ranks [0, 1, 2] is a send" in find_faults(records)
    members, records = make_records(2, first_use=False)  # all ranks of the group take part
    records[0].batch(members, ("send", 1))
    records[1].batch(members, ("receive", 0))
    check([item.events for item in records])


def test_detects_groups_used_in_different_orders() -> None:
    members, (a, b) = make_records(2)
    for item, order in ((a, "xy"), (b, "yx")):
        for name in order:
            item.post("all_reduce", members, group=name)
    assert find_faults([a, b]) == (
        "rank 0 would wait for ever for all_reduce (8 bytes, group of [0, 1]); "
        "rank 1 waits for all_reduce (8 bytes, group of [0, 1])\n"
        "rank 1 would wait for ever for all_reduce (8 bytes, group of [0, 1]); "
        "rank 0 waits for all_reduce (8 bytes, group of [0, 1])"
    )
    members, (a, b) = make_records(2)
    for item, order in ((a, "xy"), (b, "yx")):
        for number in [item.post("all_reduce", members, False, group=name) for name in order]:
            item.wait(number)
    check([a.events, b.events])  # asynchronous operations of different groups do not block each other


def test_detects_sends_that_block_each_other() -> None:
    """Gloo buffers sends; NCCL does not."""
    for host in (False, True):
        members, (a, b) = make_records(2)
        for item, peer in ((a, 1), (b, 0)):
            item.post("send", members, peer=peer, host=host)
            item.post("receive", members, peer=peer, host=host)
        if host:
            check([a.events, b.events])
        else:
            assert "rank 0 would wait for ever for send to rank 1" in find_faults([a, b])


def test_detects_mismatched_collectives() -> None:
    members, (a, b) = make_records(2)
    a.post("all_reduce", members)
    assert find_faults([a, b]) == (
        "rank 0 would wait for ever for all_reduce (8 bytes, group of [0, 1]); rank 1 has ended"
    )
    b.post("all_gather", members)
    assert "do different things at the same time" in find_faults([a, b])
    members, records = make_records(3)
    for item in records:
        item.post("broadcast", members, bytes=8 + 8 * (item.rank == 2), calls=f"file.py:{item.rank}")
    assert find_faults(records) == (
        "ranks give different numbers of bytes to a collective: "
        "rank 0 does broadcast (8 bytes, group of [0, 1, 2], called by file.py:0), "
        "rank 2 does broadcast (16 bytes, group of [0, 1, 2], called by file.py:2)"
    )


def test_detects_mismatched_batches() -> None:
    """A batch is one operation, so rank 0's two sends cannot match two batches with a collective between them."""
    members, (a, b) = make_records(2)
    a.batch(members, ("send", 1), ("send", 1))
    b.batch(members, ("receive", 0))
    b.post("all_reduce", members)
    b.batch(members, ("receive", 0))
    a.post("all_reduce", members)
    assert "would wait for ever" in find_faults([a, b])
    members, (a, b) = make_records(2)
    a.batch(members, ("send", 1))
    b.batch(members, ("receive", 0))
    a.events[-2]["bytes"] = 16
    assert "rank 0 gives send to rank 1 (16 bytes" in find_faults([a, b])


def test_detects_deadlock_between_host_and_device_groups() -> None:
    members, (a, b) = make_records(2)
    a.post("barrier", members, host=True, group="host")
    a.post("all_reduce", members)
    b.post("all_reduce", members)
    b.post("barrier", members, host=True, group="host")
    assert "rank 0 would wait for ever for barrier" in find_faults([a, b])


def test_detects_a_missing_wait() -> None:
    members, (a, b) = make_records(2)
    a.batch(members, ("send", 1), wait=False)
    b.batch(members, ("receive", 0))
    assert find_faults([a, b]) == "rank 0: nobody has waited for send to rank 1 (8 bytes, group of [0, 1])"


def test_detects_parts_of_an_all_to_all_that_differ() -> None:
    members, (a, b) = make_records(2)
    a.post("all_to_all_single", members, sends=[0, 8], receives=[0, 4])
    b.post("all_to_all_single", members, sends=[4, 0], receives=[8, 0])
    assert check([a.events, b.events])["all_to_all_single"] == 2
    a.post("all_to_all_single", members, sends=[0, 8], receives=[0, 4])
    b.post("all_to_all_single", members, sends=[4, 0], receives=[12, 0])
    assert "rank 0 sends 8 bytes to rank 1, which receives 12" in find_faults([a, b])


def test_detects_messages_that_nobody_receives() -> None:
    members, (a, b) = make_records(2)
    for _ in range(2):
        a.post("send", members, host=True, peer=1)
    b.post("receive", members, host=True, peer=0)
    assert "rank 1 never receives 1 of the messages that rank 0 sends it" in find_faults([a, b])


def test_counts_each_message_of_a_host_batch() -> None:
    members, (a, b) = make_records(2)
    a.batch(members, ("send", 1), ("send", 1), host=True)
    b.batch(members, ("receive", 0), ("receive", 0), host=True)
    check([a.events, b.events])
    b.batch(members, ("receive", 0), host=True)
    assert "rank 1 would wait for ever for receive from rank 0" in find_faults([a, b])


def test_names_what_blocks_an_operation() -> None:
    members, (a, b, c) = make_records(3)
    b.post("all_reduce", [1, 2])
    c.post("all_reduce", [1, 2])
    (send,) = a.batch(members, ("send", 1), wait=False)
    a.post("barrier", members)
    a.wait(send)
    b.post("all_reduce", [1, 2], calls="late.py:3")
    b.batch(members, ("receive", 0))
    b.post("barrier", members)
    c.post("barrier", members)
    send_text, barrier = "send to rank 1 (8 bytes, group of [0, 1, 2])", "barrier (8 bytes, group of [0, 1, 2])"
    reduce = "all_reduce (8 bytes, group of [1, 2], called by late.py:3)"
    assert find_faults([a, b, c]).splitlines() == [
        f"rank 0 would wait for ever for {barrier}, which comes after {send_text}; rank 1 waits for {reduce}",
        f"rank 1 would wait for ever for {reduce}; rank 2 waits for {barrier}",
        f"rank 2 would wait for ever for {barrier}; rank 0 waits for {send_text}",
    ]
