"""`kind_order` decides from a record of each kind what simulating all ranks would decide."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rank_record import RankRecord

from megarl.rehearse import kind_order, nccl_order
from megarl.rehearse.nccl_order import Event
from megarl.rehearse.rank_kinds import Family, choose_ranks, find_kinds

pytestmark = pytest.mark.alone


class Job:
    """Stages of dp x tp ranks; every stage is a kind. Ranks of a tensor parallel group follow each other."""

    def __init__(self, pp: int, dp: int, tp: int) -> None:
        self.pp, self.stage, self.world = pp, dp * tp, pp * dp * tp
        everyone = range(self.world)
        stages = [tuple(everyone[begin : begin + self.stage]) for begin in everyone[:: self.stage]]
        self.families = {
            "WORLD": Family((tuple(everyone),), False),
            "HOSTS": Family((tuple(everyone),), True),
            "TENSOR": Family(tuple(tuple(everyone[begin : begin + tp]) for begin in everyone[::tp]), False),
            "DATA": Family(tuple(ranks[first::tp] for ranks in stages for first in range(tp)), False),
            "PIPELINE": Family(tuple(tuple(everyone[first :: self.stage]) for first in range(self.stage)), False),
        }
        self.kinds = find_kinds([rank // self.stage for rank in everyone], self.families)
        assert self.kinds == stages
        self.records = [StageRecord(self, ranks[0]) for ranks in stages]

    def use_groups(self) -> None:
        """Use each group a first time."""
        for record in self.records:
            for family in self.families:
                record.collect("all_reduce", family)

    def check(self) -> list[str]:
        return kind_order.check([record.events for record in self.records], self.kinds, self.families)

    def group(self, family: str, rank: int) -> list[int]:
        return next(list(group) for group in self.families[family].groups if rank in group)

    def expand(self) -> list[list[Event]]:
        """Return the records of all ranks. A peer is as far away in the group as that of the first rank."""
        return [self._expand(rank) for rank in range(self.world)]

    def _expand(self, rank: int) -> list[Event]:
        record, result = self.records[rank // self.stage], []
        for event in record.events:
            if event["do"] == "post":
                first, members = event["members"], self.group(event["group"], rank)
                event = event | {"members": members, "group": f"{event['group']} {members}"}
                if event["peer"] is not None:
                    distance = first.index(event["peer"]) - first.index(record.rank)
                    event["peer"] = members[(members.index(rank) + distance) % len(members)]
            result.append(event)
        return result


class StageRecord(RankRecord):
    """The record of the first rank of a stage."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(rank)
        self.job = job

    def collect(self, kind: str, family: str, **fields: Any) -> int:
        return self.post(kind, self.job.group(family, self.rank), **self._fields(family) | fields)

    def message(self, kind: str, peer: int, family: str = "PIPELINE", **fields: Any) -> int:
        return self.collect(kind, family, peer=peer, **fields)

    def exchange(self, *parts: tuple[str, int], family: str = "PIPELINE", **fields: Any) -> list[int]:
        """Add a batch."""
        return self.batch(self.job.group(family, self.rank), *parts, **self._fields(family) | fields)

    def _fields(self, family: str) -> dict[str, Any]:
        is_host = self.job.families[family].is_host
        return {"group": family, "host": is_host, "calls": f"file.py:{len(self.events)}"}


def two_stages() -> tuple[Job, StageRecord, StageRecord]:
    """Two stages of the ranks 0 to 3 and 4 to 7, each of two tensor parallel groups."""
    job = Job(2, 2, 2)
    job.use_groups()
    return (job, *job.records)  # type: ignore[return-value]


def play_1f1b(first: StageRecord, second: StageRecord) -> None:
    """Three micro-batches of 64 bytes."""
    first.exchange(("send", 4), bytes=64)
    second.exchange(("receive", 0), bytes=64)
    for _ in range(2):
        for record, peer in ((first, 4), (second, 0)):
            record.collect("all_reduce", "TENSOR")
            record.exchange(("send", peer), ("receive", peer), bytes=64)
    second.exchange(("send", 0), bytes=64)
    first.exchange(("receive", 4), bytes=64)


