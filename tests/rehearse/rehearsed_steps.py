"""Rehearsals of the steps of `recorded_steps.py` by all ranks of each number of ranks in argv; prints the records."""

import json
import os
import sys
import traceback
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "megatron")]

from megarl.rehearse import fake_job, play  # noqa: E402

play.prepare()
import recorded_steps  # noqa: E402

folder = Path(sys.argv[1])


def rehearse(world: int, rank: int) -> None:
    job = fake_job.join(rank, world, 8)
    from megarl.rehearse import megatron_values
    from megarl.rehearse.host_reads import HostReads

    megatron_values.balance_experts()
    megatron_values.align_param_groups(trains_experts=True)
    with HostReads():
        result = recorded_steps.take_steps(world, True, lambda: job.events)
    (folder / f"{world}_{rank}.json").write_text(json.dumps(result))


for world in map(int, sys.argv[2:]):
    for rank in range(world):
        if not (pid := os.fork()):
            try:
                rehearse(world, rank)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if os.waitpid(pid, 0)[1]:
            sys.exit(f"rank {rank} of {world} has failed")
