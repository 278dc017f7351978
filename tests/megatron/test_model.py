"""Every layout against transformers and torch: log-probs, values, loss, all gradients, one AdamW step, resuming.

Each layout is one launch of `ranks_layout.py`, which compares on the inside and reports the largest differences.
Weights are fp32 and of the order of 0.1, log-probs of the order of 5.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BOUNDS = {
    "logprobs": 1e-5,
    "entropy": 1e-5,
    "temperature": 1e-5,  # log-probs at temperature 0.7
    "values": 1e-5,
    "loss": 5e-6,
    "metric": 5e-6,
    "grad_norm": 1e-5,  # relative
    "gradients": 5e-6,  # largest difference of any gradient over the largest gradient
    "step": 1e-4,  # largest difference of any weight after one clipped AdamW step, in units of the learning rate
    "packing": 5e-6,  # loss with other micro-batches
    "packing_step": 1e-4,
    "vocabulary": 5e-6,  # vocab_parallel_logprobs with padding that fills a rank, part of one, or nothing
    "swapped": 0.0,  # forward with the first weights swapped in, after a step
    "replay same experts": 0.0,  # log-probs, loss, gradients with the model's own experts given, against not given
    "replay logprobs": 1e-5,  # with random experts given, against transformers with the same
    "replay loss": 5e-6,
    "replay gradients": 5e-6,
    "replay recompute full": 0.0,  # against the same without recomputation
    "replay recompute moe": 0.0,
}
FLAGS = ("skipped", "unchanged", "resumed")

MOE = "qwen3_moe:actor,deepseek_v3:actor"
DENSE = "qwen2:actor,qwen3:actor,llama:actor"
LAYOUTS = {
    # tp, pp, ep, world, family:role
    "one process": (1, 1, 1, 1, f"{MOE},{DENSE},deepseek_v2:actor,glm4_moe:actor,deepseek_v3:critic"),
    "TP2 with sequence parallelism": (2, 1, 1, 2, f"{MOE},{DENSE},qwen3_moe:critic"),
    "PP2": (1, 2, 1, 2, f"{MOE},{DENSE},deepseek_v3:critic"),
    "EP2": (1, 1, 2, 2, "qwen3_moe:actor,deepseek_v3:actor"),
    "DP2": (1, 1, 1, 2, "qwen3_moe:actor,deepseek_v3:actor,qwen2:actor"),
    "TP2 x EP2": (2, 1, 2, 2, f"{MOE},deepseek_v2:actor,glm4_moe:actor,deepseek_v3:critic"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(
    layout: str, run_ranks: Callable[..., list[dict[str, Any]]], units: dict[str, Any], tmp_path: Path
) -> None:
    tp, pp, ep, world, models = LAYOUTS[layout]
    results = run_ranks(world, "tests/megatron/ranks_layout.py", str(tp), str(pp), str(ep), models, str(tmp_path))
    assert len(results) == world
    for rank, result in enumerate(results):
        assert result.keys() == set(models.split(","))
        for model, numbers in result.items():
            aux = {name.removeprefix("aux "): numbers.pop(name) for name in list(numbers) if name.startswith("aux ")}
            flags = {name: numbers.pop(name) for name in FLAGS}
            assert flags == {"skipped": 1.0, "unchanged": 1.0, "resumed": 1.0}, (rank, model)
            assert numbers.pop("replay moved", 1.0) > 0.1  # other experts, other log-probs
            too_large = {name: value for name, value in numbers.items() if not value <= BOUNDS[name]}
            assert not too_large, (rank, model, too_large)
            assert ("values" if model.endswith("critic") else "logprobs") in numbers
            if aux and world // (tp * pp) == 1:  # with one replica the micro-batches are those of the one process
                alone = units["aux_losses"]["aux"]
                assert aux == pytest.approx({name: alone[f"actor/{name}"] for name in aux}, rel=1e-5)


def test_aux_losses_are_logged_only_where_they_are_on(units: dict[str, Any]) -> None:
    plain, aux = units["aux_losses"]["plain"], units["aux_losses"]["aux"]
    assert aux.keys() - plain.keys() == {"actor/moe_load_balancing_loss", "actor/moe_z_loss"}
    assert not any("moe_" in name for name in plain)
    assert 1.0 <= aux["actor/moe_load_balancing_loss"] < 2.0  # 1 where experts get equal shares, their number at worst
    assert aux["actor/loss"] == plain["actor/loss"]
    assert abs(aux["actor/grad_norm"] - plain["actor/grad_norm"]) > 0.1  # they are in the gradient


def test_loads_folders_that_transformers_wrote(units: dict[str, Any]) -> None:
    folder = units["folder"]
    assert max(folder[family] for family in ("qwen3_moe", "deepseek_v3", "qwen2")) < 1e-5
    assert folder["no head"] == 0.0
    assert folder["head"] < 1e-5


def test_bf16_is_close_and_has_fp32_masters(units: dict[str, Any]) -> None:
    half = units["half"]
    assert half["difference"] < 0.03
    assert half["last"] < half["first"] - 0.5
    assert half["moved"] > 0.5  # without masters each of the updates would be rounded away


def test_a_critic_starts_at_zero_and_its_head_learns_first(units: dict[str, Any]) -> None:
    critic = units["critic"]
    assert critic["values"] == 0.0
    assert critic["shape"] == [1, 32]
    assert critic["gradient"] < 1e-5
    assert critic["grad_norm"] < 1e-5
    assert critic["trunk"] == 0.0