def test_passes_1f1b_with_data_parallelism() -> None:
    job, first, second = two_stages()
    for record in (first, second):
        record.collect("all_gather_single", "DATA", bytes=32 + record.rank)  # stages have different parameters
    play_1f1b(first, second)
    for record in (first, second):
        record.collect("reduce_scatter_single", "DATA", bytes=32 + record.rank)
        record.collect("all_to_all_single", "TENSOR", sends=[8, 16], receives=[8, 16])
        record.collect("barrier", "HOSTS")
    assert job.check() == []
    play_1f1b(second, first)
    assert job.check() != []


def test_detects_a_micro_batch_that_a_stage_leaves_out() -> None:
    job, first, second = two_stages()
    play_1f1b(first, second)
    second.exchange(("receive", 0), bytes=64)
    assert job.check() == [
        "rank 4 would wait for ever for receive from rank 0 (64 bytes, group of [0, 4], called by file.py:26); "
        "rank 0 has ended"
    ]


def test_names_the_ranks_of_a_collective_in_another_order() -> None:
    job, first, second = two_stages()
    first.collect("all_reduce", "WORLD")
    first.exchange(("send", 4))
    second.exchange(("receive", 0))
    second.collect("all_reduce", "WORLD")
    assert job.check() == [
        "rank 0 would wait for ever for all_reduce (8 bytes, group of [0, 1, 2, 3, 4, 5, 6, 7], called by file.py:10); "
        "rank 4 waits for receive from rank 0 (8 bytes, group of [0, 4], called by file.py:10)",
        "rank 4 would wait for ever for receive from rank 0 (8 bytes, group of [0, 4], called by file.py:10); "
        "rank 0 waits for all_reduce (8 bytes, group of [0, 1, 2, 3, 4, 5, 6, 7], called by file.py:10)",
    ]


def test_names_the_ranks_of_a_collective_that_differ() -> None:
    job, first, second = two_stages()
    first.collect("all_reduce", "WORLD", bytes=8)
    second.collect("all_reduce", "WORLD", bytes=16)
    texts = [f"({size} bytes, group of [0, 1, 2, 3, 4, 5, 6, 7], called by file.py:10)" for size in (8, 16)]
    assert job.check() == [
        "ranks give different numbers of bytes to a collective: "
        f"rank 0 does all_reduce {texts[0]}, rank 4 does all_reduce {texts[1]}"
    ]
    second.events[-2] |= {"kind": "all_gather_single", "bytes": 8}
    assert job.check() == [
        "ranks do different things at the same time: "
        f"rank 0 does all_reduce {texts[0]}, rank 4 does all_gather_single {texts[0]}"
    ]
    second.events[-2] |= {"kind": "all_reduce"}
    assert job.check() == []


def test_detects_a_collective_that_a_kind_skips() -> None:
    job, first, second = two_stages()
    for record in (first, second, first):
        record.collect("all_reduce", "WORLD")
    (fault,) = job.check()
    assert fault.startswith("rank 0 would wait for ever for all_reduce") and fault.endswith("; rank 4 has ended")
    job = Job(2, 2, 2)
    job.records[1].collect("all_reduce", "WORLD")  # the only use of the group
    (fault,) = job.check()
    assert fault.startswith("rank 4 would wait for ever for all_reduce") and fault.endswith("; rank 0 has ended")


def test_detects_sends_that_block_each_other() -> None:
    for family, is_blocked in (("WORLD", True), ("HOSTS", False)):
        job, first, second = two_stages()
        for record, peer in ((first, 4), (second, 0)):
            record.message("send", peer, family)
            record.message("receive", peer, family)
        faults = job.check()
        assert len(faults) == 2 * is_blocked
        for rank, fault in zip((0, 4), faults, strict=False):
            assert f"rank {rank} would wait for ever for send to rank {4 - rank}" in fault
            assert f"rank {4 - rank} waits for send to rank {rank}" in fault


def make_ring(size: int) -> tuple[Job, StageRecord]:
    job = Job(1, 1, size)
    job.use_groups()
    return job, job.records[0]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_passes_rings_of_a_kind(size: int) -> None:
    job, record = make_ring(size)
    for _ in range(2):
        record.exchange(("send", 1), ("receive", size - 1), family="TENSOR")
    assert job.check() == []
    numbers = [
        record.message("send", 1, "TENSOR", wait=False),
        record.message("receive", size - 1, "TENSOR", wait=False),
    ]
    for number in numbers:
        record.wait(number)
    # Outside of a batch two ranks use a group of the two, in which both sends come first.
    assert len(job.check()) == (size == 2)


