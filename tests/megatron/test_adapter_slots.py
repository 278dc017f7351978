"""Three adapters in one pass get the log-probs and gradients of each alone, in several layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BOUNDS = {
    "not_finite": 0.0,
    "logprobs": 1e-6,  # over the largest
    "updates": 5e-6,  # over the largest; another packing of one adapter's sequences alone makes up to 1.3e-6
    "norms": 1e-6,  # of gradients, relative
    "afterwards": 0.0,  # between passes of the trained adapter before and after
}
REASONS = {
    "nothing": "",
    "full fine-tuning": "lora.rank is 0",
    "fsdp": "train.fsdp is set",
    "overlap": "train.ddp.overlap_grad_reduce is set",
    "aux loss": "an auxiliary loss depends on all tokens of a batch",
    "aux loss of a dense model": "",
    "capacity": "experts have a capacity",
    "flex": "its dispatcher is not alltoall",
    "mtp": "multi-token prediction layers are trained",
    "fp8": "the model is trained in FP8",
}
MODELS = [
    "qwen3_moe@tp=2,ep=2",
    "qwen3_moe@tp=2,etp=2",
    "qwen3_moe@ep=2",  # two data parallel ranks
    "deepseek_v3@tp=2,ep=2,recompute=1",  # latent attention has duplicated layers
    "qwen3_moe@pp=2,recompute=1",
    "qwen3_moe@cp=2",
]


def test_adapters_in_one_pass_match_each_alone(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    for rank, results in enumerate(run_ranks(2, "tests/megatron/ranks_adapter_slots.py", " ".join(MODELS))):
        assert results.pop("reasons") == REASONS
        assert results.pop("grouped") < 1e-5
        assert list(results) == MODELS
        for model, numbers in results.items():
            assert numbers.pop("effect") > 0.1, (rank, model)
            too_large = {name: value for name, value in numbers.items() if not value <= BOUNDS[name]}
            assert numbers.keys() == BOUNDS.keys() and not too_large, (rank, model, too_large)
