"""A run whose engines lose a layer after the first push, behind everybody's back: megarl.train, as ranks.

argv: as of megarl.train. Nothing raises, no hash is wrong: the bytes came as they were sent.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import torch

from megarl.engine.sglang_engine import allocate
from megarl.engine.weight_sender import HandOff
from megarl.flow import HybridFlow
from megarl.launch.exit_status import one_line
from megarl.workers.weight_sync import WeightPush

LOST = "model.layers.1.self_attn.o_proj.weight"
push = WeightPush.push


def sabotaged(self: WeightPush, local: Mapping[str, torch.Tensor], version: int) -> bool:
    done = push(self, local, version)
    if version == 1 and self.engine_rank is not None:
        self._on_engine(lambda engine: engine.begin_update())
        hand_over = HandOff(self.engine, self.collect)
        dtype, shape = hand_over.ask({"do": "describe"})["tensors"][LOST]
        data = torch.randn(math.prod(shape)).to(getattr(torch, dtype)).view(torch.uint8)
        bytes_ = allocate(len(data)).copy_(data)
        whole = [LOST, -1, 0, shape[0], 0, shape[1], 0, -1]
        hand_over.open([bytes_, allocate(1)])
        hand_over(bytes_, {"do": "write", "version": 1, "tensor_dtype": {LOST: dtype}, "slices": [whole]})
        assert hand_over.settle() == {"wrong": []}
        hand_over.close()
        self._on_engine(lambda engine: engine.end_update(version))
    return done


if __name__ == "__main__":
    WeightPush.push = sabotaged  # type: ignore[method-assign]
    with one_line():
        HybridFlow(sys.argv[1], sys.argv[2:]).run()