def test_detects_rings_that_block() -> None:
    job, record = make_ring(3)
    record.exchange(("send", 1), family="TENSOR")
    record.exchange(("receive", 2), family="TENSOR")
    text = "send to rank 1 (8 bytes, group of [0, 1, 2], called by file.py:10)"
    assert job.check() == [f"rank 0 would wait for ever for {text}; rank 1 does so too"]


def test_detects_a_receive_that_nobody_sends() -> None:
    job, first, second = two_stages()
    second.message("receive", 0)
    first.collect("barrier", "WORLD")
    first_barrier = "barrier (8 bytes, group of [0, 1, 2, 3, 4, 5, 6, 7], called by file.py:10)"
    receive = "receive from rank 0 (8 bytes, group of [0, 4], called by file.py:10)"
    assert job.check() == [
        f"rank 0 would wait for ever for {first_barrier}; rank 4 waits for {receive}",
        f"rank 4 would wait for ever for {receive}; rank 0 waits for {first_barrier}",
    ]


def test_detects_messages_in_another_order() -> None:
    job, first, second = two_stages()
    first.exchange(("send", 4), ("send", 4))
    second.exchange(("receive", 0), ("receive", 0))
    assert job.check() == []
    sent, received = ([event for event in record.events if event.get("peer") is not None] for record in (first, second))
    sent[0]["bytes"], received[1]["bytes"] = 16, 16
    assert job.check()[0] == (
        "rank 0 gives send to rank 4 (16 bytes, group of [0, 4], called by file.py:10), taken as "
        "receive from rank 0 (8 bytes, group of [0, 4], called by file.py:10) by rank 4"
    )


def test_matches_messages_by_distance() -> None:
    """Each rank sends 8 bytes to the next and 16 to the one after, and receives the latter first."""
    job, record = make_ring(4)
    numbers = [
        record.message(kind, peer, "TENSOR", wait=False, bytes=size)
        for kind, peer, size in (("send", 1, 8), ("send", 2, 16), ("receive", 2, 16), ("receive", 3, 8))
    ]
    for number in numbers:
        record.wait(number)
    assert "would wait for ever" in job.check()[0]  # rank 0 and rank 2 send first
    job, record = make_ring(4)
    record.exchange(("send", 1), ("send", 2), ("receive", 2), ("receive", 3), family="TENSOR")
    sizes = {("send", 1): 8, ("send", 2): 16, ("receive", 2): 16, ("receive", 3): 8}
    for event in record.events:
        if event.get("peer") is not None:
            event["bytes"] = sizes[event["kind"], event["peer"]]
    assert job.check() == []


def make_star(*peers: int) -> tuple[list[list[Event]], list[tuple[int, ...]], dict[str, Family]]:
    """Rank 0 sends to some of three ranks of a kind, which each receive from it."""
    families = {"WORLD": Family(((0, 1, 2, 3),), False)}
    source, others, members = RankRecord(0), RankRecord(1), [0, 1, 2, 3]
    for record in (source, others):
        record.post("barrier", members, group="WORLD")
    for peer in peers:
        source.post("send", members, group="WORLD", peer=peer)
    others.post("receive", members, group="WORLD", peer=0)
    return [source.events, others.events], [(0,), (1, 2, 3)], families


def test_matches_a_rank_with_all_of_a_kind() -> None:
    assert kind_order.check(*make_star(1, 2, 3)) == []
    assert kind_order.check(*make_star(1, 2)) == [
        "numbers of messages differ: each of 1 ranks like rank 0 sends to 2, each of 3 ranks like rank 1 receives "
        "from 1: "
        "rank 0 does send to rank 1 (8 bytes, group of [0, 1, 2, 3]), "
        "rank 1 does receive from rank 0 (8 bytes, group of [0, 1, 2, 3])"
    ]
    (fault,) = kind_order.check(*make_star(1, 2, 3, 3))
    assert fault.startswith("rank 0 would wait for ever for send to rank 3")


