"""SGLang's settings and environment on a machine without a GPU. The counterpart is `engine/sglang/sglang_cuda.py`."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.config import Config, ConfigError
from megarl.models.int4 import is_int4
from megarl.models.registry import load_hf_config
from megarl.parallel import shared_memory

NamedTensors = Sequence[tuple[str, torch.Tensor]]
START_METHOD = "fork"
"""How SGLang starts its processes. Importing SGLang takes 10 core-seconds; forked processes inherit the import."""
_STUBS = Path(__file__).with_name("stubs")
HAS_MEMORY_SAVER = False  # a sleeping engine does not free its memory
MAX_KV_TOKENS = 131072
"""Default cap of the KV cache, see `rollout.sglang.max_total_tokens`. Memory is allocated only as it is used."""
STATES_PER_REQUEST = 8
"""Slots for states of delta nets per concurrent request. Four are needed; the others keep prefixes for later turns."""
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
"""Values that work without a GPU, for SGLang settings that have a choice."""


def check(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting with which an engine could not start or generate without a GPU."""
    for name, supported in _CPU_VALUES.items():
        value = settings.get(name)
        if value is not None and value not in supported:
            raise ConfigError(
                f"rollout.sglang.{name}={value} needs a GPU, and this machine has none: remove it"
                + (f", or take {', '.join(map(str, supported))}" if supported else "")
            )


def server_args(config: Config, first_rank: int) -> dict[str, Any]:
    """Return SGLang's settings for a machine without a GPU."""
    rollout = config.rollout
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "max_total_tokens": min(rollout.concurrency * rollout.max_context, MAX_KV_TOKENS),
        "max_running_requests": rollout.concurrency,
        "max_mamba_cache_size": STATES_PER_REQUEST * rollout.concurrency,
        "sleep_on_idle": True,  # otherwise an idle engine keeps a core busy while the ranks train
        **({"moe_runner_backend": "triton"} if is_int4(load_hf_config(config.model.path)) else {}),  # its layout
    }


def count_threads(tp: int, engines: int, threads: int) -> int:
    """Return the threads of each process of `engines` engines: `threads`, or if that is 0 its share of the cores."""
    return threads or max(1, len(os.sched_getaffinity(0)) // (engines * tp))


def environment(tp: int, engines: int, threads: int) -> dict[str, str]:
    """Return the environment of an engine's processes.

    The machine's cores are divided among its `engines`, unless `threads` per process is given.
    """
    cores = sorted(os.sched_getaffinity(0))
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": str(count_threads(tp, engines, threads)),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads stall each other on shared cores
        # SGLang expects a list of cores per tensor parallel rank; without AMX it only counts the lists.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(tp)),
        "TORCHDYNAMO_DISABLE": "1",  # compiling small functions would take seconds and a C++ compiler
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_STUBS), os.environ.get("PYTHONPATH", "")])),
    }


def pack(tensors: NamedTensors) -> bytes:
    """Pack tensors of `device.allocate_shared` for a process on this machine, as a pickle of [("shared", tensor)].

    The tensor's bytes are JSON with the shared-memory handle of each tensor. torch's own sharing starts a helper
    process; when that is killed, nothing can be shared any more and freeing shared memory aborts this process.
    """
    handles = json.dumps({name: shared_memory.export_handle(tensor) for name, tensor in tensors})
    return pickle.dumps([("shared", torch.frombuffer(bytearray(handles.encode()), dtype=torch.uint8))])
