"""Validation of `model.megatron` and layouts before a model is built."""

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
        ("fused biases", ["model.megatron.bias_activation_fusion", "gate and up in turn"]),
    ],
)
def test_refuses_invalid_config_with_remedy(units: dict[str, Any], case: str, words: list[str]) -> None:
    message = units["config_errors"][case]
    assert all(word in message for word in words), message


def test_accepts_megatron_fields(units: dict[str, Any]) -> None:
    assert units["config_errors"]["accepted"] == "no error"


def test_megatron_logs_no_advice(units: dict[str, Any]) -> None:
    """Models are built, trained and saved without the warnings that Megatron-Core logs for trainers' authors."""
    assert units["megatron_log"] == []
