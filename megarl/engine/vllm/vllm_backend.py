"""vLLM as a kind of engine."""

from __future__ import annotations

import json

from megarl.config import Config, ConfigError
from megarl.engine.engine_backends import NamedTensors
from megarl.engine.engine_host import HostProcess
from megarl.engine.tool_calls import parser_name
from megarl.engine.vllm import vllm_settings
from megarl.engine.vllm.vllm_engine import VLLMEngine, start_host
from megarl.models.family import HFConfig
from megarl.parallel import device, shared_memory
from megarl.reshard.plan.layout import EngineLayout


class VLLMBackend:
    """`rollout.engine: vllm`, on CPUs."""

    title = "vLLM"
    make_engine = staticmethod(VLLMEngine)

    def check(self, hf: HFConfig, config: Config) -> None:
        vllm_settings.check(hf, config)
        parser_name(config.rollout.tool_call_parser, hf)

    def check_sampling(self, config: Config) -> None:
        vllm_settings.check_sampling(config)

    def check_installed(self) -> None:
        if device.has_cuda():
            raise ConfigError(
                "rollout.engine=vllm has been reviewed on CPUs only, and this machine has a GPU; use "
                "rollout.engine=sglang"
            )
        vllm_settings.check_installed()

    def check_platform(self, config: Config) -> None:
        self.check_installed()

    def layout(self, hf: HFConfig, config: Config) -> EngineLayout:
        return vllm_settings.layout(config)

    def start_host(self, config: Config, threads: int = 0) -> HostProcess:
        return start_host(config, threads)

    def pack_payload(self, tensors: NamedTensors) -> str:
        """Encode as JSON of `shared_memory` handles by name, see `weight_loader.open_shared`."""
        return json.dumps({name: shared_memory.export_handle(tensor) for name, tensor in tensors})
