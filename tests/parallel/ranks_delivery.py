"""Ranks that deliver rows to each other: random cases against a gather of everything, and what must hold besides.

    ranks_delivery.py cases SEED [PER_MACHINE]

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
from megarl.parallel import ranks, shared_memory  # noqa: E402
from megarl.parallel.delivery import Delivery, Post  # noqa: E402

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
            own = [row for row, home in zip(rows, self.homes.tolist(), strict=True) if home == rank]
            column = torch.cat([torch.empty((0, *tail), dtype=dtype), *own])
            if own_chance.random() < 0.3:  # lies in shared memory already
                column = shared_memory.empty(column.shape, dtype).copy_(column)
            if own or own_chance.random() < 0.5:
                self.columns[name] = column

    def deliver(self, post: Post) -> Delivery:
        return post.deliver(self.columns, self.kinds, self.given, self.homes, self.wants, self.parts)

    def wrong(self, delivery: Delivery, rank: int) -> list[str]:
        found = []
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
                found.append(f"{name}: {same} of {[tuple(rows.shape) for rows in expected]}")
        return found


def cases(post: Post, rank: int, world: int, seed: int) -> dict[str, Any]:
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
    return {"wrong": wrong, "sent": post.sent, "machines": post.machines}


def main() -> None:
    what, seed, *rest = sys.argv[1:]
    world = int(os.environ["WORLD_SIZE"])
    ranks.initialize(ParallelConfig(world_size=world), timeout_s=60.0)
    rank = dist.get_rank()
    post = Post(per_machine=int(rest[0]) if rest else None)
    result = globals()[what](post, rank, world, int(seed))
    gc.collect()
    ranks.barrier()
    post.close()
    result["held"], result["descriptors"] = shared_memory.held(), len(memories())
    print("RESULT " + json.dumps(result), flush=True)
    ranks.barrier()
    ranks.shutdown()


def memories() -> list[str]:
    """Descriptors of shared memory that this process has open."""
    names = [os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    return [name for name in names if os.path.islink(name) and "megarl" in os.readlink(name)]


if __name__ == "__main__":
    main()
