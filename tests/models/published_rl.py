"""Published steps of RL with their layout and seconds, and the seconds that the model predicts for them.

The model's constants come from `CALIBRATIONS`, none of which is among the runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.config import Config, from_dict
from megarl.models.memory import engine_bytes, kv_elements, unique_params
from megarl.models.registry import load_hf_config
from megarl.models.rl_step_time import (
    Conversations,
    EngineTime,
    RLSpec,
    forward_seconds,
    generation_seconds,
    training_seconds,
)
from megarl.models.step_time import GPUSpec, StepTime

MODELS = Path(__file__).resolve().parents[2] / "configs/models"
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32}
QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
H20 = replace(
    GPUSpec(),
    flops=GPUSpec().flops * 148 / 989,
    memory_bandwidth=GPUSpec().memory_bandwidth * 4.0 / 3.35,
)  # the same shares of its nominal limits as for the H100
PROMPT_TOKENS = 250  # of OpenMathInstruct-2 with NeMo-RL's instruction: 1,060 - 795 tokens of Llama 3.1 8B
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True)
class Calibration:
    """A published measurement of a phase. `predicted` is without the slowdown, if that is calibrated."""

    name: str
    seconds: float
    predicted: float
    source: str

    @property
    def ratio(self) -> float:
        return self.seconds / self.predicted

    @property
    def tuning_row(self) -> str:
        return f"| {self.name} | {self.seconds:.3g} | {self.predicted:.3g} | {self.ratio:.2f} | {self.source} |"


def load(model: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return config.json of a model in configs/models, with changes."""
    return QWEN3_32B if model == "qwen3_32b" else dict(load_hf_config(MODELS / f"{model}.json")) | dict(changes or {})


def optimizer_step(
    hf: Mapping[str, Any], sequences: int, length: int, sizes: Mapping[str, int], budget: int = 4096
) -> dict[str, float]:
    """Return the seconds of an optimizer step by activity, without slowdown."""
    config = from_dict({"parallel": dict(sizes), "train": {"max_tokens_per_gpu": budget}})
    return StepTime(hf, sequences * length, length, GPUSpec()).seconds(config)


def _training_calibrations() -> list[Calibration]:
    rows = []
    nemo = "NeMo-RL issue 959"
    llamas = (
        ("Llama 3.1 8B, 8 H100, PP2", load("llama3_70b", LLAMA_8B), 1045, {"world_size": 8, "pp": 2}),
        ("Llama 3.1 70B, 64 H100, TP4 PP4", load("llama3_70b"), 648, {"world_size": 64, "tp": 4, "pp": 4}),
    )
    for name, hf, length, sizes in llamas:  # 28 and 18 s for both
        update = sum(optimizer_step(hf, 512, length, sizes).values())
        forward = forward_seconds(optimizer_step(hf, 2048, length, sizes, 4 * 4096))
        rows.append(Calibration(f"{name}: four updates", 28, 4 * update, nemo))
        rows.append(Calibration(f"{name}: two forward passes", 18, 2 * forward, nemo))
    moe = (
        ("32 H200, EP8", 13, (512, 4096, {"world_size": 32, "ep": 8}, 8 * 4096), "NeMo-RL issue 966"),
        (
            "16 H800, PP2 EP8",
            10.36,
            (128, 8192, {"world_size": 16, "pp": 2, "ep": 8}, 8192),
            "Pai-Megatron-Patch issue 643",
        ),
        (
            "16 H800, PP4 EP4",
            20.99,
            (256, 8192, {"world_size": 16, "pp": 4, "ep": 4}, 8192),
            "Pai-Megatron-Patch issue 643",
        ),
    )
    for name, seconds, arguments, source in moe:
        predicted = sum(optimizer_step(load("qwen3_30b_a3b"), *arguments).values())
        rows.append(Calibration(f"Qwen3-30B-A3B, {name}: an update", seconds, predicted, source))
    return rows