def test_a_receive_of_a_kind_needs_the_messages_to_all_of_it() -> None:
    """Rank 0 sends to rank 3 only after a barrier, which rank 3 would reach after receiving."""
    families, members = {"HOSTS": Family(((0, 1, 2, 3),), True)}, [0, 1, 2, 3]
    for last, num_faults in ((2, 2), (3, 0)):
        source, others = RankRecord(0), RankRecord(1)
        for peer in (1, 2, 3):
            if peer > last:
                source.post("barrier", members, group="HOSTS", host=True)
            source.post("send", members, group="HOSTS", host=True, peer=peer)
        others.post("receive", members, group="HOSTS", host=True, peer=0)
        if last == 2:
            others.post("barrier", members, group="HOSTS", host=True)
        faults = kind_order.check([source.events, others.events], [(0,), (1, 2, 3)], families)
        assert len(faults) == num_faults


def test_detects_parts_of_an_all_to_all_that_differ() -> None:
    job, first, second = two_stages()
    for record in (first, second):
        record.collect("all_to_all_single", "WORLD", sends=[4] * 4 + [8] * 4, receives=[4] * 4 + [8] * 4)
    second.events[-2] |= {"sends": [8] * 4 + [4] * 4, "receives": [8] * 4 + [4] * 4}
    assert job.check() == []
    second.events[-2]["receives"] = [12] * 4 + [4] * 4
    (fault,) = job.check()
    assert fault.startswith("rank 0 sends 8 bytes to rank 4, which receives 12: rank 0 does all_to_all_single (8 bytes")
    assert "rank 4 does all_to_all_single (8 bytes" in fault


def test_refuses_records_that_do_not_fit_the_groups() -> None:
    job, first, _ = two_stages()
    records = [record.events for record in job.records]
    halves = [(0, 1, 2, 3, 4), (5, 6, 7)]
    with pytest.raises(ValueError, match="ranks of a kind have groups with different kinds of members"):
        kind_order.check(records, halves, job.families)
    with pytest.raises(ValueError, match="each rank of the job"):
        kind_order.check(records, [(0, 1, 2, 3), (5, 6, 7)], job.families)
    first.events[0]["members"] = [0, 1, 2, 3]
    with pytest.raises(ValueError, match="not only that of all_reduce"):
        kind_order.check(records, job.kinds, job.families)
    first.events[0]["group"] = "OTHER"
    with pytest.raises(ValueError, match="rank 0 uses OTHER, which is no family"):
        kind_order.check(records, job.kinds, job.families)
    first.events[0] |= {"members": [0, 2], "group": "DATA", "host": True}
    with pytest.raises(ValueError, match="rank 0 uses DATA on the host"):
        kind_order.check(records, job.kinds, job.families)


# --- tables


def test_passes_equal_tables() -> None:
    job = Job(2, 2, 2)
    assert kind_order.check_tables({0: job.families, 16: dict(job.families), 3: Job(2, 2, 2).families}) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda table: table.pop("DATA"), "rank 16 makes no group DATA of ranks [0, 1], which rank 0 makes"),
        (
            lambda table: table.update(DATA=Family(((0, 1),), False)),
            "rank 16 makes no group DATA of ranks [2, 3], which rank 0 makes",
        ),
        (
            lambda table: table.update(MORE=Family(((1, 3),), False)),
            "rank 0 makes no group MORE of ranks [1, 3], which rank 16 makes",
        ),
        (
            lambda table: table.update(DATA=Family(((0, 1), (2, 3)), True)),
            "rank 16 makes the groups DATA on the host, rank 0 on the device",
        ),
        (
            lambda table: table.update(DATA=Family(((2, 3), (0, 1)), False)),
            "rank 0 makes the group DATA of ranks [0, 1] when rank 16 makes that of ranks [2, 3]",
        ),
        (
            lambda table: table.update(WORLD=table.pop("WORLD")),
            "rank 0 makes the groups WORLD when rank 16 makes the groups DATA",
        ),
    ],
)
def test_names_a_group_that_some_ranks_do_not_make(change: Callable[[dict[str, Family]], Any], fault: str) -> None:
    table = {"WORLD": Family(((0, 1, 2, 3),), False), "DATA": Family(((0, 1), (2, 3)), False)}
    other = dict(table)
    change(other)
    assert kind_order.check_tables({0: table, 8: dict(table), 16: other}) == [fault]


