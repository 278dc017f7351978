"""Whether ranks would wait for each other for ever on NCCL is found in records of what they say."""

from __future__ import annotations

from typing import Any

import pytest
from nccl_order import Event, Stuck, check

pytestmark = pytest.mark.alone


class Said:
    """What one rank says, written by hand."""

    def __init__(self, rank: int) -> None:
        self.rank, self.events, self.batches = rank, list[Event](), 0

    def post(self, kind: str, members: list[int], wait: bool = True, **value: Any) -> int:
        number = len(self.events)
        fixed = {"do": "post", "op": number, "kind": kind, "members": members, "group": f"{members}"}
        self.events.append(fixed | {"host": False, "peer": None, "batch": None, "bytes": 8} | value)
        if wait:
            self.wait(number)
        return number

    def wait(self, number: int) -> None:
        self.events.append({"do": "wait", "op": number})

    def batch(self, members: list[int], *parts: tuple[str, int], wait: bool = True) -> list[int]:
        self.batches += 1
        numbers = [self.post(kind, members, False, peer=peer, batch=self.batches) for kind, peer in parts]
        for number in numbers if wait else ():
            self.wait(number)
        return numbers


def ranks(count: int, meet: bool = True) -> tuple[list[int], list[Said]]:
    everybody = list(range(count))
    said = [Said(rank) for rank in everybody]
    for item in said if meet else ():
        item.post("all_reduce", everybody)
    return everybody, said


def faults(said: list[Said]) -> str:
    with pytest.raises(Stuck) as caught:
        check([item.events for item in said])
    return str(caught.value)


def test_what_is_in_order_is_counted() -> None:
    every, (a, b, c) = ranks(3)
    a.batch(every, ("send", 1), ("receive", 2))
    b.batch(every, ("receive", 0), ("send", 2))
    c.batch(every, ("send", 0), ("receive", 1))
    a.post("barrier", [0, 1])
    b.post("barrier", [0, 1])
    assert check([a.events, b.events, c.events]) == {"all_reduce": 3, "send": 3, "receive": 3, "barrier": 2}


def test_a_group_is_not_made_by_an_exchange_of_some_of_its_ranks() -> None:
    every, said = ranks(3, meet=False)
    said[0].batch(every, ("send", 1))
    said[1].batch(every, ("receive", 0))
    assert "rank 0: the first use of the group of the ranks [0, 1, 2] is a send" in faults(said)
    every, said = ranks(2, meet=False)  # both take part
    said[0].batch(every, ("send", 1))
    said[1].batch(every, ("receive", 0))
    check([item.events for item in said])


def test_groups_in_another_order() -> None:
    every, (a, b) = ranks(2)
    for item, order in ((a, "xy"), (b, "yx")):
        for name in order:
            item.post("all_reduce", every, group=name)
    assert faults([a, b]) == (
        "rank 0 would wait for ever for all_reduce (8 bytes, group of [0, 1])\n"
        "rank 1 would wait for ever for all_reduce (8 bytes, group of [0, 1])"
    )
    every, (a, b) = ranks(2)
    for item, order in ((a, "xy"), (b, "yx")):
        for number in [item.post("all_reduce", every, False, group=name) for name in order]:
            item.wait(number)
    check([a.events, b.events])  # each group by itself, and only then a wait


def test_sends_that_wait_for_each_other() -> None:
    """Gloo keeps what is sent until somebody takes it; NCCL does not."""
    for host in (False, True):
        every, (a, b) = ranks(2)
        for item, peer in ((a, 1), (b, 0)):
            item.post("send", every, peer=peer, host=host)
            item.post("receive", every, peer=peer, host=host)
        if host:
            check([a.events, b.events])
        else:
            assert "rank 0 would wait for ever for send to rank 1" in faults([a, b])


def test_a_rank_that_leaves_a_collective_out() -> None:
    every, (a, b) = ranks(2)
    a.post("all_reduce", every)
    assert faults([a, b]) == "rank 0 would wait for ever for all_reduce (8 bytes, group of [0, 1])"
    b.post("all_gather", every)
    assert "do different things at the same time" in faults([a, b])
    every, (a, b) = ranks(2)
    a.post("broadcast", every, bytes=8)
    b.post("broadcast", every, bytes=16)
    assert "different numbers of bytes" in faults([a, b])


def test_a_batch_that_the_other_has_not_come_to() -> None:
    """What is in one batch is done at once, so a collective between two batches of the peer is met too early."""
    every, (a, b) = ranks(2)
    a.batch(every, ("send", 1), ("send", 1))
    b.batch(every, ("receive", 0))
    b.post("all_reduce", every)
    b.batch(every, ("receive", 0))
    a.post("all_reduce", every)
    assert "would wait for ever" in faults([a, b])
    every, (a, b) = ranks(2)
    a.batch(every, ("send", 1))
    b.batch(every, ("receive", 0))
    a.events[-2]["bytes"] = 16
    assert "rank 0 gives send to rank 1 (16 bytes" in faults([a, b])


def test_a_host_group_and_a_device_group_that_wait_for_each_other() -> None:
    every, (a, b) = ranks(2)
    a.post("barrier", every, host=True, group="host")
    a.post("all_reduce", every)
    b.post("all_reduce", every)
    b.post("barrier", every, host=True, group="host")
    assert "rank 0 would wait for ever for barrier" in faults([a, b])


def test_what_nobody_has_waited_for() -> None:
    every, (a, b) = ranks(2)
    a.batch(every, ("send", 1), wait=False)
    b.batch(every, ("receive", 0))
    assert faults([a, b]) == "rank 0: nobody has waited for send to rank 1 (8 bytes, group of [0, 1])"
