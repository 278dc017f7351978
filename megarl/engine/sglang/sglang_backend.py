"""SGLang as a kind of engine."""

from __future__ import annotations

import base64

from megarl.config import Config, ConfigError
from megarl.engine.engine_backends import NamedTensors
from megarl.engine.engine_host import HostProcess
from megarl.engine.sglang import engine_settings, server_args
from megarl.engine.sglang.sglang_engine import SGLangEngine, platform, start_host
from megarl.engine.tool_calls import parser_name
from megarl.models.config_json import rope_options
from megarl.models.family import HFConfig
from megarl.models.sparse_indices import index_shape
from megarl.reshard.plan.layout import EngineLayout


class SGLangBackend:
    """`rollout.engine: sglang`, the default."""

    title = "SGLang"
    make_engine = staticmethod(SGLangEngine)

    def check(self, hf: HFConfig, config: Config) -> None:
        rollout, sglang = config.rollout, config.rollout.sglang
        server_args.check(sglang)
        if rollout.vllm:
            raise ConfigError(
                f"rollout.vllm.{next(iter(rollout.vllm))} with rollout.engine=sglang, whose engines it does not reach; "
                "remove it, or see rollout.sglang"
            )
        if rollout.max_loras:
            raise ConfigError(
                f"{rollout.max_loras=} with rollout.engine=sglang is not implemented: SGLang's adapters need a GPU, so "
                "nothing has compared them; set rollout.engine=vllm, or rollout.max_loras to 0"
            )
        parser_name(rollout.tool_call_parser, hf)
        for name in ("max_total_tokens", "context_length"):
            if sglang.get(name) is not None and sglang[name] < rollout.max_context:
                raise ConfigError(
                    f"rollout.sglang.{name}={sglang[name]} is less than one conversation of {rollout.max_context=} "
                    "tokens; raise the first or lower the second"
                )
        chunk, page = sglang.get("chunked_prefill_size") or -1, sglang.get("page_size") or 1
        if chunk > 0 and chunk % page:
            raise ConfigError(f"rollout.sglang.chunked_prefill_size={chunk} is not a multiple of page_size={page}")
        rope_type = rope_options(hf)["rope_type"]
        if sglang.get("enable_fused_qk_norm_rope") and rope_type not in ("default", "yarn"):
            raise ConfigError(
                f"rollout.sglang.enable_fused_qk_norm_rope: SGLang's kernel computes yarn for rope_type={rope_type}, "
                "too; remove it"
            )
        if rollout.num_speculative_tokens:
            for key in ("attn_dp_size", "dp_size"):
                if int(sglang.get(key) or 1) > 1:
                    raise ConfigError(
                        f"{rollout.num_speculative_tokens=} with rollout.sglang.{key}: not tested with attention data "
                        "parallelism; set only one of them"
                    )
        for key in ("sync_changes_only", "sync_adapters_only"):
            if getattr(rollout, key) and sglang.get("enable_weights_cpu_backup") is False:
                raise ConfigError(
                    f"rollout.sglang.enable_weights_cpu_backup=false with rollout.{key}: an engine that sleeps would "
                    "lose the weights that are not sent; remove one of them"
                )
        records = {"routing": config.records_routing, "indices": index_shape(hf, config) is not None}
        for what in (name for name, is_recorded in records.items() if is_recorded):
            if (sglang.get("chunked_prefill_size") or 1) < 1:
                raise ConfigError(
                    f"rollout.sglang.chunked_prefill_size must be positive: it is the size of SGLang's record of {what}"
                )

    def check_sampling(self, config: Config) -> None:
        server_args.check_sampling(config.rollout)

    def check_installed(self) -> None:
        server_args.sglang_folder()

    def check_platform(self, config: Config) -> None:
        self.check_installed()
        platform().check(config.rollout.sglang)

    def layout(self, hf: HFConfig, config: Config) -> EngineLayout:
        return engine_settings.layout(hf, config)

    def start_host(self, config: Config, threads: int = 0) -> HostProcess:
        return start_host(config, threads)

    def pack_payload(self, tensors: NamedTensors) -> str:
        return base64.b64encode(platform().pack(tensors)).decode()
