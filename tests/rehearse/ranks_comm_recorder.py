"""Two ranks that access buffers of a transfer in flight, or combine collectives into one, as argv[1] says."""

import json
import sys

import torch
import torch.distributed as dist

from megarl.config import ParallelConfig
from megarl.parallel import ranks
from megarl.rehearse import comm_recorder

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
if access == "coalesced":
    halves, whole = torch.zeros(2), torch.ones(4)
    for call in (
        lambda: dist.all_reduce(whole),
        lambda: dist.all_gather_into_tensor(whole, halves),
        lambda: dist.reduce_scatter_tensor(halves, whole),
    ):
        with dist._coalescing_manager(async_ops=True) as work:
            call()
            call()
        work.wait()
    # Rank 0 sends two elements to rank 1, which sends it one.
    dist.all_to_all_single(torch.zeros(2 if rank else 1), out[: 2 - rank], [rank * 2, 1 - rank], [rank, 2 - 2 * rank])
print("RESULT", json.dumps({"error": error, "received": received.tolist()}))
ranks.shutdown()