# --- two ranks of a kind


def two_ranks() -> tuple[Job, StageRecord, StageRecord]:
    """The first and the last rank of the first of two stages."""
    job = Job(2, 2, 2)
    pair = [StageRecord(job, rank) for rank in choose_ranks(job.kinds)[0]]
    for record in pair:
        record.collect("all_reduce", "TENSOR")
        record.exchange(("send", record.rank + 4), ("receive", record.rank + 4))
        record.collect("all_to_all_single", "TENSOR", sends=[8, 8], receives=[8, 8])
        record.collect("all_reduce", "DATA")
    return (job, *pair)  # type: ignore[return-value]


def test_passes_ranks_that_do_the_same() -> None:
    job, first, last = two_ranks()
    assert (first.rank, last.rank) == (0, 3) and first.events != last.events
    last.events = [event | {"calls": "other.py:1"} if event["do"] == "post" else event for event in last.events]
    for event in last.events:
        if event.get("batch") is not None:
            event["batch"] += 5  # numbers of batches are of no meaning
    assert kind_order.compare_records(first, last, job.kinds) == []
    assert kind_order.compare_records(first, first, job.kinds) == []


@pytest.mark.parametrize(
    ("position", "fields", "text"),
    [
        (0, {"bytes": 16}, "rank 3 does all_reduce (16 bytes, group of [2, 3], called by file.py:0)"),
        (0, {"kind": "broadcast"}, "rank 3 does broadcast (8 bytes, group of [2, 3], called by file.py:0)"),
        (0, {"group": "DATA", "members": [1, 3]}, "rank 3 does all_reduce (8 bytes, group of [1, 3], called by"),
        (0, {"members": [1, 3, 7]}, "rank 3 does all_reduce (8 bytes, group of [1, 3, 7], called by file.py:0)"),
        (0, {"host": True}, "rank 3 does all_reduce (8 bytes, group of [2, 3], called by file.py:0)"),
        (2, {"batch": None}, "rank 3 does send to rank 7 (8 bytes, group of [3, 7], called by file.py:2)"),
        (3, {"batch": 2}, "rank 3 does receive from rank 7 (8 bytes, group of [3, 7], called by file.py:2)"),
        (2, {"peer": 3}, "rank 3 does send to rank 3 (8 bytes, group of [3, 7], called by file.py:2)"),
        (6, {"sends": [8, 16]}, "rank 3 does all_to_all_single (8 bytes, group of [2, 3], called by file.py:6)"),
        (5, {"op": 2}, "rank 3 waits for send to rank 7 (8 bytes, group of [3, 7], called by file.py:2)"),
    ],
)
def test_names_the_first_difference_of_two_ranks(position: int, fields: dict[str, Any], text: str) -> None:
    job, first, last = two_ranks()
    last.events[position] |= fields
    last.events[-2]["bytes"] = 1000  # a later difference is not reported
    (fault,) = kind_order.compare_records(first, last, job.kinds)
    assert fault.startswith("ranks 0 and 3 should do the same, but rank 0 ") and f", {text}" in fault
    expected = first.events[position]
    described = next(e for e in first.events if e["op"] == expected["op"])
    assert nccl_order.describe(described) in fault


def test_names_a_rank_that_ends_early() -> None:
    job, first, last = two_ranks()
    first.collect("barrier", "WORLD")
    (fault,) = kind_order.compare_records(first, last, job.kinds)
    assert fault.startswith("ranks 0 and 3 should do the same, but rank 0 does barrier")
    assert fault.endswith("called by file.py:10), rank 3 has ended")


# --- all ranks


