"""What an engine is told on a machine without a GPU. `engine/engine_cuda.py` is its counterpart."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.config import Config, ConfigError
from megarl.parallel import shared_memory

NamedTensors = Sequence[tuple[str, torch.Tensor]]

START_METHOD = "fork"
"""How SGLang starts its processes: each import of it takes 10 seconds of a core, and forked ones have it already."""
_STUBS = Path(__file__).with_name("stubs")
MAX_KV_TOKENS = 131072
"""Cap of the KV cache where `rollout.sglang.max_total_tokens` gives none; memory is only taken as it is used."""


_CPU_VALUES = {
    "attention_backend": ("torch_native",),
    "prefill_attention_backend": (),
    "decode_attention_backend": (),
    "sampling_backend": ("pytorch",),
    "disable_overlap_schedule": (True,),
    "disable_cuda_graph": (True,),
    "enable_torch_compile": (False,),
    "enable_deterministic_inference": (False,),
    "enable_weights_cpu_backup": (False,),
    "enable_hierarchical_cache": (False,),
    "moe_a2a_backend": ("none",),
    "kv_cache_dtype": ("auto", "bf16", "bfloat16"),
    "attn_dp_size": (1,),
    "enable_dp_attention": (False,),
}
"""What SGLang can do without a GPU, where it has a choice."""


def check(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting with which an engine would not start or not generate on this kind of machine."""
    for name, able in _CPU_VALUES.items():
        value = settings.get(name)
        if value is not None and value not in able:
            raise ConfigError(
                f"rollout.sglang.{name}={value} needs a GPU, and this machine has none: leave it out"
                + (f", or take {', '.join(map(str, able))}" if able else "")
            )


def server_args(config: Config, first_device: int) -> dict[str, Any]:
    """SGLang's settings for this kind of machine."""
    rollout = config.rollout
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "max_total_tokens": min(rollout.concurrency * rollout.max_context, MAX_KV_TOKENS),
        "max_running_requests": rollout.concurrency,
        "sleep_on_idle": True,  # an idle engine would otherwise keep a core busy while the ranks train
    }


def environment(tp: int, engines: int, threads: int) -> dict[str, str]:
    """Environment of the engine's processes; `engines` share this machine's cores, unless `threads` is given."""
    cores = sorted(os.sched_getaffinity(0))
    threads = threads or max(1, len(cores) // (engines * tp))
    path = os.pathsep.join(filter(None, [str(_STUBS), os.environ.get("PYTHONPATH", "")]))
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait by spinning stall each other where cores are shared
        # SGLang wants a list of cores per tensor parallel rank; without AMX it only counts them.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(tp)),
        "TORCHDYNAMO_DISABLE": "1",  # else small functions are compiled, which needs a C++ compiler and seconds
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": path,
    }


def has_memory_saver() -> bool:
    """Whether sleeping frees the engine's memory; host memory stays."""
    return False


def allocate(size: int) -> torch.Tensor:
    """[size] uint8 that `pack` can share."""
    return shared_memory.empty((size,), torch.uint8)


def pack(tensors: NamedTensors) -> bytes:
    """Pickle of [("shared", tensor)] for a process on this machine: of JSON that says where the tensors lie, which is
    memory of `allocate`; see `loader.opened`. Not torch's own way, for which it starts a process beside this one: when
    that is killed nothing can be shared any more, and freeing what was shared aborts this process."""
    places = json.dumps({name: shared_memory.export_handle(tensor) for name, tensor in tensors})
    return pickle.dumps([("shared", torch.frombuffer(bytearray(places.encode()), dtype=torch.uint8))])
