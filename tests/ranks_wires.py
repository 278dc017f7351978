"""Two ranks that access buffers of a transfer in flight, as argv[1] says."""

import json
import sys

import torch
import torch.distributed as dist
import wires

from megarl.config import ParallelConfig
from megarl.parallel import ranks

what = sys.argv[1]
ranks.initialize(ParallelConfig(world_size=2))
me = dist.get_rank()
out, taken = torch.full((4,), float(me)), torch.zeros(4)
operations = [dist.P2POp(dist.isend, out, 1 - me), dist.P2POp(dist.irecv, taken, 1 - me)]
error = ""
works = dist.batch_isend_irecv(operations)
try:
    if what == "read":
        taken[2:].sum()
    elif what == "written":
        out[:1].add_(1)
    else:
        out.sum()  # reading a sent buffer is allowed, as is any other tensor
        taken.view(2, 2)
        torch.ones(4).add_(1)
except wires.TouchedTooEarly as problem:
    error = str(problem)
for work in works:
    work.wait()
taken.add_(1)
print("RESULT", json.dumps({"error": error, "taken": taken.tolist()}))
ranks.shutdown()
