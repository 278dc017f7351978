"""Two ranks with a timeout of one second, one of which works for longer and then exits without a word.

Prints the timeouts of all groups and the outcome of each wait.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "megatron"))

import torch
import torch.distributed as dist

torch.set_num_threads(1)

import tiny  # noqa: E402

from megarl.parallel import kv_store, ranks  # noqa: E402


def timeouts() -> list[float]:
    """Return the distinct timeouts of this rank's groups in seconds."""
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.rank() >= 0]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return sorted({backend.options._timeout.total_seconds() for backend in backends})


def main() -> dict[str, object]:
    layout_ranks = ranks.initialize(tiny.config(tp=2, world=2).parallel, timeout_s=60.0)
    local = ranks.new_host_group([0, 1])
    initial_timeouts = timeouts()
    ranks._timeout_s = 1.0
    ranks._set_timeouts(1.0)
    block_timeouts = []
    with ranks.with_timeout(60.0):
        block_timeouts += timeouts()
        if layout_ranks.job.rank:
            time.sleep(2.5)
        ranks.barrier()
        dist.barrier(group=local)
    after = timeouts()
    try:
        with ranks.with_timeout(30.0):
            raise KeyError
    except KeyError:
        after += timeouts()
    flags_and_cause = []
    ranks.set_flag("first") if layout_ranks.job.rank else None
    ranks.barrier()
    flags_and_cause += [
        ranks.is_flag_set("first"),
        ranks.is_flag_set("second"),
        kv_store.exchange_root_cause(OSError("x"), "lost"),
    ]
    ranks.barrier()  # no rank reports a root cause before both have asked
    result: dict[str, object] = {
        "created": initial_timeouts,
        "inside": block_timeouts,
        "after": after,
        "flags_and_cause": flags_and_cause,
    }
    if layout_ranks.job.rank:
        for text in ("the first thing", "another"):
            kv_store.exchange_root_cause(ValueError(text), "fault")
        print("RESULT " + json.dumps(result), flush=True)
        os._exit(0)  # like a killed process, without any cleanup
    try:
        with ranks.with_timeout(3600.0):
            ranks.barrier()
    except RuntimeError as error:
        result["after_death"] = [type(error).__name__, kv_store.exchange_root_cause(error, "lost")]
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
