"""Cost of sending tensors and values between ranks, relative to the best possible.

    .venv/bin/python tools/bench_messages.py [--mb 1 16 256 1024] [--ranks 4] [--repeats 5]

First a message between two processes of this machine: `RowExchange.deliver` until the reader has read every byte,
against a plain copy in one process into new memory that is then read, and against gloo. Then a gather of values to
which only few ranks contribute: `ranks.all_gather_objects` against torch's own, which pads all to the largest.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from local_ranks import run
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.config import ParallelConfig
from megarl.config.command_line import Parser, int_in_range, run_cli
from megarl.parallel import ranks
from megarl.parallel.row_exchange import RowExchange

SHARES = (("1 of 100 bytes each", 0, 100), ("one rank 8 MB", 1, 8 << 20), ("two ranks 4 MB", 2, 4 << 20))


def messages(post: RowExchange, size: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each method to move `size` bytes from rank 0 to rank 1; on rank 0."""
    rank, elapsed = dist.get_rank(), {"plain": [], "post": [], "gloo": []}  # type: ignore[var-annotated]
    source = torch.arange(size // 8)
    kinds = {"x": (torch.int64, ())}
    columns = {"x": source if rank == 0 else source[:0]}
    lengths, homes, wants = torch.tensor([size // 8]), torch.tensor([0]), [[], [0]]

    def plain() -> torch.Tensor:
        # Not torch.empty: malloc would return pages that have already been touched.
        new = torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON), dtype=source.dtype)
        return new.copy_(source)

    def by_post() -> torch.Tensor:
        delivery = post.deliver(columns, kinds, lengths, homes, wants)
        return delivery.rows("x")[0] if rank else source[:0]

    def by_gloo() -> torch.Tensor:
        if rank == 0:
            dist.send(source, 1, group=ranks.host_group())
            return source[:0]
        into = torch.empty_like(source)
        dist.recv(into, 0, group=ranks.host_group())
        return into

    for _ in range(repeats + 1):
        for name, method in (("plain", plain), ("post", by_post), ("gloo", by_gloo)):
            ranks.barrier()
            start = time.monotonic()
            if name != "plain" or rank == 0:
                got = method()
                read = int(got.sum())  # touch every byte where it is needed
                ended = time.monotonic()
                assert not len(got) or read == size // 8 * (size // 8 - 1) // 2
                del got
            else:
                ended = start
            times = ranks.all_gather_objects((start, ended))
            elapsed[name].append(times[0 if name == "plain" else 1][1] - times[0][0])
    return {name: seconds[1:] for name, seconds in elapsed.items()}


def gathers(repeats: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of each method, for each of SHARES."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def torchs(value: bytes) -> list[bytes]:
        values = [b""] * world
        dist.all_gather_object(values, value, group=ranks.host_group())
        return values

    medians = {}
    for title, speakers, size in SHARES:
        value = bytes(size) if not speakers or rank < speakers else b""
        methods: dict[str, Callable[[bytes], list[bytes]]] = {"ours": ranks.all_gather_objects, "torch": torchs}
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(1 + (repeats if speakers else 50 * repeats)):
            for name, method in methods.items():
                ranks.barrier()
                start = time.perf_counter()
                assert len(method(value)) == world
                seconds[name].append(time.perf_counter() - start)
        medians[title] = {name: 1000 * statistics.median(elapsed[1:]) for name, elapsed in seconds.items()}
    return medians


def measure(sizes: list[int], repeats: int) -> None:
    """Run as one of the ranks."""
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    ranks.initialize(ParallelConfig(world_size=world))
    result: dict[str, object] = {}
    if world == 2:
        post = RowExchange()
        result = {str(size): messages(post, size << 20, repeats) for size in sizes}
        post.close()
    result = {"messages": result, "gathers": gathers(repeats)}
    print("RESULT " + json.dumps(result), flush=True)
    ranks.barrier()
    ranks.shutdown()


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--mb", type=int_in_range(), nargs="+", default=[1, 16, 256, 1024], help="sizes of a message")
    parser.add_argument("--ranks", type=int_in_range(), default=4, help="of the gather")
    parser.add_argument("--repeats", type=int_in_range(), default=5)
    parser.add_argument("--as-rank", action="store_true", help="used by the tool itself")
    options = parser.parse_args()
    if options.as_rank:
        measure(options.mb, options.repeats)
        return 0
    command = [__file__, "--as-rank", "--repeats", str(options.repeats), "--mb", *map(str, options.mb)]
    console = Console(width=100)
    table = Table("MB", "plain copy GB/s", "post GB/s", "gloo GB/s", "post over plain copy", box=box.SIMPLE)
    for size, seconds_by_method in run(command, 2)["messages"].items():
        speed = {
            name: int(size) * 2**20 / 1e9 / statistics.median(elapsed) for name, elapsed in seconds_by_method.items()
        }
        table.add_row(size, *(f"{value:.2f}" for value in speed.values()), f"{speed['post'] / speed['plain']:.2f}")
    console.print(table)
    table = Table(f"gather, {options.ranks} ranks", "ours ms", "torch ms", box=box.SIMPLE)
    for title, elapsed in run(command, options.ranks)["gathers"].items():
        table.add_row(title, f"{elapsed['ours']:.2f}", f"{elapsed['torch']:.2f}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
