"""Published training runs with their layout and speed, and the speed that the model predicts for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.config import from_dict
from megarl.models.registry import load_hf_config
from megarl.models.step_time import GPUSpec, StepTime

MODELS = Path(__file__).resolve().parents[2] / "configs/models"
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32}
H800 = replace(
    GPUSpec(), nvlink_bandwidth=GPUSpec().nvlink_bandwidth * 200 / 450
)  # an H100 with NVLink of 200 GB/s in each direction
BRIDGE = "Megatron-Bridge, docs/performance-summary.md"
ZOO = "Megatron-MoE-ModelZoo, best_practice/Qwen3"
DEEP_EP, FP8 = {"moe_token_dispatcher_type": "flex"}, {"fp8": "e4m3"}
MLA = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "mlp"]}


@dataclass(frozen=True)
class PublishedRun:
    """A published run. speed: tokens per second and GPU.

    batch, length: sequences per optimizer step, and tokens per sequence. micro: sequences per micro-batch. layout and
    megatron: keys of `parallel` and `model.megatron`. changes: keys of config.json that differ from `model`."""

    name: str
    model: str
    layout: Mapping[str, int]
    batch: int
    length: int
    speed: float
    source: str
    micro: int = 1
    megatron: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    machine: GPUSpec = GPUSpec()

    @cached_property
    def predicted_speed(self) -> float:
        """Tokens per second and GPU."""
        hf = load_hf_config(MODELS / f"{self.model}.json") | dict(self.changes)
        tree = {
            "model": {"megatron": dict(self.megatron)},
            "parallel": dict(self.layout),
            "train": {"max_tokens_per_gpu": self.micro * self.length},
        }
        tokens = self.batch * self.length
        seconds = StepTime(hf, tokens, self.length, self.machine).seconds(from_dict(tree))
        return tokens / sum(seconds.values()) / self.layout["world_size"]

    @property
    def readme_row(self) -> str:
        """The row of this run in the README's table."""
        ratio = self.predicted_speed / self.speed
        return f"| {self.name} | {self.speed:,.0f} | {self.predicted_speed:,.0f} | {ratio:.2f} | {self.source} |"


def layout(world: int, **sizes: int) -> dict[str, int]:
    return {"world_size": world, **sizes}


def speed_of_step(seconds: float, gpus: int) -> float:
    """Return tokens per second and GPU of a step of 2,048 sequences of 4,096 tokens."""
    return 2048 * 4096 / seconds / gpus


def end_stages(first_layers: int, last_layers: int) -> dict[str, int]:
    return {"num_layers_in_first_pipeline_stage": first_layers, "num_layers_in_last_pipeline_stage": last_layers}


V3, QWEN, NAME = "deepseek_v3", "qwen3_235b", "Qwen3-235B, 256 H100"
NEMO = layout(256, tp=2, pp=8, ep=32, vpp=2)
PUBLISHED_RUNS = (
    PublishedRun(
        "Llama 3 8B, 8 H100, FP8", "llama3_70b", layout(8), 128, 8192, 14451, f"{BRIDGE}, 25.11", 1, FP8, LLAMA_8B
    ),
    PublishedRun(
        "Llama 3 70B, 64 H100, FP8, TP4 PP8 VPP5",
        *("llama3_70b", layout(64, tp=4, pp=8, vpp=5), 128, 8192, 1602, f"{BRIDGE}, 25.11", 1, FP8),
    ),
    PublishedRun(
        "DeepSeek-V3, 2048 H800, FP8, PP16 EP64",
        *(V3, layout(2048, pp=16, ep=64), 15360, 4096, 14.8e12 / (2.664e6 * 3600)),
        "arXiv:2412.19437: 2.664 M GPU hours for 14.8 T tokens",
        megatron=FP8 | DEEP_EP | end_stages(3, 2),
        machine=H800,
    ),
    PublishedRun(
        "DeepSeek-V3, 1024 H100, FP8, TP2 PP8 EP64, VPP4 there",
        *(V3, layout(1024, tp=2, pp=8, ep=64), 8192, 4096, 1297, f"{BRIDGE}, 25.09"),
        megatron=FP8 | DEEP_EP | MLA | end_stages(7, 6),
    ),
    PublishedRun(
        f"{NAME}, FP8, TP2 PP8 EP32, VPP4 there",
        *(QWEN, NEMO, 2048, 4096, 1575, f"{BRIDGE}, 25.11"),
        megatron=FP8 | DEEP_EP | end_stages(12, 10),
    ),
    PublishedRun(
        f"{NAME}, BF16, TP2 PP8 EP32, VPP4 there",
        *(QWEN, NEMO, 2048, 4096, speed_of_step(17.6, 256), f"{ZOO}: 17.6 s a step"),
        megatron=DEEP_EP | end_stages(12, 10),
    ),
    PublishedRun(
        f"{NAME}, BF16, TP2 PP32 EP8, VPP3 there",
        *(QWEN, layout(256, tp=2, pp=32, ep=8), 2048, 4096, speed_of_step(24.2, 256), f"{ZOO}: 24.2 s a step"),
        megatron=end_stages(2, 2),
    ),
    PublishedRun(
        f"{NAME}, BF16, TP4 PP8 EP8, VPP4 there",
        *(QWEN, layout(256, tp=4, pp=8, ep=8, vpp=2), 2048, 4096, speed_of_step(29.0, 256), f"{ZOO}: 29.0 s a step"),
        megatron=DEEP_EP | end_stages(12, 10),
    ),
    PublishedRun(
        "Qwen3-30B-A3B, 16 H100, FP8, PP2 EP8, VPP24 there",
        *("qwen3_30b_a3b", layout(16, pp=2, ep=8), 512, 4096, 10494, f"{BRIDGE}, 25.09"),
        micro=2,
        megatron=FP8,
    ),
)
