"""Create many gloo groups, use all of them at once, and print the threads that serve them."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "megatron"))

import torch
import torch.distributed as dist

torch.set_num_threads(1)

import tiny  # noqa: E402

from megarl.parallel import ranks  # noqa: E402


def main() -> dict[str, Any]:
    rank = ranks.initialize(tiny.config(world=2).parallel, timeout_s=60.0).job.rank
    groups = [ranks.new_host_group((0, 1)) for _ in range(12)]
    tensors = [torch.full((50_000,), float(i + rank)) for i in range(len(groups))]
    works = [dist.all_reduce(x, group=group, async_op=True) for x, group in zip(tensors, groups, strict=True)]
    for work in works:
        work.wait()
    short = dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=7))
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return {
        "sums": [x.unique().tolist() for x in tensors],
        "timeouts": [group._get_backend(torch.device("cpu")).options._timeout.seconds for group in (groups[0], short)],
        "threads": names.count("gloo_tcp_loop"),
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main()), flush=True)
    ranks.shutdown()
