"""vLLM's arguments and environment on a machine without a GPU. There is no counterpart for GPUs yet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import megarl
from megarl.config import RolloutConfig
from megarl.cpu.sglang_arguments import MAX_KV_TOKENS, count_threads
from megarl.models.memory import VLLM_BLOCK_TOKENS


def engine_args(rollout: RolloutConfig) -> dict[str, Any]:
    """Return the AsyncEngineArgs for a machine without a GPU."""
    tokens = min(rollout.concurrency * rollout.max_context, MAX_KV_TOKENS)
    return {
        "enforce_eager": True,
        "async_scheduling": False,
        "block_size": VLLM_BLOCK_TOKENS,
        # Each request may have a block that is not full; one block is vLLM's own.
        "num_gpu_blocks_override": -(-tokens // VLLM_BLOCK_TOKENS) + rollout.concurrency + 1,
        # The size is that of the blocks; without a number vLLM would warm up for 10 s.
        "kv_cache_memory_bytes": 1 << 20,
    }


def environment(tp: int, engines: int, threads: int) -> dict[str, str]:
    """Return the environment of an engine's processes; arguments as for `sglang_arguments.environment`."""
    checkout = Path(megarl.__file__).resolve().parent.parent
    # vLLM's environment sees installed packages, but not the links of editable ones.
    paths = [] if checkout.name == "site-packages" else [str(checkout)]
    return {
        "OMP_NUM_THREADS": str(count_threads(tp, engines, threads)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_MLA_DISABLE": "1",  # on a CPU, MLA's kernels have no prefix cache, and one size of heads
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH", "")])),
    }
