"""All-gather with each algorithm and print whether every rank has what the others contributed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "megatron"))

import torch

torch.set_num_threads(1)

import tiny  # noqa: E402

from megarl.parallel import collectives, ranks  # noqa: E402


def main() -> dict[str, bool]:
    world = int(os.environ["WORLD_SIZE"])
    rank = ranks.initialize(tiny.config(world=world).parallel, timeout_s=60.0).job.rank
    groups = {n: ranks.new_host_group(range(n)) for n in range(1, world + 1)}
    is_correct = {}
    for n, group in groups.items():
        if rank >= n:
            continue
        for length in (1, 7, 100_000):
            contribution = torch.arange(length) * (rank + 1)
            expected = torch.arange(length) * torch.arange(1, n + 1)[:, None]
            for name, exchange in (
                ("doubling", collectives.bruck_all_gather),
                ("ring", collectives.all_gather_small),
            ):
                is_correct[f"{name} {n} {length}"] = torch.equal(exchange(contribution, group, 60.0), expected)
        expected_parts = [bytes([source]) * (source * 300) for source in range(n)]
        result = collectives.ragged_all_gather(
            torch.frombuffer(bytearray(expected_parts[rank]), dtype=torch.uint8)
            if rank
            else torch.empty(0, dtype=torch.uint8),
            group,
            60.0,
        )
        is_correct[f"all_gather {n}"] = [bytes(part.tolist()) for part in result] == expected_parts
    ranks.barrier()
    return is_correct


if __name__ == "__main__":
    print("RESULT " + json.dumps(main()), flush=True)
    ranks.shutdown()
