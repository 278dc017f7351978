"""LoRA in three layouts against transformers: each is one launch of `ranks_lora.py`, which compares on the inside.

Adapters are not fresh there: with B of the order of 0.2 they change log-probs by more than 1.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BOUNDS = {
    "outputs": 1e-5,  # log-probs or values
    "base": 1e-5,  # the same without adapters
    "fresh": 0.0,  # between fresh adapters and none
    "merged": 1e-6,  # merged weights, against products in float64
    "merged outputs": 1e-5,  # of a model without LoRA that has the merged weights
    "loss": 5e-6,
    "grad_norm": 1e-5,  # relative
    "gradients": 5e-6,  # largest difference of any gradient over the largest gradient
    "step": 1e-4,  # largest difference of any factor after one clipped AdamW step, in units of the learning rate
    "resumed": 0.0,  # the next step after saving and loading
    "recomputed": 1e-4,  # the same with activations recomputed, in units of the learning rate
}
EXPERTS_ONLY = "deepseek_v3:actor:experts.linear_fc1+experts.linear_fc2"
LAYOUTS = {
    # tp, pp, ep, family:role
    "TP2 with sequence parallelism": (2, 1, 1, "qwen3:actor,qwen3_moe:critic"),
    "TP2 x EP2": (2, 1, 2, "qwen3_moe:actor,deepseek_v3:actor"),
    # Of the last, the first stage is a dense layer: nothing in it is trained.
    "PP2": (1, 2, 1, f"qwen3:actor,deepseek_v3:critic,{EXPERTS_ONLY}"),
}
DRAWN: dict[str, float] = {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout: str, run_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    tp, pp, ep, models = LAYOUTS[layout]
    results = run_ranks(2, "tests/megatron/ranks_lora.py", str(tp), str(pp), str(ep), models, str(tmp_path))
    for rank, result in enumerate(results):
        if tp == 1:
            check_stand_ins(result.pop("stand-ins"))
        assert result.keys() == set(models.split(","))
        for model, numbers in result.items():
            assert numbers.pop("frozen") == 1.0, (rank, model)
            assert numbers.pop("adapters matter") > 0.5
            # Uniform in +- 1 / sqrt(in), times sqrt(in); and the same numbers in every layout.
            assert 0.98 < numbers.pop("widest") <= 1 and abs(numbers.pop("spread") - 3**-0.5) < 0.02
            assert DRAWN.setdefault(":".join(model.split(":")[::2]), numbers["drawn"]) == numbers.pop("drawn")
            too_large = {name: value for name, value in numbers.items() if not value <= BOUNDS[name]}
            assert numbers.keys() == BOUNDS.keys() and not too_large, (rank, model, too_large)


def check_stand_ins(found: dict[str, float]) -> None:
    """Grouped experts and fused norms, which only a GPU has, by modules of the same interface."""
    assert found["difference"] < 1e-5 and found["least effect"] > 1
    assert found["factors"] == 2 * 2 * (1 + 4 + 4)  # layers x factors x weights
    assert found["with gradients"] == found["factors"] - 2 * 2 * 2  # one expert has no tokens
