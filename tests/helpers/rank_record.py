"""Hand-written records of communication."""

from __future__ import annotations

from typing import Any

from megarl.rehearse.nccl_order import Event


class RankRecord:
    """A hand-written record of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.events, self.batches = rank, list[Event](), 0

    def post(self, kind: str, members: list[int], wait: bool = True, **fields: Any) -> int:
        number = len(self.events)
        fixed = {"do": "post", "op": number, "kind": kind, "members": members, "group": f"{members}"}
        self.events.append(fixed | {"host": False, "peer": None, "batch": None, "bytes": 8} | fields)
        if wait:
            self.wait(number)
        return number

    def wait(self, number: int) -> None:
        self.events.append({"do": "wait", "op": number})

    def batch(self, members: list[int], *parts: tuple[str, int], wait: bool = True, **fields: Any) -> list[int]:
        self.batches += 1
        numbers = [self.post(kind, members, False, peer=peer, batch=self.batches, **fields) for kind, peer in parts]
        for number in numbers if wait else ():
            self.wait(number)
        return numbers
