"""What an engine is told on a machine with GPUs. `engine_cpu.py` is its counterpart."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from megarl.config import Config
from megarl.models.fp8 import is_fp8
from megarl.models.registry import load_hf_config
from megarl.parallel import device
from megarl.reshard.engine_settings import safe_runner
from megarl.reshard.runners import check_blackwell
from megarl.rollout.allocator import check_allocator
from megarl.rollout.engine_cpu import NamedTensors

START_METHOD = ""
"""As SGLang does it: a process that has used CUDA cannot be forked."""


def check(settings: Mapping[str, Any]) -> None:
    """All that `server_args.check` lets pass may be set; the allocator must be able to share memory."""
    check_allocator(os.environ)


def server_args(config: Config, first_device: int) -> dict[str, Any]:
    """SGLang's settings for this kind of machine; the memory saver lets the weights sleep while the ranks train. Of a
    draft model, which is not pushed where it is not trained, SGLang keeps a copy on the host meanwhile."""
    blackwell = torch.cuda.get_device_capability()[0] >= 10
    runner = safe_runner(config.rollout.sglang, blackwell)
    if blackwell:
        check_blackwell({**runner, **config.rollout.sglang}, is_fp8(load_hf_config(config.model.path)))
    return {
        "device": "cuda",
        "base_gpu_id": first_device,
        "enable_memory_saver": True,
        "enable_draft_weights_cpu_backup": config.rollout.draft_tokens > 0,
        "max_running_requests": config.rollout.concurrency,
        **runner,
    }


def environment(tp: int, engines: int, threads: int) -> dict[str, str]:
    """Environment of the engine's processes."""
    return {}


def has_memory_saver() -> bool:
    """Whether sleeping frees the engine's memory."""
    return True


def allocate(size: int) -> torch.Tensor:
    """[size] uint8 that `pack` can share."""
    return torch.empty(size, dtype=torch.uint8, device=device.device())


def pack(tensors: NamedTensors) -> bytes:
    """Pickle of [(name, tensor)] by SGLang's own serializer: CUDA IPC handles, with devices named by UUID."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()
    return bytes(MultiprocessingSerializer.serialize(list(tensors)))
