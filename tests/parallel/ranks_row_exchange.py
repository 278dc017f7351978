"""Ranks that deliver rows to each other: random cases against a gather of everything, and what must hold besides.

    ranks_row_exchange.py WHAT SEED [PER_MACHINE]

Prints what was wrong, and what was sent.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from typing import Any

import torch
import torch.distributed as dist

torch.set_num_threads(1)

from megarl.config import ParallelConfig  # noqa: E402
from megarl.parallel import ranks, row_exchange, shared_memory  # noqa: E402
from megarl.parallel.row_exchange import Delivery, RowExchange  # noqa: E402

KINDS: dict[str, Any] = {
    "flags": (torch.bool, ()),
    "routing": (torch.uint8, (6, 2)),
    "tokens": (torch.int32, ()),
    "logprobs": (torch.float32, ()),
    "wide": (torch.int64, (3,)),
    "half": (torch.bfloat16, (5,)),
}


class Case:
    """A random delivery, the same on all ranks, and what every sequence's rows are."""

    def __init__(self, chance: random.Random, world: int, rank: int) -> None:
        count = chance.choice([0, 1, 2, 7, 40])
        draw = torch.Generator().manual_seed(chance.randrange(1 << 30))
        holders = chance.sample(range(world), chance.randint(1, world))
        self.homes = torch.tensor([chance.choice(holders) for _ in range(count)], dtype=torch.int64)
        longest = chance.choice([3, 500])
        self.lengths = torch.tensor([chance.choice([0, chance.randint(0, longest)]) for _ in range(count)]).long()
        self.covered = torch.minimum(
            self.lengths, torch.tensor([chance.randint(0, longest) for _ in range(count)]).long()
        )
        readers = chance.sample(range(world), chance.randint(0, world))
        self.wants = [
            chance.sample(range(count), chance.randint(0, count)) if r in readers else [] for r in range(world)
        ]
        if chance.random() < 0.4:  # as data parallel groups of two ranks
            self.wants = [self.wants[r // 2 * 2] for r in range(world)]
        choices = [None, [], [0, 1, 2], [3, 4, 5], [1, 4], [5], list(range(6))]
        self.parts = {"routing": [chance.choice(choices) for _ in range(world)]} if chance.random() < 0.8 else {}
        self.kinds = {name: KINDS[name] for name in chance.sample(list(KINDS), chance.randint(1, len(KINDS)))}
        self.parts = {name: parts for name, parts in self.parts.items() if name in self.kinds}
        by_name = {name: self.covered if name == "routing" else self.lengths for name in self.kinds}
        self.rows = {
            name: [
                torch.randint(0, 2 if dtype is torch.bool else 100, (int(length), *tail), generator=draw).to(dtype)
                for length in by_name[name]
            ]
            for name, (dtype, tail) in self.kinds.items()
        }
        self.given = by_name if "routing" in self.kinds or chance.random() < 0.3 else self.lengths
        self.columns, own_chance = {}, random.Random(chance.randrange(1 << 30) + rank)
        for name, rows in self.rows.items():
            dtype, tail = self.kinds[name]
            local = [row for row, home in zip(rows, self.homes.tolist(), strict=True) if home == rank]
            column = torch.cat([torch.empty((0, *tail), dtype=dtype), *local])
            if own_chance.random() < 0.3:  # lies in shared memory already
                column = shared_memory.empty(column.shape, dtype).copy_(column)
            if local or own_chance.random() < 0.5:
                self.columns[name] = column

    def deliver(self, post: RowExchange) -> Delivery:
        return post.deliver(self.columns, self.kinds, self.given, self.homes, self.wants, self.parts)

    def wrong(self, delivery: Delivery, rank: int) -> list[str]:
        actual = []
        for name in sorted(self.kinds):
            got, part = delivery.rows(name), self.parts.get(name, {rank: None})[rank]
            expected = [self.rows[name][number] for number in self.wants[rank]]
            if part is not None:
                expected = [rows[:, torch.tensor(part, dtype=torch.int64)] for rows in expected]
            same = [
                a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
                for a, b in zip(got, expected, strict=False)
            ]
            if len(got) != len(expected) or not all(same):
                actual.append(f"{name}: {same} of {[tuple(rows.shape) for rows in expected]}")
        return actual


def cases(post: RowExchange, rank: int, world: int, seed: int) -> dict[str, Any]:
    chance, wrong, waiting = random.Random(seed), [], []
    for number in range(60):
        case = Case(chance, world, rank)
        if number % 4:
            wrong += [f"{number} {text}" for text in case.wrong(case.deliver(post), rank)]
        else:
            waiting.append((case, case.deliver(post)))
        if len(waiting) == 3:
            dropped = waiting.pop(1)  # read by nobody
            wrong += [text for case, delivery in reversed(waiting) for text in case.wrong(delivery, rank)]
            waiting.clear()
            del dropped
    del case, waiting
    gc.collect()
    return {"wrong": wrong, "sent": post.bytes_sent, "machines": post.machines}


def gathers(post: RowExchange, rank: int, world: int, seed: int) -> dict[str, Any]:
    """Values of all ranks: small, of one size, of one speaker; rows; sums. And objects to some ranks."""
    sizes = {
        "none": [0] * world,
        "small": [10 * number for number in range(world)],
        "alike": [3_000_000 + number for number in range(world)],
        "one speaker": [0] * (world - 1) + [5_000_000],
        "two speakers": ([2_000_000, 4_000_000] + [300] * (world - 2))[:world],
    }
    wrong = []
    for name, share in sizes.items():
        draw = [torch.randint(0, 99, (size, 1), generator=torch.Generator().manual_seed(size)) for size in share]
        if [len(value) for value in ranks.all_gather_objects(bytes(share[rank]))] != share:
            wrong.append(f"objects, {name}")
        if not torch.equal(row_exchange.WorldComm().all_gather_rows(draw[rank]), torch.cat(draw)):
            wrong.append(f"rows, {name}")
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        parts = [
            torch.randn(5, generator=torch.Generator().manual_seed(number)).mul(9).to(dtype) for number in range(world)
        ]
        expected = parts[0].clone()
        for part in parts[1:]:
            expected += part
        argument = parts[rank].clone()
        if not torch.equal(row_exchange.WorldComm().all_reduce(argument), expected) or not torch.equal(
            argument, parts[rank]
        ):
            wrong.append(f"total of {dtype}")
    if row_exchange.WorldComm().all_reduce(torch.tensor(rank + 1)).item() != world * (world + 1) // 2:
        wrong.append("total of a number")
    chance = random.Random(seed)
    for _ in range(20):
        texts = {
            (source, reader): {"text": "word " * chance.choice([0, 1, 3000])}
            for source in range(world)
            for reader in range(world)
            if chance.random() < 0.5
        }
        got = post.exchange_objects({reader: text for (source, reader), text in texts.items() if source == rank})
        if got != {source: text for (source, reader), text in texts.items() if reader == rank}:
            wrong.append("exchange of objects")
    return {"wrong": wrong}


def lasting(post: RowExchange, rank: int, world: int, seed: int) -> dict[str, Any]:
    """What a rank holds of another stays as it was sent, whatever becomes of the sender's, and goes with its last."""
    homes = torch.arange(world)
    lengths = torch.full((world,), 50_000)
    wants = [[(r + 1) % world, r] for r in range(world)]  # of the next rank, and its own
    kinds: dict[str, Any] = {"copied": (torch.int64, ()), "shared": (torch.int64, ())}
    columns = {"copied": torch.arange(50_000) + rank, "shared": shared_memory.empty((50_000,), torch.int64)}
    columns["shared"].copy_(columns["copied"] * 2)
    actual: dict[str, Any] = {"made": shared_memory.allocated_bytes()}
    delivery = post.deliver(columns, kinds, lengths, homes, wants)
    copied, shared = delivery.rows("copied"), delivery.rows("shared")
    local = columns["copied"].data_ptr(), columns["shared"].data_ptr()
    actual["own rows are views"] = (copied[1].data_ptr(), shared[1].data_ptr()) == local
    actual["wrote"] = dict(post.bytes_sent)
    ranks.barrier()
    keep = shared[0][7:9]
    shared[0][0] = -1  # the reader's own from here on
    ranks.barrier()
    actual["sender's stays"] = int(columns["shared"][0])
    columns["copied"].zero_()  # was written for the neighbours before, and a rank may use its own again
    del columns, local, shared, delivery
    gc.collect()
    ranks.barrier()
    actual["theirs"] = [copied[0][:2].tolist(), keep.tolist()]
    actual["given back"] = [shared_memory.allocated_bytes(), len(memories())]
    return actual


def killed(post: RowExchange, rank: int, world: int, seed: int) -> dict[str, Any]:
    """A rank is gone after the first of two deliveries, in which everybody wants everything."""
    kinds: dict[str, Any] = {"tokens": (torch.int64, ())}
    homes, lengths, wants = torch.arange(world), torch.full((world,), 9), [list(range(world))] * world
    columns = {"tokens": torch.full((9,), rank)}
    first = post.deliver(columns, kinds, lengths, homes, wants).rows("tokens")
    actual: dict[str, Any] = {"first": [int(rows[8]) for rows in first], "second": None}
    ranks.barrier()
    if rank != 1:
        try:
            post.deliver(columns, kinds, lengths, homes, wants).rows("tokens")
        except Exception as error:
            actual["second"] = type(error).__name__
    print("RESULT " + json.dumps(actual), flush=True)
    os._exit(0)  # as the kernel ends a process that is killed: without a word to anybody


def main() -> None:
    what, seed, *remaining = sys.argv[1:]
    world = int(os.environ["WORLD_SIZE"])
    ranks.initialize(ParallelConfig(world_size=world), timeout_s=60.0)
    rank = dist.get_rank()
    post = RowExchange(per_machine=int(remaining[0]) if remaining else None)
    result = globals()[what](post, rank, world, int(seed))
    gc.collect()
    ranks.barrier()
    post.close()
    result["held"], result["descriptors"] = shared_memory.allocated_bytes(), len(memories())
    print("RESULT " + json.dumps(result), flush=True)
    ranks.barrier()
    ranks.shutdown()


def memories() -> list[str]:
    """Descriptors of shared memory that this process has open."""
    names = [os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    return [name for name in names if os.path.islink(name) and "megarl" in os.readlink(name)]


if __name__ == "__main__":
    main()
