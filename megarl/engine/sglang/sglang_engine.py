"""One SGLang engine: the settings and environment of its server."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.config import Config
from megarl.cpu import sglang_arguments
from megarl.cpu.sglang_sparse_attention import SHORT_INDICES
from megarl.engine.engine_host import HostProcess, secret_variables
from megarl.engine.http_engine import HTTPEngine, ServerLaunch
from megarl.engine.sglang import engine_settings, server_args, sglang_cuda
from megarl.engine.sglang.sglang_loader import LOADER_NAME
from megarl.models.mxfp4 import is_mxfp4
from megarl.models.registry import family_of, load_hf_config
from megarl.parallel import device, job_secret
from megarl.parallel.placement import engine_ranks

SERVER = "megarl.engine.sglang.sglang_server"
_CONFIG = "tokenizer_config.json"


def tokenizer_folder(model: str, link_folder: Path) -> str:
    """Return a folder from which SGLang can load the tokenizer: the model's own, if it has a tokenizer_config.json.

    Without one, as with a lone tokenizer.model, SGLang 0.5.23 would ask the Hub and not start. Then it is
    `link_folder`, filled with links to the model's small files and an empty tokenizer_config.json.
    """
    if Path(model, _CONFIG).is_file() or not Path(model).is_dir():
        return model
    link_folder.mkdir(parents=True, exist_ok=True)
    for file in Path(model).iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            with contextlib.suppress(FileExistsError):
                (link_folder / file.name).symlink_to(file.resolve())
    (link_folder / _CONFIG).write_text("{}\n")
    return str(link_folder.resolve())


def start_host(config: Config, threads: int = 0) -> HostProcess:
    """Start a host for this machine's engines; arguments as for `SGLangEngine`."""
    preloaded = SERVER if platform().START_METHOD == "fork" else ""
    return HostProcess(_environment(config, threads), preloaded, hidden=secret_variables(config))


_INDEX_RECORD = {
    "SGLANG_DSA_FUSE_TOPK": "0",  # the fused kernel returns cache slots instead of positions
    "SGLANG_DSA_TOPK_BROADCAST": "1",  # tensor parallel ranks might choose differently by rounding
}
_SHARED_GPUS = {
    "SGLANG_AUTO_NUMA_BIND": "0",  # asks for the NUMA node of the GPU that a rank would have if none were shared
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # fails if free memory changes while an engine starts
}
"""SGLang's environment variables if ranks share GPUs."""


def _environment(config: Config, threads: int) -> dict[str, str]:
    engines = Counter(members[0] // config.parallel.ranks_per_node for members in engine_ranks(config))
    return {
        # The broadcaster's port accepts any connection; tensor parallel ranks would wait for its messages forever.
        "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",
        "SGLANG_FORWARD_UNKNOWN_TOOLS": "1",  # so that the policy learns which tool does not exist
        # Counts from when a request starts running; time in the queue is excluded.
        "SGLANG_REQ_RUNNING_TIMEOUT": str(config.rollout.request_timeout),
        **({"GLOO_SOCKET_IFNAME": "lo"} if config.rollout.tp <= config.parallel.ranks_per_node else {}),
        # The stored inputs of convolutions, in delta nets; SGLang's default is bfloat16 whatever the model's dtype.
        "SGLANG_MAMBA_CONV_DTYPE": config.model.dtype,
        "PYTHONWARNINGS": "ignore",  # dozens at each start would hide the last lines of a failure
        **engine_settings.ENVIRONMENT,
        **(_INDEX_RECORD if config.train.sparse_index_replay else {}),
        SHORT_INDICES: str(int(config.rollout.max_context < 1 << 16)),
        **(_SHARED_GPUS if config.parallel.ranks_per_gpu > 1 else {}),
        **device.sharing_variables(config.parallel.ranks_per_gpu),
        **platform().environment(config.rollout.tp, max(engines.values(), default=1), threads),
    }


def gpu_offsets(first_rank: int, num_ranks: int, ranks_per_gpu: int) -> list[int]:
    """Return the GPU of each of an engine's ranks on a machine, counted from that of the first."""
    gpus = [device.gpu_number(first_rank + rank, ranks_per_gpu) for rank in range(num_ranks)]
    return [gpu - gpus[0] for gpu in gpus]


def platform() -> ModuleType:
    """Return the settings for this machine's devices."""
    return sglang_cuda if device.has_cuda() else sglang_arguments


class SGLangEngine(HTTPEngine):
    """SGLang's HTTP server. Arguments as for `EngineBackend.make_engine`."""

    _loader_name = LOADER_NAME

    def __init__(self, config: Config, index: int = 0, **options: Any) -> None:
        server_args.check(config.rollout.sglang)
        super().__init__(config, index, **options)
        self._platform = platform()

    @property
    def _can_free_memory(self) -> bool:
        return bool(self._platform.HAS_MEMORY_SAVER)

    def _start_host(self) -> HostProcess:
        return start_host(self.config, self.threads)

    def _make_launch(self) -> ServerLaunch:
        rollout = self.config.rollout
        hf = load_hf_config(self.config.model.path)
        arguments: dict[str, Any] = {
            "model_path": self.config.model.path,
            "tokenizer_path": tokenizer_folder(self.config.model.path, self.log.with_suffix("")),
            "dtype": self.config.model.dtype,
            "tp_size": rollout.tp,
            "ep_size": rollout.ep,
            "random_seed": self.config.run.seed + self.index,
            "host": "127.0.0.1",
            "port": self.port,
            "api_key": self.api_key,
            "nnodes": self.nnodes,
            "node_rank": self.node_rank,
            "weight_version": str(self.weight_version),
            "custom_weight_loader": [LOADER_NAME],
            "skip_server_warmup": True,
            "incremental_streaming_output": True,
            "log_level": "warning",
            "enable_return_routed_experts": self.config.records_routing,
            "enable_return_indexer_topk": self.config.train.sparse_index_replay,
            **({"dist_init_addr": self.dist_init_addr} if self.dist_init_addr else {}),
            **({"enable_weights_cpu_backup": True} if self.keeps_weights and self._platform.HAS_MEMORY_SAVER else {}),
            # Weights are synced in bfloat16, and the plug-in dequantises those that SGLang loads.
            **({"json_model_override_args": '{"quantization_config": null}'} if is_mxfp4(hf) else {}),
            **server_args.speculative_args(rollout.num_speculative_tokens),
            **server_args.sampling_args(rollout),
            **server_args.expert_args(rollout),
            **({"tool_call_parser": self.tool_call_parser} if self.parses_tool_calls and self.tool_call_parser else {}),
            **family_of(hf).engine_settings,
            **self._platform.server_args(self.config, self.first_rank),
            **rollout.sglang,
        }
        settings = {
            "server_args": arguments,
            "gpu_offsets": gpu_offsets(self.first_rank, rollout.tp, self.config.parallel.ranks_per_gpu),
            "start_method": self._platform.START_METHOD,
            "has_truncated_sampling": rollout.has_truncated_sampling or rollout.eval_config.has_truncated_sampling,
            "secret": job_secret.engine_secret(self.name),
        }
        return ServerLaunch(SERVER, sys.executable, _environment(self.config, self.threads), settings)
