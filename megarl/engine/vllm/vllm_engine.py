"""One vLLM engine: the arguments and environment of its server."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from megarl.config import Config
from megarl.cpu import vllm_arguments
from megarl.engine.engine_host import HostProcess, secret_variables
from megarl.engine.http_engine import HTTPEngine, ServerLaunch
from megarl.engine.vllm.vllm_settings import MAX_LORA_RANKS, interpreter
from megarl.models.lora_tables import adapted_weights
from megarl.models.registry import family_of, load_hf_config
from megarl.parallel.placement import engine_ranks
from megarl.parallel.policy_configs import serves_adapters

SERVER = "megarl.engine.vllm.vllm_server"
_WORKER = "megarl.engine.vllm.vllm_worker"


def start_host(config: Config, threads: int = 0) -> HostProcess:
    """Start a host for this machine's engines; arguments as for `VLLMEngine`."""
    environment = _environment(config, threads)
    return HostProcess(environment, SERVER, hidden=secret_variables(config), python=interpreter())


def _environment(config: Config, threads: int) -> dict[str, str]:
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",  # dozens of warnings at each start would hide the last lines of a failure
        "VLLM_PLUGINS": "",  # other packages' plug-ins
        # Rendezvous and message queues on loopback only.
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
        **vllm_arguments.environment(config.rollout.tp, _engines_per_machine(config), threads),
    }


def _engines_per_machine(config: Config) -> int:
    engines = Counter(members[0] // config.parallel.ranks_per_node for members in engine_ranks(config))
    return max(engines.values(), default=1)


def engine_args(config: Config, index: int) -> dict[str, Any]:
    """Return vLLM's AsyncEngineArgs. index: number of the engine, for its seed."""
    rollout = config.rollout
    drafts = {"method": "mtp", "num_speculative_tokens": rollout.num_speculative_tokens}
    return {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "tensor_parallel_size": rollout.tp,
        "enable_expert_parallel": rollout.ep > 1,
        "max_model_len": rollout.max_context,
        "max_num_seqs": rollout.concurrency,
        "seed": config.run.seed + index,
        "load_format": "megarl",
        "worker_cls": f"{_WORKER}.SyncedWorker",
        "scheduler_cls": f"{_WORKER}.RecordingScheduler",
        "distributed_executor_backend": f"{_WORKER}.ForkingExecutor",
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "generation_config": "vllm",  # no sampling parameters from the model's folder
        "disable_log_stats": True,
        "enable_logging_iteration_details": True,  # for the server's /v1/loads, not for a log
        "enable_prefix_caching": True,
        **({"speculative_config": drafts} if rollout.num_speculative_tokens else {}),
        **({"per_request_spec_decode_metrics": "summary"} if rollout.num_speculative_tokens else {}),
        **(_adapter_args(config) if serves_adapters(config) else {}),
        **vllm_arguments.engine_args(rollout),
        **rollout.vllm,
    }


def _adapter_args(config: Config) -> dict[str, Any]:
    hf, lora = load_hf_config(config.model.path), config.lora
    weights = adapted_weights(family_of(hf).params(hf, 1), lora.target_modules)
    slots = {part.slot.name for weight in weights for part in weight.by_slot() if part.slot}
    return {
        "enable_lora": True,
        "max_loras": config.rollout.max_loras,
        "max_lora_rank": next(size for size in MAX_LORA_RANKS if size >= lora.rank),
        "lora_target_modules": sorted({slot.removesuffix(".weight").rpartition(".")[2] for slot in slots}),
    }


class VLLMEngine(HTTPEngine):
    """`vllm_server.py`. Arguments as for `EngineBackend.make_engine`."""

    def _start_host(self) -> HostProcess:
        return start_host(self.config, self.threads)

    def _make_launch(self) -> ServerLaunch:
        config, environment = self.config, _environment(self.config, self.threads)
        serves = serves_adapters(config)
        settings = {
            "engine_args": engine_args(config, self.index),
            "port": self.port,
            "api_key": self.api_key,
            "request_timeout": config.rollout.request_timeout,
            "weight_version": str(self.weight_version),
            "threads": int(environment["OMP_NUM_THREADS"]),
            "routing": config.records_routing,
            "adapters": config.rollout.max_loras if serves else 0,
            "lora": {"rank": config.lora.rank, "scale": config.lora.scale} if serves else None,
            "parser_python": sys.executable,
        }
        return ServerLaunch(SERVER, interpreter(), environment, settings)
