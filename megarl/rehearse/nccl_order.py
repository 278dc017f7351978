"""Simulates recorded communication (`comm_recorder.py`) as NCCL would run it, and reports where ranks would hang.

- The first use of a device group creates it, so it must be a collective of all its ranks.
- A group runs its operations in order: a collective once all of its ranks have reached it, a send once the receiver has
  reached it. A batch of sends and receives is one operation; a send outside a batch uses a group of the two ranks.
- Gloo groups, for host values, do the same, except that their sends never block.
- A rank passes a wait only once the operation is done. (With NCCL only the device waits, so what does not hang here
  does not hang there.)
- At the end every device operation must have been waited for, and every message have been received.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]


class _Launch(NamedTuple):
    """One launch of a rank on a group: a collective, or the sends and receives of one batch."""

    ops: list[Event]


class InvalidCommunication(AssertionError):
    pass


def read(path: Path) -> list[Event]:
    """Read a record that `CommRecorder.write` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def check(records: Sequence[Sequence[Event]]) -> Counter[str]:
    """Check the records of all ranks, in rank order; return the number of device operations by kind.

    Raises InvalidCommunication with a line for each fault.
    """
    faults = [*_invalid_first_uses(records), *_missing_waits(records), *Simulator(records).faults()]
    if faults:
        raise InvalidCommunication("\n".join(faults))
    return Counter(
        event["kind"] for record in records for event in record if event["do"] == "post" and not event["host"]
    )


def _invalid_first_uses(records: Sequence[Sequence[Event]]) -> list[str]:
    result = []
    for rank, record in enumerate(records):
        used_groups: set[str] = set()
        for event in record:
            if event["do"] != "post" or event["host"] or event["group"] in used_groups:
                continue
            used_groups.add(event["group"])
            if event["kind"] in ("send", "receive") and len(event["members"]) > 2:
                result.append(
                    f"rank {rank}: the first use of the group of the ranks {event['members']} is a {event['kind']}"
                )
    return result


def _missing_waits(records: Sequence[Sequence[Event]]) -> list[str]:
    result = []
    for rank, record in enumerate(records):
        waited = {event["op"] for event in record if event["do"] == "wait"}
        unwaited = [e for e in record if e["do"] == "post" and e["op"] not in waited and not e["host"]]
        result += [f"rank {rank}: nobody has waited for {_describe(event)}" for event in unwaited]
    return result


def _describe(event: Event) -> str:
    peer = "" if event["peer"] is None else f" {'to' if event['kind'] == 'send' else 'from'} rank {event['peer']}"
    calls = f", called by {event['calls']}" if event.get("calls") else ""
    return f"{event['kind']}{peer} ({event['bytes']} bytes, group of {event['members']}{calls})"


def _different(heads: Mapping[int, _Launch], field: str) -> str:
    """Describe what two ranks do that differ in a field."""
    rank, entry = next(iter(heads.items()))
    other = next(other for other, launch in heads.items() if launch.ops[0][field] != entry.ops[0][field])
    return f"rank {rank} does {_describe(entry.ops[0])}, rank {other} does {_describe(heads[other].ops[0])}"


