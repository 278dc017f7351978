"""Trains like megarl.train, with the same arguments, but corrupts one engine tensor after the first weight sync, of an
adapter if the engine serves adapters.

The random bytes are sent correctly, so no hash differs and nothing raises.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import torch

from megarl.engine.weight_sender import WeightSender
from megarl.flow import HybridFlow
from megarl.launch.exit_status import exit_on_error
from megarl.parallel.device import allocate_shared
from megarl.workers.weight_sync import WeightSync

TENSOR = "model.layers.1.self_attn.o_proj.weight"
sync = WeightSync.sync


def sync_and_corrupt(self: WeightSync, local: Mapping[str, torch.Tensor], version: int) -> bool:
    done = sync(self, local, version)
    if version == 1 and self.engine_rank is not None:
        self._run_on_engine(lambda engine: engine.begin_update())
        sender = WeightSender(self.backend, self.engine, self.collect)
        name, tensors = TENSOR, sender.send_order({"do": "describe"}).get("tensors", {})
        if self.adapter:
            ((select, _),) = self._adapter_orders["prepare"]
            sender.send_order(select)
            tensors = select["factors"]
            name = next(name for name in tensors if ".layers.1." in name)
        dtype, shape = tensors[name]
        data = torch.randn(math.prod(shape)).to(getattr(torch, dtype)).view(torch.uint8)
        staging = allocate_shared(len(data)).copy_(data)
        all_rows = [name, -1, 0, shape[0], 0, shape[1], 0, -1]
        sender.open([staging, allocate_shared(1)])
        sender(staging, {"do": "write", "version": 1, "tensor_dtype": {name: dtype}, "slices": [all_rows]})
        assert sender.wait_pending() == {"wrong": []}
        sender.close()
        self._run_on_engine(lambda engine: engine.end_update(version))
    return done


if __name__ == "__main__":
    WeightSync.sync = sync_and_corrupt  # type: ignore[method-assign]
    with exit_on_error():
        HybridFlow(sys.argv[1], sys.argv[2:]).run()
