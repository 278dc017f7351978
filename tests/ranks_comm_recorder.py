"""Two ranks that access buffers of a transfer in flight, as argv[1] says."""

import json
import sys

import comm_recorder
import torch
import torch.distributed as dist

from megarl.config import ParallelConfig
from megarl.parallel import ranks

access = sys.argv[1]
ranks.initialize(ParallelConfig(world_size=2))
rank = dist.get_rank()
out, received = torch.full((4,), float(rank)), torch.zeros(4)
operations = [dist.P2POp(dist.isend, out, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
error = ""
works = dist.batch_isend_irecv(operations)
try:
    if access == "read":
        received[2:].sum()
    elif access == "written":
        out[:1].add_(1)
    else:
        out.sum()  # reading a sent buffer is allowed, as is any other tensor
        received.view(2, 2)
        torch.ones(4).add_(1)
except comm_recorder.EarlyBufferAccess as problem:
    error = str(problem)
for work in works:
    work.wait()
received.add_(1)
print("RESULT", json.dumps({"error": error, "received": received.tolist()}))
ranks.shutdown()
