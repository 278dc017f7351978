"""Exchanges of all ranks: prints whether each has what the others gave, in rounds that double as round gloo's ring."""

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
    right = {}
    for n, group in groups.items():
        if rank >= n:
            continue
        for length in (1, 7, 100_000):
            mine = torch.arange(length) * (rank + 1)
            expected = torch.arange(length) * torch.arange(1, n + 1)[:, None]
            for name, exchange in (
                ("doubling", collectives.bruck_all_gather),
                ("around", collectives.all_gather_small),
            ):
                right[f"{name} {n} {length}"] = torch.equal(exchange(mine, group, 60.0), expected)
        value = [bytes([source]) * (source * 300) for source in range(n)]
        result = collectives.ragged_all_gather(
            torch.frombuffer(bytearray(value[rank]), dtype=torch.uint8) if rank else torch.empty(0, dtype=torch.uint8),
            group,
            60.0,
        )
        right[f"all_gather {n}"] = [bytes(share.tolist()) for share in result] == value
    ranks.barrier()
    return right


if __name__ == "__main__":
    print("RESULT " + json.dumps(main()), flush=True)
    ranks.shutdown()