def _decoding_calibrations() -> list[Calibration]:
    eight = EngineTime(load("llama3_70b", LLAMA_8B), 1, 8, GPUSpec(), RLSpec())
    seventy = EngineTime(load("llama3_70b"), 4, 8, GPUSpec(), RLSpec())
    thirty = EngineTime(load("qwen3_30b_a3b"), 1, 8, H20, RLSpec())
    return [
        Calibration(
            "Llama 3.1 8B, 256 responses per engine of 1 H100, 795 tokens of at most 3,846",
            *(56.5, eight.batch_seconds(Conversations(2048, 1045, 4096, 250), 256, 256)),
            "NeMo-RL issue 959, the mean of four runs",
        ),
        Calibration(
            "Llama 3.1 70B, 128 responses per engine of 4 H100, 398 tokens of at most 3,846",
            *(85.25, seventy.batch_seconds(Conversations(2048, 648, 4096, 250), 128, 128)),
            "NeMo-RL issue 959, the mean of four runs",
        ),
        Calibration(
            "Qwen3-30B-A3B, 1,024 tokens of 4 responses per engine of 1 H20",
            *(38.2 / 4, 1024 * thirty.token_seconds(4, 1536) + thirty.prefill_seconds(4096)),
            "vLLM pull request 29311",
        ),
    ]


TRAINING, DECODING = _training_calibrations(), _decoding_calibrations()
CHECKS = [
    Calibration(
        "DeepSeek-V3, 64 responses per engine of 32 H100, as below",
        57.4,
        EngineTime(load("deepseek_v3"), 32, 8, GPUSpec(), RLSpec()).batch_seconds(
            Conversations(512, 745, 1536, PROMPT_TOKENS), 64, 64
        ),
        "NeMo-RL pull request 2779; not used",
    )
]


REFIT_BANDWIDTH = 25e9


def refit_seconds(hf: Mapping[str, Any], is_colocated: bool, bandwidth: float = REFIT_BANDWIDTH) -> float:
    """Return the seconds of NeMo-RL's weight sync, in which each engine reads all tensors of the checkpoint, after the
    optimizer is offloaded if engines share its GPUs. MegaRL's sends shards to shards.

    Constants fit the 5, 14, 17 and 40 s of Llama 3.1 8B and 70B (issue 959), Qwen3-30B-A3B and 235B (pull request
    3294, B200) within 1.3.
    """
    tensors = sum(len(param.hf) * count for param, count in unique_params(hf))
    return (5.0 if is_colocated else 0.0) + 0.5e-3 * tensors + engine_bytes(hf, 1, 2) / bandwidth


REFITS = (("llama3_70b", LLAMA_8B, 5), ("llama3_70b", {}, 14), ("qwen3_30b_a3b", {}, 17.2), ("qwen3_235b", {}, 40.2))


