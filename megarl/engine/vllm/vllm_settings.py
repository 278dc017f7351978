"""Models and settings with which a vLLM engine has its weights where the layout tables say, from reading and running
vLLM 0.32.0 on a CPU. Others are refused, because nobody has looked where their weights are.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megarl.config import Config, ConfigError
from megarl.config.foreign_dataclasses import did_you_mean
from megarl.models.family import HFConfig
from megarl.models.memory import VLLM_BLOCK_TOKENS
from megarl.models.registry import family_of
from megarl.reshard.plan.layout import EngineLayout

VERSION = "0.32.0"
_STAMP = "installed-by-megarl"
"""Files that launch/install.sh and launch/install_vllm.sh write last, into the environments that they have made."""


def _head_dim(hf: HFConfig) -> int:
    return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])


def _latent_head_dim(hf: HFConfig) -> int:
    """vLLM computes latent attention as plain attention (VLLM_MLA_DISABLE), whose values it pads to this size."""
    return int(hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"])


FAMILIES: Mapping[str, Callable[[HFConfig], int]] = {
    **dict.fromkeys(("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM"), _head_dim),
    "DeepseekV3ForCausalLM": _latent_head_dim,
}
"""Architectures that were compared with the tables, and the size of their attention heads."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of heads in vllm/v1/attention/backends/cpu_attn.py. With another one an engine dies at its first request."""
MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of max_lora_rank in vllm/config/lora.py."""
MIN_TEMPERATURE = 0.01
"""vllm/sampling_params.py raises smaller temperatures above 0 to this one."""

ALLOWED: Mapping[str, tuple[type[int] | type[bool], int]] = {
    "num_gpu_blocks_override": (int, 2),
    "max_num_seqs": (int, 1),
    "max_num_batched_tokens": (int, 1),
    "long_prefill_token_threshold": (int, 0),
    "stream_interval": (int, 1),
    "enable_prefix_caching": (bool, 0),
}
"""Settings that may be set: type and least value. `num_gpu_blocks_override` is the size of the KV cache, in blocks of
`VLLM_BLOCK_TOKENS` tokens, also on a CPU."""
_MANAGED = {
    "model": "model.path",
    "dtype": "model.dtype",
    "tensor_parallel_size": "rollout.tp",
    "enable_expert_parallel": "rollout.ep",
    "max_model_len": "rollout.max_context",
    "seed": "run.seed",
    "speculative_config": "rollout.num_speculative_tokens",
    **dict.fromkeys(("enable_lora", "max_loras", "max_cpu_loras"), "rollout.max_loras"),
    **dict.fromkeys(("max_lora_rank", "lora_dtype"), "lora.rank and model.dtype"),
    "lora_target_modules": "lora.target_modules",
    "enable_return_routed_experts": "train.routing_replay and rollout.rebalance_experts_every",
    "logprobs_mode": "nothing: training needs log-probs of the distribution that is sampled from",
    **dict.fromkeys(
        ("load_format", "worker_cls", "scheduler_cls", "distributed_executor_backend", "additional_config"),
        "nothing: MegaRL's weight loader depends on it",
    ),
    **dict.fromkeys(("kv_cache_memory_bytes", "gpu_memory_utilization"), "rollout.vllm.num_gpu_blocks_override"),
    "block_size": f"nothing: a block has {VLLM_BLOCK_TOKENS} tokens",
    "generation_config": "nothing: MegaRL gives each request its sampling parameters",
    **dict.fromkeys(("tokenizer", "tokenizer_mode", "skip_tokenizer_init"), "model.path"),
}
"""Settings that MegaRL makes, and the key that determines each."""


def interpreter() -> str:
    """Return the Python of vLLM's environment, within this one's folder. `check_installed` checks that it exists."""
    return str(Path(sys.prefix, "vllm", "bin", "python"))


def check_installed() -> None:
    """Raise ConfigError if vLLM's environment is missing, unfinished or of another version."""
    folder = Path(sys.prefix, "vllm")
    command = "MEGARL_VLLM=1 bash launch/install.sh"
    if not Path(sys.prefix, _STAMP).exists():  # an environment of the user's own
        command = f"bash launch/install_vllm.sh {sys.prefix}/bin/python, in a checkout of MegaRL"
    hint = f"install it by {command}"
    if not (folder / _STAMP).exists() or not Path(interpreter()).exists():
        raise ConfigError(f"rollout.engine=vllm: vLLM is not installed in {folder}; {hint}")
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    installed = sorted(path.stem.split("-")[1] for path in packages.glob("vllm*.dist-info"))
    if installed != [VERSION]:
        versions = ", ".join(installed) or "no version"
        raise ConfigError(f"rollout.engine=vllm: {packages} has {versions} of vLLM, not {VERSION}; {hint}")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key of `rollout.vllm` that is not in `ALLOWED`, or has an invalid value."""
    for name, value in settings.items():
        where = f"rollout.vllm.{name}"
        if name in _MANAGED:
            raise ConfigError(f"{where} cannot be set; it is decided by {_MANAGED[name]}")
        if name not in ALLOWED:
            hint = did_you_mean(name, ALLOWED)
            raise ConfigError(f"{where} may not be set: these may, {', '.join(ALLOWED)}{hint}")
        kind, least = ALLOWED[name]
        if type(value) is not kind:
            expected = "true or false" if kind is bool else "an integer"
            raise ConfigError(f"{where} must be {expected}, not {value!r:.80}")
        if int(value) < least:
            raise ConfigError(f"{where} must be at least {least}, not {value}")


def check(hf: HFConfig, config: Config) -> None:
    """Raise ConfigError for a model or setting that vLLM's engines cannot have."""
    rollout, architecture = config.rollout, family_of(hf).architecture
    if rollout.sglang:
        raise ConfigError(
            f"rollout.sglang.{next(iter(rollout.sglang))} with rollout.engine=vllm, whose engines it does not reach; "
            "remove it, or see rollout.vllm"
        )
    check_settings(rollout.vllm)
    if architecture not in FAMILIES:
        raise ConfigError(
            f"rollout.engine=vllm: where vLLM has the weights of {architecture} has not been reviewed, only of "
            f"{', '.join(FAMILIES)}; use rollout.engine=sglang"
        )
    if hf.get("quantization_config"):
        raise ConfigError(
            "rollout.engine=vllm with a quantised checkpoint: where vLLM has its weights and scales has not been "
            "reviewed; use rollout.engine=sglang, or convert the weights to bfloat16"
        )
    if (size := FAMILIES[architecture](hf)) not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"rollout.engine=vllm: vLLM's attention on a CPU has no heads of {size}, only of "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}; use rollout.engine=sglang"
        )
    if rollout.ep not in (1, rollout.tp):
        raise ConfigError(
            f"{rollout.ep=} with rollout.engine=vllm, which divides the experts among all ranks of an engine or cuts "
            f"each of them: set it to 1 or to rollout.tp={rollout.tp}"
        )
    if rollout.max_loras:
        _check_adapters(hf, config)
    if rollout.tp > config.parallel.ranks_per_node:
        raise ConfigError(
            f"{rollout.tp=} with rollout.engine=vllm: its engines are within one machine, which has "
            f"parallel.ranks_per_node={config.parallel.ranks_per_node}; lower it, or use rollout.engine=sglang"
        )
    blocks = rollout.vllm.get("num_gpu_blocks_override")
    if blocks is not None and (blocks - 1) * VLLM_BLOCK_TOKENS < rollout.max_context:  # one block is vLLM's own
        raise ConfigError(
            f"rollout.vllm.num_gpu_blocks_override={blocks} has no room for one conversation of {rollout.max_context=} "
            f"tokens in blocks of {VLLM_BLOCK_TOKENS}, one of which vLLM keeps; raise the first or lower the second"
        )
    tokens, requests = rollout.vllm.get("max_num_batched_tokens"), rollout.vllm.get("max_num_seqs", rollout.concurrency)
    if tokens is not None and tokens < requests:
        raise ConfigError(
            f"rollout.vllm.max_num_batched_tokens={tokens} is less than one token for each of {requests} requests; "
            "raise it, or lower rollout.vllm.max_num_seqs"
        )
    if config.train.routing_replay and rollout.vllm.get("enable_prefix_caching") is False:
        raise ConfigError(
            "rollout.vllm.enable_prefix_caching=false with train.routing_replay: vLLM records routing by the blocks of "
            "its prefix cache; remove one of them"
        )


