"""What an engine is told on a machine with GPUs. `cpu/sglang_arguments.py` is the counterpart for CPUs.

`check_allocator` refuses `expandable_segments`, since the engine receives weights by CUDA IPC: blocks of torch's
allocator are then no CUDA allocations that a handle could name. Whether another process can open them depends on torch,
driver and container, and SGLang's memory saver refuses the setting.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from megarl.config import Config, ConfigError
from megarl.cpu.sglang_arguments import NamedTensors
from megarl.models.fp8 import is_fp8
from megarl.models.registry import load_hf_config
from megarl.parallel import device
from megarl.reshard.plan.engine_settings import check_blackwell, choose_runner

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where torch reads its allocator's settings; the second since 2.9, and the first still."""


def check_allocator(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where the environment sets `expandable_segments`."""
    for name in ALLOCATOR_VARIABLES:
        for setting in environ.get(name, "").split(","):
            key, _, value = setting.partition(":")
            if key.strip() == "expandable_segments" and value.strip().lower() in ("true", "1"):
                raise ConfigError(
                    f"{name}={environ[name][:200]}: with expandable_segments weights cannot be handed to an engine's "
                    "process, and SGLang's memory saver refuses it; take expandable_segments out of the variable"
                )


START_METHOD = ""
"""As SGLang does it: a process that has used CUDA cannot be forked."""


def check(settings: Mapping[str, Any]) -> None:
    """All that `server_args.check` lets pass may be set; the allocator must be able to share memory."""
    check_allocator(os.environ)


def server_args(config: Config, first_device: int) -> dict[str, Any]:
    """SGLang's settings for this kind of machine; the memory saver lets the weights sleep while the ranks train. Of a
    draft model, which is not pushed where it is not trained, SGLang keeps a copy on the host meanwhile."""
    blackwell = torch.cuda.get_device_capability()[0] >= 10
    runner = choose_runner(config.rollout.sglang, blackwell)
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