@dataclass(frozen=True)
class PublishedStep:
    """seconds: of a step. ranks: of the model, and of engines if these are not the same. sizes: tp, cp, ep, pp.

    tokens: mean of a conversation, prompt included, and maximum. cache: share of a GPU's memory for the engine."""

    name: str
    seconds: float
    model: str
    tokens: tuple[float, int]
    sequences: tuple[int, int]  # of a step, and of an optimizer step
    ranks: tuple[int, int]
    engine_tp: int
    sizes: tuple[int, int, int, int]
    source: str
    staleness: int = 0  # asynchronous if above 0
    megatron: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    machine: GPUSpec = GPUSpec()
    prompt_tokens: int = PROMPT_TOKENS
    gpu_bytes: float = 85e9
    keys: Mapping[str, Any] = field(default_factory=dict)  # other keys of the configuration, by section

    @cached_property
    def hf(self) -> dict[str, Any]:
        return load(self.model, self.changes)

    @cached_property
    def conversations(self) -> Conversations:
        return Conversations(self.sequences[0], *self.tokens, self.prompt_tokens)

    @cached_property
    def config(self) -> Config:
        tp, cp, ep, pp = self.sizes
        trained, engines = self.ranks
        tree: dict[str, Any] = {
            "model": {"megatron": dict(self.megatron)},
            "parallel": {"world_size": trained + engines, "tp": tp, "cp": cp, "ep": ep, "pp": pp},
            "rollout": {"tp": self.engine_tp, "concurrency": 1024, "max_staleness": self.staleness},
            "train": {"max_tokens_per_gpu": self.tokens[1] // cp},
            "run": {"num_update": self.sequences[0] // self.sequences[1]},
        }
        if engines:
            tree["placement"] = {"actor": f"0-{trained - 1}", "rollout": f"{trained}-{trained + engines - 1}"}
            tree["rollout"]["asynchronous"] = True
        for section, keys in self.keys.items():
            tree[section] = {**keys, **tree.get(section, {})}
        return from_dict(tree)

    @cached_property
    def training(self) -> dict[str, float]:
        """Predicted seconds of two forward passes, of the policy and of the reference, and of the updates."""
        return training_seconds(self.hf, self.config, self.conversations, 2, self.machine)

    def predict(self, spec: RLSpec, refit_bandwidth: float = REFIT_BANDWIDTH) -> dict[str, float]:
        """Return the predicted seconds by phase. spec: constants of generation."""
        is_colocated = not self.ranks[1]
        memory = (0.6 if is_colocated else 0.8) * self.gpu_bytes  # vLLM's gpu_memory_utilization
        free = memory - engine_bytes(self.hf, self.engine_tp, 2) - 3e9
        cached = int(free / (2 * kv_elements(self.hf, self.engine_tp)))
        phases = self.training | {"weight sync": refit_seconds(self.hf, is_colocated, refit_bandwidth)}
        training = sum(phases.values())
        generate = generation_seconds(
            self.hf, self.config, self.conversations, training, self.machine, spec, kv_tokens=cached
        )
        return {"generate": generate} | phases

    @cached_property
    def phases(self) -> dict[str, float]:
        return self.predict(RLSpec())

    @property
    def predicted(self) -> float:
        return sum(self.phases.values())

    @property
    def ratio(self) -> float:
        return self.predicted / self.seconds

    @property
    def tuning_row(self) -> str:
        """The row of this run in docs/tuning.md."""
        phases = " | ".join(f"{seconds:.0f}" for seconds in self.phases.values())
        return (
            f"| {self.name} | {self.source} | {self.seconds:g} | {self.predicted:.0f} | {self.ratio:.2f} | {phases} |"
        )


def end_stages(first_layers: int, last_layers: int) -> dict[str, int]:
    return {"num_layers_in_first_pipeline_stage": first_layers, "num_layers_in_last_pipeline_stage": last_layers}


V3, Q235, Q30, Q32 = "deepseek_v3", "qwen3_235b", "qwen3_30b_a3b", "qwen3_32b"
L8 = {"megatron": FULL, "changes": LLAMA_8B}
DS = {"megatron": FULL | end_stages(3, 2)}
QW = {"megatron": FULL | end_stages(11, 11)}
BATCH, WHOLE = (2048, 512), (512, 512)
OFF = {"staleness": 1}
RUNS = (
    PublishedStep(
        "Llama 3.1 8B", 97.7, "llama3_70b", (1060, 4096), BATCH, (16, 0), 1, (1, 1, 1, 2), "NeMo-RL v0.4", **L8
    ),
    PublishedStep(
        "Llama 3.1 8B, one off",
        74.6,
        "llama3_70b",
        (1129, 4096),
        BATCH,
        (8, 8),
        1,
        (1, 1, 1, 2),
        "NeMo-RL v0.4",
        **L8,
        **OFF,
    ),
    PublishedStep("DeepSeek-V3", 154, V3, (745, 1536), WHOLE, (256, 0), 32, (1, 1, 16, 16), "NeMo-RL v0.4", **DS),
    PublishedStep(
        "DeepSeek-V3, one off",
        77.9,
        V3,
        (744, 1536),
        WHOLE,
        (256, 256),
        32,
        (1, 1, 16, 16),
        "NeMo-RL v0.4",
        **DS,
        **OFF,
    ),
    PublishedStep("Qwen3-235B", 506, Q235, (5671, 8192), WHOLE, (128, 0), 16, (2, 2, 16, 8), "NeMo-RL v0.4", **QW),
    PublishedStep(
        "Qwen3-235B, one off", 241, Q235, (5691, 8192), WHOLE, (128, 128), 8, (4, 1, 16, 8), "NeMo-RL v0.4", **QW, **OFF
    ),
    PublishedStep("Qwen3-30B-A3B", 225, Q30, (3154, 4096), BATCH, (32, 0), 4, (2, 1, 8, 1), "NeMo-RL v0.4"),
    PublishedStep(
        "Qwen3-30B-A3B, one off", 244, Q30, (3158, 4096), BATCH, (16, 16), 4, (2, 1, 8, 1), "NeMo-RL v0.4", **OFF
    ),
    PublishedStep("Qwen3-32B", 393, Q32, (3206, 4096), BATCH, (32, 0), 4, (4, 1, 1, 4), "NeMo-RL v0.4"),
    PublishedStep(
        "Qwen3-32B, one off", 215, Q32, (3207, 4096), BATCH, (32, 32), 4, (4, 1, 1, 4), "NeMo-RL v0.4", **OFF
    ),
    PublishedStep(
        *("DeepSeek-V3, 96 H20", 1700, V3, (2110, 9782), (768, 256), (96, 0), 32, (8, 1, 8, 12), "verl, August 2025"),
        megatron=FULL | end_stages(5, 6) | {"moe_token_dispatcher_type": "flex"},
        machine=H20,
        prompt_tokens=150,
        gpu_bytes=96e9,
        keys={"rollout": {"sglang": {"disable_cuda_graph": True}}, "actor_optimizer": {"offload_fraction": 1.0}},
    ),
)
LATER_RUNS = (
    PublishedStep(
        "Llama 3.1 8B", 92.8, "llama3_70b", (1019, 4096), BATCH, (16, 0), 1, (1, 1, 1, 2), "NeMo-RL v0.5", **L8
    ),
    PublishedStep(
        "Llama 3.1 8B, one off",
        64.8,
        "llama3_70b",
        (1123, 4096),
        BATCH,
        (8, 8),
        1,
        (1, 1, 1, 1),
        "NeMo-RL v0.5",
        **L8,
        **OFF,
    ),
    PublishedStep("DeepSeek-V3", 134, V3, (744, 1536), WHOLE, (256, 0), 32, (1, 1, 16, 16), "NeMo-RL v0.5", **DS),
    PublishedStep(
        "DeepSeek-V3, one off",
        64.9,
        V3,
        (738, 1536),
        WHOLE,
        (256, 256),
        32,
        (1, 1, 16, 16),
        "NeMo-RL v0.5",
        **DS,
        **OFF,
    ),
    PublishedStep("Qwen3-235B", 431, Q235, (5700, 8192), WHOLE, (128, 0), 16, (2, 2, 16, 8), "NeMo-RL v0.5", **QW),
    PublishedStep(
        "Qwen3-235B, one off", 203, Q235, (5707, 8192), WHOLE, (128, 128), 8, (4, 1, 16, 8), "NeMo-RL v0.5", **QW, **OFF
    ),
    PublishedStep("Qwen3-30B-A3B", 198, Q30, (3196, 4096), BATCH, (32, 0), 2, (1, 1, 8, 1), "NeMo-RL v0.5"),
    PublishedStep(
        "Qwen3-30B-A3B, one off", 154, Q30, (3201, 4096), BATCH, (16, 16), 2, (1, 1, 8, 2), "NeMo-RL v0.5", **OFF
    ),
    PublishedStep("Qwen3-32B", 376, Q32, (3251, 4096), BATCH, (32, 0), 4, (4, 1, 1, 4), "NeMo-RL v0.5"),
    PublishedStep(
        "Qwen3-32B, one off", 200, Q32, (3252, 4096), BATCH, (32, 32), 4, (4, 1, 1, 4), "NeMo-RL v0.5", **OFF
    ),
    PublishedStep(
        "DeepSeek-V3, 512 GPUs", 111, V3, (697, 1536), WHOLE, (512, 0), 32, (1, 1, 16, 16), "NeMo-RL v0.6", **DS
    ),
    PublishedStep(
        "Qwen3-235B, 256 GPUs", 312, Q235, (5713, 8192), WHOLE, (256, 0), 16, (2, 2, 16, 8), "NeMo-RL v0.6", **QW
    ),
    PublishedStep(
        "Qwen3-30B-A3B, eight off",
        34.5,
        Q30,
        (3206, 4096),
        BATCH,
        (128, 64),
        2,
        (1, 1, 8, 1),
        "NeMo-RL v0.6",
        staleness=8,
    ),
)
