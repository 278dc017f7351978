"""LoRA in several layouts compared with transformers, in one launch of `ranks_lora.py`.

Adapters are not fresh there: with B of the order of 0.2 they change log-probs by more than 1.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

BOUNDS = {
    "outputs": 1e-5,  # log-probs or values
    "base": 1e-5,  # the same without adapters
    "fresh": 0.0,  # between fresh adapters and none
    "merged": 1e-6,  # merged weights, against products in float64
    "merged outputs": 1e-5,  # a model without LoRA with the merged weights
    "loss": 5e-6,
    "grad_norm": 1e-5,  # relative
    "gradients": 5e-6,  # largest difference of any gradient over the largest gradient
    "step": 1e-4,  # largest difference of any factor after one clipped AdamW step, in units of the learning rate
    "resumed": 0.0,  # the next step after saving and loading
    "recomputed": 1e-4,  # the same with activations recomputed, in units of the learning rate
    "other_layout": 1e-4,  # the same in another layout, loaded from this one's checkpoint
}
EXPERTS = "experts.linear_fc1+experts.linear_fc2"
MODELS = [
    "qwen3:actor@pp=2",  # the embedding is tied and on both stages
    "qwen3_moe:actor@tp=2,ep=2",
    f"qwen3_moe:critic:{EXPERTS}@tp=2,etp=2",  # the head is the only trained dense parameter
    "deepseek_v3:actor@tp=2,ep=2",
    "deepseek_v3:critic@cp=2",
    "gpt_oss:actor@tp=2,ep=2",
    "deepseek_v32:actor@tp=2",
    "qwen3_next:actor@tp=2",
    f"deepseek_v3:actor:{EXPERTS}@pp=2",  # the first stage is a dense layer without trained parameters
    "deepseek_v3_mtp:actor@pp=2",
    "glm4_moe_mtp:actor@tp=2,ep=2",
]


def test_lora_matches_transformers_in_layouts(run_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    results = run_ranks(2, "tests/megatron/ranks_lora.py", " ".join(MODELS), str(tmp_path))
    drawn: dict[str, float] = {}
    for rank, result in enumerate(results):
        check_fake_te_layers(result.pop("fake TE layers"))
        assert list(result) == MODELS
        for model, numbers in result.items():
            assert numbers.pop("frozen") == 1.0, (rank, model)
            assert numbers.pop("adapters matter") > 0.5
            # Uniform in +- 1 / sqrt(in), times sqrt(in); and the same numbers in every layout.
            assert 0.98 < numbers.pop("widest") <= 1 and abs(numbers.pop("spread") - 3**-0.5) < 0.02
            family, _, *targets = model.partition("@")[0].split(":")
            assert drawn.setdefault(f"{family} {targets}", numbers["drawn"]) == numbers.pop("drawn")
            too_large = {name: value for name, value in numbers.items() if not value <= BOUNDS[name]}
            assert numbers.keys() == BOUNDS.keys() and not too_large, (rank, model, too_large)


def check_fake_te_layers(actual: dict[str, float]) -> None:
    """Check grouped experts and fused norms, which need a GPU, with fakes of the same interface."""
    assert actual["difference"] < 1e-5 and actual["least effect"] > 1
    assert actual["factors"] == 2 * 2 * (1 + 4 + 4)  # layers x factors x weights
    assert actual["with gradients"] == actual["factors"] - 2 * 2 * 2  # one expert has no tokens
