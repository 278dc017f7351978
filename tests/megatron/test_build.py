from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown", ["model.megatron.moe_z_loss_coef ", "did you mean moe_z_loss_coeff"]),
        ("ours", ["tensor_model_parallel_size", "set parallel.tp"]),
        ("fixed", ["sequence_parallel", "parallel.tp > 1"]),
        ("half", ["recompute_granularity must be one of full, selective"]),
        ("refused", ["Megatron refuses", "only works with aux_loss"]),
        ("fp8", ["model.megatron.fp8", "needs a GPU"]),
        ("experts", ["parallel.ep=3", "4 experts"]),
        ("dense", ["parallel.ep=2", "no experts"]),
        ("layers", ["2 layers", "parallel.pp=3"]),
        ("window", ["model.megatron.window_size", "config.json determines"]),
        ("fused router", ["model.megatron.moe_router_fusion"]),
        ("dropout", ["model.megatron.attention_dropout", "soft cap"]),
    ],
)
def test_a_mistake_is_refused_in_one_line_with_the_remedy(units: dict[str, Any], case: str, words: list[str]) -> None:
    message = units["refusals"][case]
    assert all(word in message for word in words), message


def test_a_field_of_megatrons_passes(units: dict[str, Any]) -> None:
    assert units["refusals"]["accepted"] == "no error"
