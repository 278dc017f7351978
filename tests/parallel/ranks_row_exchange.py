"""Exchange rows between ranks: random cases against a gather of everything, and the lifetime of memory.

    ranks_row_exchange.py CASE SEED [PER_MACHINE]

Prints mismatches and the bytes that were sent.
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
    """A random delivery, the same on all ranks, with every sequence's rows."""

    def __init__(self, rng: random.Random, world: int, rank: int) -> None:
        count = rng.choice([0, 1, 2, 7, 40])
        draw = torch.Generator().manual_seed(rng.randrange(1 << 30))
        holders = rng.sample(range(world), rng.randint(1, world))
        self.homes = torch.tensor([rng.choice(holders) for _ in range(count)], dtype=torch.int64)
        max_length = rng.choice([3, 500])
        self.lengths = torch.tensor([rng.choice([0, rng.randint(0, max_length)]) for _ in range(count)]).long()
        self.covered = torch.minimum(
            self.lengths, torch.tensor([rng.randint(0, max_length) for _ in range(count)]).long()
        )
        readers = rng.sample(range(world), rng.randint(0, world))
        self.wants = [rng.sample(range(count), rng.randint(0, count)) if r in readers else [] for r in range(world)]
        if rng.random() < 0.4:  # as data parallel groups of two ranks
            self.wants = [self.wants[r // 2 * 2] for r in range(world)]
        choices = [None, [], [0, 1, 2], [3, 4, 5], [1, 4], [5], list(range(6))]
        self.parts = {"routing": [rng.choice(choices) for _ in range(world)]} if rng.random() < 0.8 else {}
        self.kinds = {name: KINDS[name] for name in rng.sample(list(KINDS), rng.randint(1, len(KINDS)))}
        self.parts = {name: parts for name, parts in self.parts.items() if name in self.kinds}
        by_name = {name: self.covered if name == "routing" else self.lengths for name in self.kinds}
        self.rows = {
            name: [
                torch.randint(0, 2 if dtype is torch.bool else 100, (int(length), *shape), generator=draw).to(dtype)
                for length in by_name[name]
            ]
            for name, (dtype, shape) in self.kinds.items()
        }
        self.given = by_name if "routing" in self.kinds or rng.random() < 0.3 else self.lengths
        self.columns, rank_rng = {}, random.Random(rng.randrange(1 << 30) + rank)
        for name, rows in self.rows.items():
            dtype, shape = self.kinds[name]
            local = [row for row, owner in zip(rows, self.homes.tolist(), strict=True) if owner == rank]
            column = torch.cat([torch.empty((0, *shape), dtype=dtype), *local])
            if rank_rng.random() < 0.3:  # a column that is in shared memory already
                column = shared_memory.empty(column.shape, dtype).copy_(column)
            if local or rank_rng.random() < 0.5:
                self.columns[name] = column

    def deliver(self, exchange: RowExchange) -> Delivery:
        return exchange.deliver(self.columns, self.kinds, self.given, self.homes, self.wants, self.parts)

    def mismatches(self, delivery: Delivery, rank: int) -> list[str]:
        errors = []
        for name in sorted(self.kinds):
            received, part = delivery.rows(name), self.parts.get(name, {rank: None})[rank]
            expected = [self.rows[name][number] for number in self.wants[rank]]
            if part is not None:
                expected = [rows[:, torch.tensor(part, dtype=torch.int64)] for rows in expected]
            is_equal = [
                a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
                for a, b in zip(received, expected, strict=False)
            ]
            if len(received) != len(expected) or not all(is_equal):
                errors.append(f"{name}: {is_equal} of {[tuple(rows.shape) for rows in expected]}")
        return errors


def cases(exchange: RowExchange, rank: int, world: int, seed: int) -> dict[str, Any]:
    rng, mismatches, waiting = random.Random(seed), [], []
    for number in range(60):
        case = Case(rng, world, rank)
        if number % 4:
            mismatches += [f"{number} {text}" for text in case.mismatches(case.deliver(exchange), rank)]
        else:
            waiting.append((case, case.deliver(exchange)))
        if len(waiting) == 3:
            dropped = waiting.pop(1)  # a delivery that is never read
            mismatches += [text for case, delivery in reversed(waiting) for text in case.mismatches(delivery, rank)]
            waiting.clear()
            del dropped
    del case, waiting
    gc.collect()
    return {"wrong": mismatches, "sent": exchange.bytes_sent, "machines": exchange.machines}


def gathers(exchange: RowExchange, rank: int, world: int, seed: int) -> dict[str, Any]:
    """Gather values of various sizes and rows, sum in order, and send objects to some ranks."""
    sizes = {
        "none": [0] * world,
        "small": [10 * number for number in range(world)],
        "alike": [3_000_000 + number for number in range(world)],
        "one contributor": [0] * (world - 1) + [5_000_000],
        "two contributors": ([2_000_000, 4_000_000] + [300] * (world - 2))[:world],
    }
    mismatches = []
    for name, num_rows in sizes.items():
        draw = [torch.randint(0, 99, (size, 1), generator=torch.Generator().manual_seed(size)) for size in num_rows]
        if [len(value) for value in ranks.all_gather_objects(bytes(num_rows[rank]))] != num_rows:
            mismatches.append(f"objects, {name}")
        if not torch.equal(row_exchange.WorldComm().all_gather_rows(draw[rank]), torch.cat(draw)):
            mismatches.append(f"rows, {name}")
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
        parts = [
            torch.randn(5, generator=torch.Generator().manual_seed(number)).mul(9).to(dtype) for number in range(world)
        ]
        expected = parts[0].clone()
        for part in parts[1:]:
            expected += part
        reduced = parts[rank].clone()
        if not torch.equal(row_exchange.WorldComm().all_reduce(reduced), expected) or not torch.equal(
            reduced, parts[rank]
        ):
            mismatches.append(f"total of {dtype}")
    if row_exchange.WorldComm().all_reduce(torch.tensor(rank + 1)).item() != world * (world + 1) // 2:
        mismatches.append("total of a number")
    rng = random.Random(seed)
    for _ in range(20):
        texts = {
            (source, reader): {"text": "word " * rng.choice([0, 1, 3000])}
            for source in range(world)
            for reader in range(world)
            if rng.random() < 0.5
        }
        received = exchange.exchange_objects(
            {reader: text for (source, reader), text in texts.items() if source == rank}
        )
        if received != {source: text for (source, reader), text in texts.items() if reader == rank}:
            mismatches.append("exchange of objects")
    return {"wrong": mismatches}


def lifetime(exchange: RowExchange, rank: int, world: int, seed: int) -> dict[str, Any]:
    """Received rows do not change with the sender's tensors, and their memory is freed with the last of them."""
    owners = torch.arange(world)
    lengths = torch.full((world,), 50_000)
    requests = [[(r + 1) % world, r] for r in range(world)]  # the next rank's sequence, and the local one
    column_types: dict[str, Any] = {"copied": (torch.int64, ()), "shared": (torch.int64, ())}
    columns = {"copied": torch.arange(50_000) + rank, "shared": shared_memory.empty((50_000,), torch.int64)}
    columns["shared"].copy_(columns["copied"] * 2)
    result: dict[str, Any] = {"allocated": shared_memory.allocated_bytes()}
    delivery = exchange.deliver(columns, column_types, lengths, owners, requests)
    copied, shared = delivery.rows("copied"), delivery.rows("shared")
    local = columns["copied"].data_ptr(), columns["shared"].data_ptr()
    result["local_rows_are_views"] = (copied[1].data_ptr(), shared[1].data_ptr()) == local
    result["bytes_sent"] = dict(exchange.bytes_sent)
    ranks.barrier()
    keep = shared[0][7:9]
    shared[0][0] = -1  # copied on write for the reader
    ranks.barrier()
    result["sender_row"] = int(columns["shared"][0])
    columns["copied"].zero_()  # readers have their copy, so the sender may reuse its tensor
    del columns, local, shared, delivery
    gc.collect()
    ranks.barrier()
    result["received"] = [copied[0][:2].tolist(), keep.tolist()]
    result["after_free"] = [shared_memory.allocated_bytes(), len(open_shared_memory())]
    return result


def dead_rank(exchange: RowExchange, rank: int, world: int, seed: int) -> dict[str, Any]:
    """Rank 1 exits after the first of two deliveries in which every rank wants every row."""
    column_types: dict[str, Any] = {"tokens": (torch.int64, ())}
    owners, lengths, requests = torch.arange(world), torch.full((world,), 9), [list(range(world))] * world
    columns = {"tokens": torch.full((9,), rank)}
    first = exchange.deliver(columns, column_types, lengths, owners, requests).rows("tokens")
    result: dict[str, Any] = {"first": [int(rows[8]) for rows in first], "second": None}
    ranks.barrier()
    if rank != 1:
        try:
            exchange.deliver(columns, column_types, lengths, owners, requests).rows("tokens")
        except Exception as error:
            result["second"] = type(error).__name__
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)  # like a killed process, without any cleanup


def main() -> None:
    test_case, seed, *args = sys.argv[1:]
    world = int(os.environ["WORLD_SIZE"])
    ranks.initialize(ParallelConfig(world_size=world), timeout_s=60.0)
    rank = dist.get_rank()
    exchange = RowExchange(per_machine=int(args[0]) if args else None)
    result = globals()[test_case](exchange, rank, world, int(seed))
    gc.collect()
    ranks.barrier()
    exchange.close()
    result["allocated_at_end"], result["descriptors"] = shared_memory.allocated_bytes(), len(open_shared_memory())
    print("RESULT " + json.dumps(result), flush=True)
    ranks.barrier()
    ranks.shutdown()


def open_shared_memory() -> list[str]:
    """Return the shared memory descriptors that this process has open."""
    names = [os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    return [name for name in names if os.path.islink(name) and "megarl" in os.readlink(name)]


if __name__ == "__main__":
    main()