def _check_adapters(hf: HFConfig, config: Config) -> None:
    key = f"rollout.max_loras={config.rollout.max_loras}"
    if family_of(hf).num_experts(hf):
        raise ConfigError(
            f"{key} with a model with experts: vLLM's experts with adapters need Triton, so a GPU; set it to 0, which "
            "merges adapters, or use a dense model"
        )
    if config.lora.rank > MAX_LORA_RANKS[-1]:
        raise ConfigError(
            f"{key} with lora.rank={config.lora.rank}: vLLM serves ranks up to {MAX_LORA_RANKS[-1]}; lower the rank, "
            "or set the first to 0"
        )


def adapter_id(name: str) -> int:
    """Return the number by which vLLM knows an adapter."""
    return zlib.crc32(name.encode()) + 1


def check_sampling(config: Config) -> None:
    """Raise ConfigError if vLLM would sample from another distribution than the settings say."""
    rollout = config.rollout
    if rollout.top_k in (0, 1):
        remedy = "-1 for all tokens" if rollout.top_k == 0 else "2 or more, or rollout.temperature=0, which is greedy"
        raise ConfigError(f"{rollout.top_k=} leaves nothing to sample; set it to {remedy}")
    if rollout.num_speculative_tokens and rollout.min_p:
        raise ConfigError(
            f"{rollout.min_p=:g} with {rollout.num_speculative_tokens=} and rollout.engine=vllm, which verifies drafts "
            "without min_p; set one of them to 0, or use rollout.engine=sglang"
        )
    temperatures = {"temperature": rollout.temperature, "eval_temperature": rollout.eval_temperature or 0.0}
    for name, temperature in temperatures.items():
        if 0 < temperature < MIN_TEMPERATURE:
            raise ConfigError(
                f"rollout.{name}={temperature:g} with rollout.engine=vllm, which raises it to {MIN_TEMPERATURE}; set "
                f"it to 0, or to {MIN_TEMPERATURE} or more"
            )


def layout(config: Config) -> EngineLayout:
    """Return the engines' layout, which is SGLang's with its default settings."""
    check_settings(config.rollout.vllm)
    if config.rollout.rebalance_experts_every or config.rollout.num_redundant_experts:
        raise ConfigError(
            "rollout.rebalance_experts_every and rollout.num_redundant_experts: MegaRL places the experts of SGLang's "
            "engines only; remove them, or set rollout.engine=sglang"
        )
    # An untrained draft model stays as loaded.
    draft = bool(config.rollout.num_speculative_tokens and config.train.mtp_loss_coef)
    return EngineLayout(config.rollout.tp, config.rollout.ep, draft=draft)
