"""Build ranks of the recipes for many GPUs at full size, without memory: what Megatron allocates on each."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402
from fake_world import fake_rank, fake_tensors  # noqa: E402

from megarl.config import load_config  # noqa: E402
from megarl.megatron import optimizer  # noqa: E402
from megarl.megatron.build import build_chunks  # noqa: E402
from megarl.megatron.parameter_names import named_params  # noqa: E402
from megarl.models.registry import load_hf_config  # noqa: E402
from megarl.parallel import ranks  # noqa: E402


def build_rank(path: str, rank: int, *overrides: str) -> dict[str, Any]:
    config = load_config(path, overrides)
    hf = load_hf_config(config.model.hf_config)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(config.parallel.world_size)}
    with fake_rank(config.parallel.world_size, rank):
        layout_ranks = ranks.create_layout(config.parallel)
        with fake_tensors():
            chunks = build_chunks(hf, config, "actor")
            states = optimizer.build_optimizer(config.actor_optimizer, chunks, getattr(torch, config.model.dtype))
            buffers = [item for chunk in chunks for item in (*chunk.buffers, *chunk.expert_parallel_buffers)]
            state_tensors = {id(tensor): tensor for tensor in optimizer.state_tensors(states)}
            device_states = list(optimizer.device_state_tensors(states))
            host_grads = [
                grad
                for part in states.chained_optimizers
                if isinstance(part.optimizer, optimizer.HostAdamW)
                for grad in part.optimizer.cpu_copy_map_grad.values()
            ]
            pinned = {grad.untyped_storage()._cdata: grad.untyped_storage().nbytes() for grad in host_grads}
            shapes = {name: list(tensor.shape) for name, tensor in named_params(chunks, layout_ranks.ep_rank).items()}
            return {
                "shapes": shapes,
                "weights": sum(
                    item.nbytes for chunk in chunks for item in (*chunk.parameters(), *router_biases(chunk))
                ),
                "gradients": sum(item.grad_data.nbytes for item in buffers),
                "optimizer": sum(tensor.nbytes for tensor in state_tensors.values() if tensor.dim()),
                "optimizer on the device": sum(tensor.nbytes for tensor in device_states if tensor.dim()),
                "gradients on the host": sum(grad.nbytes for grad in host_grads),
                "pinned": sum(pinned.values()),
            }


def router_biases(chunk: torch.nn.Module) -> list[torch.Tensor]:
    return [buffer for name, buffer in chunk.named_buffers() if name.endswith("expert_bias")]


reports = [build_rank(*case) for case in json.loads(sys.argv[1])]
print("RESULT", json.dumps(reports))
