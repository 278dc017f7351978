"""Decides from records of a few ranks whether a whole job's communication would run through on NCCL.

The records are of the first rank of each kind (`rank_kinds.py`), which `nccl_order.py` simulates in lockstep. This
holds if all ranks create the same groups (`check_tables`), and ranks of a kind do the same, which the record of a
second rank of the kind shows (`compare_records`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import Protocol

from megarl.rehearse import nccl_order
from megarl.rehearse.nccl_order import Event, describe, list_ranks
from megarl.rehearse.rank_kinds import Family, find_kinds


class RankRecord(Protocol):
    """A rank and what it has done, such as `play.PlayedRank`."""

    @property
    def rank(self) -> int: ...

    @property
    def events(self) -> Sequence[Event]: ...


def check(
    records: Sequence[Sequence[Event]], kinds: Sequence[Sequence[int]], families: Mapping[str, Family]
) -> list[str]:
    """Return a line for each fault of a job: where ranks would hang, or differ in what they exchange.

    records: events of the first rank of each kind. kinds: from `rank_kinds.find_kinds`. families: groups of the job.

    Raises ValueError if the kinds are no equitable partition, or an event is not of the rank's group of its family.
    """
    kind_of = _kinds_by_rank(kinds)
    if sorted(kind_of) != list(range(len(kind_of))):
        raise ValueError("kinds must have each rank of the job")
    if find_kinds([kind_of[rank] for rank in range(len(kind_of))], families) != [tuple(ranks) for ranks in kinds]:
        raise ValueError("ranks of a kind have groups with different kinds of members, see rank_kinds.find_kinds")
    for ranks, record in zip(kinds, records, strict=True):
        _check_groups(ranks[0], record, families)
    return nccl_order.find_faults(records, kinds)


def _check_groups(rank: int, record: Sequence[Event], families: Mapping[str, Family]) -> None:
    checked: dict[str, Sequence[int]] = {}
    for event in record:
        if event["do"] != "post" or event["members"] is checked.get(event["group"]):
            continue
        name, members = event["group"], event["members"]
        if name not in families:
            raise ValueError(f"rank {rank} uses {name}, which is no family of groups: {describe(event)}")
        groups = [group for group in families[name].groups if rank in group]
        if groups != [tuple(members)]:
            raise ValueError(f"rank {rank} has the groups {groups} of {name}, not only that of {describe(event)}")
        if event["host"] != families[name].is_host:
            raise ValueError(f"rank {rank} uses {name} on the {'host' if event['host'] else 'device'}")
        checked[name] = members


def check_tables(tables: Mapping[int, Mapping[str, Family]]) -> list[str]:
    """Return a line for the first difference of each rank's groups from those of the first rank.

    tables: by played rank, the groups of all ranks that this rank has created or taken part in creating, in order.
    """
    ranks = list(tables)
    return [line for rank in ranks[1:] if (line := _compare_tables(ranks[0], rank, tables[ranks[0]], tables[rank]))]


def _compare_tables(
    first_rank: int, rank: int, first: Mapping[str, Family], second: Mapping[str, Family]
) -> str | None:
    for creator, other, table, other_table in ((first_rank, rank, first, second), (rank, first_rank, second, first)):
        for name, family in table.items():
            groups = set(other_table[name].groups) if name in other_table else set()
            for members in family.groups:
                if members not in groups:
                    return (
                        f"rank {other} makes no group {name} of ranks {list_ranks(members)}, which rank {creator} makes"
                    )
    for name, second_name in zip(first, second, strict=True):
        if name != second_name:
            return f"rank {first_rank} makes the groups {name} when rank {rank} makes the groups {second_name}"
        if first[name].is_host != second[name].is_host:
            on_host, on_device = (first_rank, rank) if first[name].is_host else (rank, first_rank)
            return f"rank {on_host} makes the groups {name} on the host, rank {on_device} on the device"
        for members, second_members in zip_longest(first[name].groups, second[name].groups):
            if members != second_members:
                return (
                    f"rank {first_rank} makes the group {name} of ranks {list_ranks(members or ())} when rank {rank} "
                    f"makes that of ranks {list_ranks(second_members or ())}"
                )
    return None


def compare_records(first: RankRecord, second: RankRecord, kinds: Sequence[Sequence[int]]) -> list[str]:
    """Return the first difference between what two ranks of a kind do, a line, or nothing.

    Peers, and members of groups, are compared by kind: ranks of a kind send to different ranks.
    """
    kind_of, sequences = _kinds_by_rank(kinds), dict[tuple[int, ...], int]()
    sides = [_Side(record.rank, kind_of, sequences) for record in (first, second)]
    for events in zip_longest(first.events, second.events):
        values = [side.value(event) for side, event in zip(sides, events, strict=True)]
        if values[0] != values[1]:
            does = [side.describe(event) for side, event in zip(sides, events, strict=True)]
            return [f"ranks {first.rank} and {second.rank} should do the same, but {', '.join(does)}"]
    return []


class _Side:
    """The events of a rank as values that are equal for ranks that do the same."""

    def __init__(self, rank: int, kind_of: Mapping[int, int], sequences: dict[tuple[int, ...], int]) -> None:
        self.rank, self.kind_of = rank, kind_of
        self.sequences = sequences
        """Numbers of the sequences of kinds of groups' members, shared by both sides."""
        self.posts: dict[int, Event] = {}
        self.numbers: dict[tuple[str, int], int] = {}
        """Numbers of operations and batches in the order of their first events."""
        self.groups: dict[str, tuple[Sequence[int], int]] = {}
        """The last members by group, and the number of their sequence."""

    def value(self, event: Event | None) -> Hashable:
        if event is None:
            return None
        number = self._number("op", event["op"])
        if event["do"] == "wait":
            return "wait", number
        self.posts[event["op"]] = event
        batch = None if event["batch"] is None else self._number("batch", event["batch"])
        peer = None if event["peer"] is None else self.kind_of[event["peer"]]
        parts = [
            tuple(sorted(zip((self.kind_of[rank] for rank in event["members"]), event[name], strict=True)))
            for name in ("sends", "receives")
            if name in event
        ]
        group = event["group"], event["host"], self._sequence(event)
        return "post", number, event["kind"], *group, event["bytes"], batch, peer, *parts

    def _number(self, name: str, value: int) -> int:
        return self.numbers.setdefault((name, value), len(self.numbers))

    def _sequence(self, event: Event) -> int:
        name, members = event["group"], event["members"]
        if name not in self.groups or (self.groups[name][0] is not members and self.groups[name][0] != members):
            sequence = tuple(self.kind_of[rank] for rank in members)
            self.groups[name] = members, self.sequences.setdefault(sequence, len(self.sequences))
        return self.groups[name][1]

    def describe(self, event: Event | None) -> str:
        if event is None:
            return f"rank {self.rank} has ended"
        return (
            f"rank {self.rank} {'waits for' if event['do'] == 'wait' else 'does'} {describe(self.posts[event['op']])}"
        )


def _kinds_by_rank(kinds: Sequence[Sequence[int]]) -> dict[int, int]:
    return {rank: kind for kind, ranks in enumerate(kinds) for rank in ranks}