class RandomJob(Job):
    """A job with a random program; up to two changes may let it hang."""

    def __init__(self, seed: int) -> None:
        self.numbers = random.Random(seed)
        super().__init__(
            *self.numbers.choice(((1, 1, 3), (1, 2, 2), (2, 1, 2), (2, 2, 2), (3, 1, 2), (4, 1, 1), (2, 1, 4)))
        )
        self.programs: list[list[Callable[[], Any]]] = [[] for _ in self.records]
        if self.numbers.random() < 0.95:
            self.use_groups()
        for _ in range(self.numbers.randint(2, 8)):
            self.numbers.choice((self._collect, self._exchange_parts, self._send, self._send, self._ring))()
        for _ in range(self.numbers.choice((0, 1, 1, 2))):
            self._change()
        for program in self.programs:
            for act in program:
                act()

    def _add(self, stage: int, act: Callable[[], Any]) -> None:
        self.programs[stage].append(act)

    def _stages(self, family: str) -> Sequence[int]:
        """Choose stages that use a family."""
        is_shared = family in ("WORLD", "HOSTS", "PIPELINE")
        return range(self.pp) if is_shared else [self.numbers.randrange(self.pp)]

    def _collect(self) -> None:
        family = self.numbers.choice(list(self.families))
        size = self.numbers.choice((8, 16))
        for stage in self._stages(family):
            self._add(stage, lambda stage=stage: self.records[stage].collect("all_reduce", family, bytes=size))

    def _exchange_parts(self) -> None:
        family = self.numbers.choice(("WORLD", "TENSOR"))
        sizes = {(a, b): self.numbers.choice((4, 8)) for a in range(self.pp) for b in range(self.pp)}
        for stage in self._stages(family):
            others = [rank // self.stage for rank in self.group(family, stage * self.stage)]
            fields = {
                "sends": [sizes[stage, other] for other in others],
                "receives": [sizes[other, stage] for other in others],
            }
            if self.numbers.random() < 0.05:
                fields["sends"] = [*fields["sends"][:-1], 12]
            self._add(
                stage,
                lambda stage=stage, fields=fields: self.records[stage].collect("all_to_all_single", family, **fields),
            )

    def _send(self) -> None:
        """Let a stage send to the next, and maybe receive from it too."""
        if self.pp == 1:
            return
        stage = self.numbers.randrange(self.pp - 1)
        family = self.numbers.choice(("PIPELINE", "WORLD", "HOSTS"))
        order = self.numbers.choice(((("send", "receive"),), (("send", "receive"), ("receive", "send"))))
        size, is_batched = self.numbers.choice((8, 16)), self.numbers.random() < 0.7
        for end, number in ((0, stage), (1, stage + 1)):
            peer = (stage + 1 - end) * self.stage
            parts = [(kinds[end], peer) for kinds in order]
            self._transfer(number, parts, family, size, is_batched)

    def _ring(self) -> None:
        family = "TENSOR"
        stage = self.numbers.randrange(self.pp)
        members = self.group(family, stage * self.stage)
        if len(members) > 1:
            parts = [("send", members[1]), ("receive", members[-1])]
            self._transfer(stage, parts, family, 8, self.numbers.random() < 0.7)

    def _transfer(self, stage: int, parts: Sequence[tuple[str, int]], family: str, size: int, is_batched: bool) -> None:
        record, is_blocking = self.records[stage], self.numbers.random() < 0.2

        def transfer() -> None:
            if is_batched:
                record.exchange(*parts, family=family, bytes=size)
                return
            numbers = [record.message(kind, peer, family, wait=is_blocking, bytes=size) for kind, peer in parts]
            for number in () if is_blocking else numbers:
                record.wait(number)

        self._add(stage, transfer)

    def _change(self) -> None:
        program = self.numbers.choice(self.programs)
        if len(program) < 2:
            return
        position, kind = self.numbers.randrange(len(program)), self.numbers.choice("remove swap repeat".split())
        if kind == "remove":
            del program[position]
        elif kind == "repeat":
            program.append(program[position])
        else:
            program.insert(0, program.pop(position))


def test_decides_as_a_simulation_of_all_ranks() -> None:
    counts = {True: 0, False: 0}
    for seed in range(600):
        job = RandomJob(seed)
        records = job.expand()
        of_ranks = nccl_order.find_faults(records, [(rank,) for rank in range(job.world)])
        of_kinds = job.check()
        assert bool(of_kinds) == bool(of_ranks), (seed, of_kinds, of_ranks)
        counts[bool(of_ranks)] += 1
    assert min(counts.values()) > 150
