"""Simulates recorded communication (`comm_recorder.py`) as NCCL would run it, and reports where ranks would hang.

- The first use of a device group creates it, so it must be a collective of all its ranks.
- A group runs its operations in order: a collective once all of its ranks have reached it, a send once the receiver has
  reached it. A batch of sends and receives is one operation; a send outside a batch uses a group of the two ranks.
- Gloo groups, for host values, do the same, except that their sends never block.
- A rank passes a wait only once the operation is done. (With NCCL only the device waits, so what does not hang here
  does not hang there.)
- At the end every device operation must have been waited for, and every message have been received.

The simulation moves kinds of ranks (`rank_kinds.py`), each with the record of its first rank. All ranks of a kind move
in lockstep. That decides for any schedule: a rank never chooses between messages, so an operation that can run stays
able to run whatever else runs first, and all schedules end in the same state. Lockstep is such a schedule, since the
groups of two ranks of a kind have members of the same kinds: what the first can do, the second can do too. If every
rank is a kind, this simulates ranks.

Which rank of a kind sends which message to which rank of another kind is not in the records of first ranks, see
`_pair_lanes`. A rank that sends messages to several ranks of a kind and awaits the answer of each before it goes on
treats them differently. Such ranks must be of different kinds, or the simulation reports a hang.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_MAX_MEMBERS = 16
"""Ranks of a group that a message lists."""


class InvalidCommunication(AssertionError):
    pass


def read(path: Path) -> list[Event]:
    """Read a record that `CommRecorder.write` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def check(records: Sequence[Sequence[Event]]) -> Counter[str]:
    """Check the records of all ranks, in rank order; return the number of device operations by kind.

    Raises InvalidCommunication with a line for each fault.
    """
    if faults := find_faults(records, [(rank,) for rank in range(len(records))]):
        raise InvalidCommunication("\n".join(faults))
    return Counter(
        event["kind"] for record in records for event in record if event["do"] == "post" and not event["host"]
    )


def find_faults(records: Sequence[Sequence[Event]], kinds: Sequence[Sequence[int]]) -> list[str]:
    """Return a line for each fault of a job.

    records: of the first rank of each kind. kinds: the ranks of each kind, an equitable partition of all ranks.
    """
    ranks = [members[0] for members in kinds]
    return [
        *_invalid_first_uses(ranks, records),
        *_missing_waits(ranks, records),
        *Simulator(records, kinds).find_faults(),
    ]


def _invalid_first_uses(ranks: Sequence[int], records: Sequence[Sequence[Event]]) -> list[str]:
    result = []
    for rank, record in zip(ranks, records, strict=True):
        used_groups: set[str] = set()
        for event in record:
            if event["do"] != "post" or event["host"] or event["group"] in used_groups:
                continue
            used_groups.add(event["group"])
            if event["kind"] in ("send", "receive") and len(event["members"]) > 2:
                result.append(
                    f"rank {rank}: the first use of the group of the ranks {list_ranks(event['members'])} is a "
                    f"{event['kind']}"
                )
    return result


def _missing_waits(ranks: Sequence[int], records: Sequence[Sequence[Event]]) -> list[str]:
    result = []
    for rank, record in zip(ranks, records, strict=True):
        waited = {event["op"] for event in record if event["do"] == "wait"}
        unwaited = [e for e in record if e["do"] == "post" and e["op"] not in waited and not e["host"]]
        result += [f"rank {rank}: nobody has waited for {describe(event)}" for event in unwaited]
    return result