class Simulator:
    def __init__(self, records: Sequence[Sequence[Event]]) -> None:
        self.records = records
        self.positions = [0] * len(records)
        self.done: list[set[int]] = [set() for _ in records]
        self.queues: dict[tuple[int, str], deque[_Launch]] = {}
        """Unfinished launches by rank and group."""
        self.members: dict[str, Sequence[int]] = {}
        self.gloo_sends: Counter[tuple[str, int, int]] = Counter()
        """Unreceived gloo sends by group, sender and receiver."""
        self.errors: list[str] = []

    def faults(self) -> list[str]:
        has_progressed = True
        while has_progressed and not self.errors:
            has_progressed = False
            for rank in range(len(self.records)):
                while self._advance(rank):
                    has_progressed = True
            for group in list(self.members):
                while self._run_group(group):
                    has_progressed = True
        if self.errors:
            return self.errors
        stuck = [
            f"rank {rank} would wait for ever for {self._waits_for(rank)}"
            for rank, record in enumerate(self.records)
            if self.positions[rank] < len(record)
        ]
        return stuck or [
            f"rank {receiver} never receives {count} of the messages that rank {sender} sends it in the group {group}"
            for (group, sender, receiver), count in self.gloo_sends.items()
            if count
        ]

    def _waits_for(self, rank: int) -> str:
        expected_op = self.records[rank][self.positions[rank]]["op"]
        return next(_describe(e) for e in self.records[rank] if e["do"] == "post" and e["op"] == expected_op)

    def _advance(self, rank: int) -> bool:
        record = self.records[rank]
        if self.positions[rank] == len(record):
            return False
        event = record[self.positions[rank]]
        if event["do"] == "wait":
            if event["op"] not in self.done[rank]:
                return False
            self.positions[rank] += 1
            return True
        self.positions[rank] += 1
        group = event["group"]
        if event["kind"] in ("send", "receive"):
            if event["host"]:
                if event["kind"] == "send":
                    self.gloo_sends[group, rank, event["peer"]] += 1
                    self.done[rank].add(event["op"])
                    return True
                group += f" {event['peer']}>{rank}"
                self.members[group] = (rank,)
            elif event["batch"] is None:
                group += " {}-{}".format(*sorted((rank, event["peer"])))
                self.members[group] = sorted((rank, event["peer"]))
            else:
                self.members[group] = event["members"]
        else:
            self.members[group] = event["members"]
        queue = self.queues.setdefault((rank, group), deque())
        last = queue[-1].ops[-1] if queue else None
        if event["batch"] is not None and last is not None and last["batch"] == event["batch"]:
            queue[-1].ops.append(event)
        else:
            queue.append(_Launch([event]))
        return True

    def _run_group(self, group: str) -> bool:
        """Run what the ranks of a group have reached; return whether anything ran."""
        heads = {rank: queue[0] for rank in self.members[group] if (queue := self.queues.get((rank, group)))}
        if not heads:
            return False
        kinds_by_rank = {rank: entry.ops[0]["kind"] for rank, entry in heads.items()}
        first = next(iter(heads.values())).ops[0]
        if first["host"] and first["kind"] == "receive":
            (rank,) = heads
            if not self.gloo_sends[first["group"], first["peer"], rank]:
                return False
            self.gloo_sends[first["group"], first["peer"], rank] -= 1
            return self._complete(group, rank)
        if any(kind in ("send", "receive") for kind in kinds_by_rank.values()):
            return self._match_exchanges(group, heads)
        if len(heads) < len(self.members[group]):
            return False
        if len(set(kinds_by_rank.values())) > 1:
            self.errors.append(f"ranks do different things at the same time: {_different(heads, 'kind')}")
            return False
        if len({entry.ops[0]["bytes"] for entry in heads.values()}) > 1:
            self.errors.append(f"ranks give different numbers of bytes to a collective: {_different(heads, 'bytes')}")
            return False
        if first["kind"] == "all_to_all_single":
            self._check_parts(group, heads)
        return all([self._complete(group, rank) for rank in heads])

    def _check_parts(self, group: str, heads: dict[int, _Launch]) -> None:
        """Check that each rank of an all-to-all receives as many bytes from each other as that one sends to it."""
        members = list(self.members[group])
        for sender, entry in heads.items():
            for receiver, sent in zip(members, entry.ops[0]["sends"], strict=True):
                if (received := heads[receiver].ops[0]["receives"][members.index(sender)]) != sent:
                    self.errors.append(
                        f"rank {sender} sends {sent} bytes to rank {receiver}, which receives {received}, in "
                        f"{_describe(heads[sender].ops[0])}"
                    )

    def _match_exchanges(self, group: str, heads: dict[int, _Launch]) -> bool:
        """Complete sends and receives whose peers have reached the other end."""
        has_progressed = False
        for sender, entry in list(heads.items()):
            for send in [op for op in entry.ops if op["kind"] == "send" and op["op"] not in self.done[sender]]:
                match = heads.get(send["peer"])
                for receive in match.ops if match else ():
                    open_ = receive["op"] not in self.done[send["peer"]]
                    if open_ and receive["kind"] == "receive" and receive["peer"] == sender:
                        if receive["bytes"] != send["bytes"]:
                            self.errors.append(f"rank {sender} gives {_describe(send)}, taken as {_describe(receive)}")
                        self.done[sender].add(send["op"])
                        self.done[send["peer"]].add(receive["op"])
                        has_progressed = True
                        break
        for rank, entry in heads.items():
            complete = all(op["op"] in self.done[rank] for op in entry.ops)
            if complete and self._batch_is_closed(rank, entry):
                self.queues[rank, group].popleft()
                has_progressed = True
        return has_progressed

    def _batch_is_closed(self, rank: int, entry: _Launch) -> bool:
        """Return whether the rank's record has moved past the batch of this launch."""
        batch = entry.ops[0]["batch"]
        if batch is None or self.positions[rank] == len(self.records[rank]):
            return True
        return bool(self.records[rank][self.positions[rank]].get("batch") != batch)

    def _complete(self, group: str, rank: int) -> bool:
        for op in self.queues[rank, group].popleft().ops:
            self.done[rank].add(op["op"])
        return True
