"""SGLang settings on a machine with GPUs. `cpu/sglang_arguments.py` is the counterpart for CPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from megarl.config import Config, ConfigError
from megarl.cpu.sglang_arguments import NamedTensors
from megarl.engine.sglang.engine_settings import check_blackwell, choose_runner
from megarl.models.fp8 import is_fp8
from megarl.models.registry import load_hf_config
from megarl.parallel import device

START_METHOD = ""
"""SGLang's default: a process that has used CUDA cannot be forked."""
HAS_MEMORY_SAVER = True
_STATIC_FRACTION = 0.8
"""Share of a GPU for the weights and KV caches of all engines' ranks on it, if several share it."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables from which torch reads allocator settings; it added the second in 2.9 and still reads the first."""


def check(settings: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if the environment sets `expandable_segments`. Any setting is allowed, see `server_args.check`.

    The engine receives weights by CUDA IPC: blocks of torch's allocator are then no CUDA allocations that an IPC handle
    could name. Whether another process can open them depends on torch, driver and container, and SGLang's memory saver
    refuses the setting.
    """
    for name in ALLOCATOR_VARIABLES:
        for setting in environ.get(name, "").split(","):
            key, _, value = setting.partition(":")
            if key.strip() == "expandable_segments" and value.strip().lower() in ("true", "1"):
                raise ConfigError(
                    f"{name}={environ[name][:200]}: with expandable_segments weights cannot be shared with an engine's "
                    f"process, and SGLang's memory saver refuses it; remove expandable_segments from the variable"
                )


def server_args(config: Config, first_rank: int) -> dict[str, Any]:
    """Return SGLang's settings for this kind of machine.

    The memory saver lets the weights be offloaded while the ranks train. SGLang backs up a draft model on the host
    meanwhile, since an untrained draft model is not part of the weight sync.

    first_rank: as for `EngineBackend.make_engine`.
    """
    blackwell = torch.cuda.get_device_capability()[0] >= 10
    runner = choose_runner(config.rollout.sglang, blackwell)
    if blackwell:
        check_blackwell({**runner, **config.rollout.sglang}, is_fp8(load_hf_config(config.model.path)))
    return {
        "device": "cuda",
        **gpu_args(first_rank, config.parallel.ranks_per_gpu),
        "enable_memory_saver": True,
        "enable_draft_weights_cpu_backup": config.rollout.num_speculative_tokens > 0,
        "max_running_requests": config.rollout.concurrency,
        **runner,
    }


def gpu_args(first_rank: int, ranks_per_gpu: int) -> dict[str, Any]:
    """Return the settings that follow from the GPUs of an engine's ranks.

    If ranks share GPUs, SGLang's own all-reduce, which is written for ranks on different GPUs, is off, and each rank
    has a part of the memory, of which SGLang's default would take most for the first KV cache.
    """
    arguments: dict[str, Any] = {"base_gpu_id": device.gpu_number(first_rank, ranks_per_gpu)}
    if ranks_per_gpu > 1:
        arguments |= {"disable_custom_all_reduce": True}
        arguments |= {"mem_fraction_static": round(_STATIC_FRACTION / ranks_per_gpu, 3)}
    return arguments


def environment(tp: int, engines: int, threads: int) -> dict[str, str]:
    """Return the environment of the engine's processes."""
    return {}


def pack(tensors: NamedTensors) -> bytes:
    """Pickle [(name, tensor)] with SGLang's serializer: CUDA IPC handles, with devices named by UUID."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()
    return bytes(MultiprocessingSerializer.serialize(list(tensors)))