def list_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks of a group, shortened if they are many."""
    if len(ranks) <= _MAX_MEMBERS:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks[: _MAX_MEMBERS - 1]))}, ..., {ranks[-1]}]"


def describe(event: Event) -> str:
    """Describe an operation with its bytes, group and calls."""
    peer = "" if event["peer"] is None else f" {'to' if event['kind'] == 'send' else 'from'} rank {event['peer']}"
    calls = f", called by {event['calls']}" if event.get("calls") else ""
    return f"{event['kind']}{peer} ({event['bytes']} bytes, group of {list_ranks(event['members'])}{calls})"


class _Group:
    """All groups of a name whose members have the same sequence of kinds."""

    def __init__(self, name: str, kinds: tuple[int, ...], is_host: bool) -> None:
        self.name, self.is_host = name, is_host
        self.places: dict[int, list[int]] = {}
        """Places in the group by kind."""
        for place, kind in enumerate(kinds):
            self.places.setdefault(kind, []).append(place)
        self.size = len(kinds)
        self.queues: dict[int, _Queue] = {}
        """Queues of collectives and batches by kind, in order."""


class _Queue:
    """The launches of a kind that run in order: on a group, or to and from one peer."""

    __slots__ = ("group", "launches", "num_done", "num_posted")

    def __init__(self, group: _Group) -> None:
        self.group = group
        self.launches: list[_Launch] = []
        self.num_posted, self.num_done = 0, 0

    @property
    def head(self) -> _Launch | None:
        return self.launches[self.num_done] if self.num_done < self.num_posted else None


class _Launch:
    """A collective, or the sends and receives of a batch."""

    __slots__ = ("queue", "ops", "num_open")

    def __init__(self, queue: _Queue) -> None:
        self.queue = queue
        self.ops: list[_Op] = []
        self.num_open = 0


class _Lane:
    """All sends, or all receives, of a kind on a group with one peer."""

    __slots__ = ("queue", "kind", "event", "partners", "num_done")

    def __init__(self, queue: _Queue, kind: int, event: Event) -> None:
        self.queue, self.kind = queue, kind
        self.event = event
        """The first operation."""
        self.partners: list[_Lane] = []
        """The lanes at the other end."""
        self.num_done = 0
        """Messages of the host that have been sent or received."""


class _Op:
    __slots__ = ("event", "kind", "lane", "launch", "matched", "is_posted", "is_done")

    def __init__(self, event: Event, kind: int, lane: _Lane | None) -> None:
        self.event, self.kind, self.lane = event, kind, lane
        self.launch: _Launch | None = None
        """None for sends of the host, which nothing delays."""
        self.matched: tuple[_Lane, ...] = ()
        """Lanes at the other end that have reached this send or receive."""
        self.is_posted, self.is_done = False, False


class Simulator:
    """The state of a job; kinds are numbers. See `find_faults` for the arguments."""

    def __init__(self, records: Sequence[Sequence[Event]], kinds: Sequence[Sequence[int]]) -> None:
        self.ranks = [ranks[0] for ranks in kinds]
        self.kind_of = {rank: kind for kind, ranks in enumerate(kinds) for rank in ranks}
        self.groups: dict[tuple[str, tuple[int, ...], bool], _Group] = {}
        self.lanes: dict[tuple[int, _Group, int, str, bool], _Lane] = {}
        """By kind, group, peer, direction, and whether it is part of a batch."""
        self.programs = [self._load(kind, record) for kind, record in enumerate(records)]
        self.positions = [0] * len(records)
        self.ready = deque(range(len(records)))
        """Kinds that can move."""
        self.new_heads: deque[_Queue] = deque()
        """Queues that may run their first launch."""
        self.errors: list[str] = []

    def find_faults(self) -> list[str]:
        self._connect_lanes()
        while (self.ready or self.new_heads) and not self.errors:
            if self.ready:
                self._advance(self.ready.popleft())
            else:
                self._run(self.new_heads.popleft())
        return self.errors or list(self._stuck_kinds()) or list(self._unreceived_messages())

    def _load(self, kind: int, record: Sequence[Event]) -> list[_Op]:
        """Return the operation of each event. An operation's first event starts it, the others wait for it."""
        result: list[_Op] = []
        ops: dict[int, _Op] = {}
        groups: dict[tuple[str, bool], list[tuple[Sequence[int], _Group]]] = {}
        queues: dict[tuple[_Group, int | None], _Queue] = {}
        for event in record:
            number = event["op"]
            if event["do"] == "wait":
                result.append(ops[number])
                continue
            group = self._find_group(groups.setdefault((event["group"], event["host"]), []), event)
            peer = event["peer"]
            is_batched = event["batch"] is not None and peer is not None and not group.is_host
            queue_key = group, None if is_batched else peer
            if (queue := queues.get(queue_key)) is None:
                queue = queues[queue_key] = _Queue(group)
                if queue_key[1] is None:
                    group.queues[kind] = queue
            lane = None
            if peer is not None:
                lane_key = kind, group, peer, event["kind"], is_batched
                if (lane := self.lanes.get(lane_key)) is None:
                    lane = self.lanes[lane_key] = _Lane(queue, kind, event)
            op = ops[number] = _Op(event, kind, lane)
            result.append(op)
            if group.is_host and event["kind"] == "send":
                continue
            launches = queue.launches
            if not (is_batched and launches and launches[-1].ops[-1].event["batch"] == event["batch"]):
                launches.append(_Launch(queue))
            op.launch = launches[-1]
            op.launch.ops.append(op)
            op.launch.num_open += 1
        return result

    def _find_group(self, candidates: list[tuple[Sequence[int], _Group]], event: Event) -> _Group:
        """Return the group of an event. candidates: known groups of its name, by members."""
        members = event["members"]
        for known_members, group in candidates:
            if known_members is members or known_members == members:
                return group
        try:
            key = event["group"], tuple(self.kind_of[rank] for rank in members), event["host"]
        except KeyError as error:
            raise ValueError(f"rank {error} is of no kind, and a member of the group of {describe(event)}") from None
        if key not in self.groups:
            self.groups[key] = _Group(*key)
        candidates.append((members, self.groups[key]))
        return self.groups[key]

    def _connect_lanes(self) -> None:
        """Find the receives that match each send."""
        ends: dict[tuple[_Group, int, int, bool], tuple[list[_Lane], list[_Lane]]] = {}
        for (kind, group, peer, direction, is_batched), lane in self.lanes.items():
            other = self.kind_of[peer]
            if direction == "send":
                ends.setdefault((group, kind, other, is_batched), ([], []))[0].append(lane)
            else:
                ends.setdefault((group, other, kind, is_batched), ([], []))[1].append(lane)
        for (group, sender, receiver, _), (sends, receives) in ends.items():
            if not sends or not receives:
                continue
            num_senders, num_receivers = len(group.places[sender]), len(group.places[receiver])
            if num_senders * len(sends) != num_receivers * len(receives):
                self.errors.append(
                    f"numbers of messages differ: each of {num_senders} ranks like rank {self.ranks[sender]} sends to "
                    f"{len(sends)}, each of {num_receivers} ranks like rank {self.ranks[receiver]} receives from "
                    f"{len(receives)}: {self._does(sends[0])}, {self._does(receives[0])}"
                )
            for send, receive in self._pair_lanes(sends, receives):
                send.partners.append(receive)
                receive.partners.append(send)

    def _pair_lanes(self, sends: list[_Lane], receives: list[_Lane]) -> Iterator[tuple[_Lane, _Lane]]:
        """Pair the sends of a kind to another with the receives of that from this.

        A kind that sends to the second rank after it, say, is assumed to send to that rank what the other kind receives
        from the second rank before it. Where no distances match, ranks are paired in the order of their first message.
        If there are more sends than receives or the reverse, a lane of the fewer has several partners.
        """
        if len(sends) == len(receives) > 1:
            by_distance = {self._distance(lane): lane for lane in receives}
            for send in list(sends):
                receive = by_distance.get(-self._distance(send) % send.queue.group.size)
                if receive is not None:
                    sends, receives = [s for s in sends if s is not send], [r for r in receives if r is not receive]
                    yield send, receive
        count = max(len(sends), len(receives))
        for number in range(count):
            yield sends[number * len(sends) // count], receives[number * len(receives) // count]

    def _distance(self, lane: _Lane) -> int:
        """Return how many places after the rank its peer is in the group, around its end."""
        members = lane.event["members"]
        return (members.index(lane.event["peer"]) - members.index(self.ranks[lane.kind])) % len(members)

    def _advance(self, kind: int) -> None:
        """Move a kind to its next wait for something that is not done. (So all of a batch has been posted.)"""
        program, position = self.programs[kind], self.positions[kind]
        while position < len(program):
            op = program[position]
            if op.is_posted:
                if not op.is_done:
                    break
            else:
                self._post(op)
            position += 1
        self.positions[kind] = position

    def _post(self, op: _Op) -> None:
        op.is_posted = True
        if op.launch is None:
            self._send_from_host(op)
        elif op.launch.ops[0] is op:
            queue = op.launch.queue
            queue.num_posted += 1
            if queue.num_posted == queue.num_done + 1:
                self.new_heads.append(queue)

    def _run(self, queue: _Queue) -> None:
        """Run the first launch of a queue if the other kinds have reached it."""
        launch = queue.head
        if launch is None:
            return
        if launch.ops[0].lane is None:
            self._run_collective(queue.group)
        elif queue.group.is_host:
            self._receive_on_host(queue, launch.ops[0].lane)
        else:
            self._match_messages(launch)

    def _finish(self, op: _Op) -> None:
        op.is_done = True
        program, position = self.programs[op.kind], self.positions[op.kind]
        if position < len(program) and program[position] is op:
            self.ready.append(op.kind)
        launch = op.launch
        if launch is not None:
            launch.num_open -= 1
            if not launch.num_open:
                launch.queue.num_done += 1
                if launch.queue.num_done < launch.queue.num_posted:
                    self.new_heads.append(launch.queue)

    def _send_from_host(self, op: _Op) -> None:
        assert op.lane is not None
        op.lane.num_done += 1
        self._finish(op)
        self.new_heads.extend(receive.queue for receive in op.lane.partners)

    def _receive_on_host(self, queue: _Queue, lane: _Lane) -> None:
        if lane.partners and all(send.num_done > lane.num_done for send in lane.partners):
            lane.num_done += 1
            self._finish(queue.launches[queue.num_done].ops[0])

    def _match_messages(self, launch: _Launch) -> None:
        """Complete the sends and receives of a launch whose peers have reached the other end."""
        for op in launch.ops:
            assert op.lane is not None
            for partner in op.lane.partners:
                if partner in op.matched or (match := _next_op(partner, op.lane)) is None:
                    continue
                op.matched += (partner,)
                match.matched += (op.lane,)
                if op.event["bytes"] != match.event["bytes"]:
                    send, receive = (op, match) if op.event["kind"] == "send" else (match, op)
                    self.errors.append(
                        f"rank {self.ranks[send.kind]} gives {describe(send.event)}, taken as "
                        f"{describe(receive.event)} by rank {self.ranks[receive.kind]}"
                    )
                for end in (op, match):
                    if len(end.matched) == len(end.lane.partners):  # type: ignore[union-attr]
                        self._finish(end)

    def _run_collective(self, group: _Group) -> None:
        if len(group.queues) < len(group.places):
            return
        ops: list[_Op] = []
        for queue in group.queues.values():
            head = queue.head
            if head is None or head.ops[0].lane is not None:
                return
            ops.append(head.ops[0])
        first = ops[0]
        for field, fault in (
            ("kind", "ranks do different things at the same time"),
            ("bytes", "ranks give different numbers of bytes to a collective"),
        ):
            for op in ops:
                if op.event[field] != first.event[field]:
                    self.errors.append(f"{fault}: {self._does(first)}, {self._does(op)}")
                    return
        if first.event["kind"] == "all_to_all_single":
            self._check_parts(group, ops)
        for op in ops:
            self._finish(op)

    def _check_parts(self, group: _Group, ops: Sequence[_Op]) -> None:
        """Check that each kind of an all-to-all receives as many bytes from each other as that sends to it."""
        for send in ops:
            sends, senders = send.event["sends"], group.places[send.kind]
            for receive in ops:
                receives, receivers = receive.event["receives"], group.places[receive.kind]
                if send is receive and sends == receives:
                    continue
                sent, received = Counter[int](), Counter[int]()
                for place in receivers:
                    sent[sends[place]] += len(senders)
                for place in senders:
                    received[receives[place]] += len(receivers)
                if sent != received:
                    size = min((sent - received).keys())
                    place = next(place for place in receivers if sends[place] == size)
                    self.errors.append(
                        f"rank {self.ranks[send.kind]} sends {size} bytes to rank {send.event['members'][place]}, "
                        f"which receives {min((received - sent).keys())}: {self._does(send)}, {self._does(receive)}"
                    )

    def _does(self, item: _Op | _Lane) -> str:
        return f"rank {self.ranks[item.kind]} does {describe(item.event)}"

    def _waited_op(self, kind: int) -> _Op | None:
        """Return the operation that a kind waits for, or None if it has run through."""
        position = self.positions[kind]
        return self.programs[kind][position] if position < len(self.programs[kind]) else None

    def _stuck_kinds(self) -> Iterator[str]:
        for kind, rank in enumerate(self.ranks):
            if (op := self._waited_op(kind)) is not None:
                yield f"rank {rank} would wait for ever for {describe(op.event)}{self._cause(op)}"

    def _cause(self, op: _Op) -> str:
        """Describe what another rank does instead of its part of an operation that does not run."""
        assert op.launch is not None
        group, head = op.launch.queue.group, op.launch.queue.head
        assert head is not None
        after = ""
        if head is not op.launch:
            op = _open_op(head)
            after = f", which comes after {describe(op.event)}"
        if op.lane is not None:
            other = self.kind_of[op.event["peer"]]
            other_queue = next((lane.queue for lane in op.lane.partners if lane not in op.matched), None)
        else:
            queues = {kind: group.queues.get(kind) for kind in sorted(group.places)}
            other, other_queue = next(
                (kind, queue)
                for kind, queue in queues.items()
                if queue is None or queue.head is None or queue.head.ops[0].lane is not None
            )
        if other == op.kind:
            return f"{after}; rank {op.event['peer']} does so too"
        other_head = other_queue.head if other_queue else None
        blocking = _open_op(other_head) if other_head else self._waited_op(other)
        does = "has ended" if blocking is None else f"waits for {describe(blocking.event)}"
        return f"{after}; rank {self.ranks[other]} {does}"

    def _unreceived_messages(self) -> Iterator[str]:
        for (kind, group, peer, direction, _), lane in self.lanes.items():
            if direction == "send" and group.is_host:
                count = lane.num_done - min((receive.num_done for receive in lane.partners), default=0)
                if count:
                    yield (
                        f"rank {peer} never receives {count} of the messages that rank {self.ranks[kind]} sends it in "
                        f"the group {group.name}: {describe(lane.event)}"
                    )


def _next_op(lane: _Lane, partner: _Lane) -> _Op | None:
    """Return the first operation of a lane that is ready to run and not matched with its partner yet."""
    head = lane.queue.head
    if head is None:
        return None
    return next((op for op in head.ops if op.lane is lane and partner not in op.matched), None)


def _open_op(launch: _Launch) -> _Op:
    return next(op for op in launch.ops if not op.is_done)
