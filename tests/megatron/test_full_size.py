"""Megatron gives a rank of hundreds what the plan says, at the full size of the models."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from megarl.config import load_config
from megarl.models.layout_algebra import local_shape
from megarl.models.memory import offloaded_bytes, stage_elements, state_bytes
from megarl.models.registry import family_of, load_hf_config
from megarl.reshard.plan.from_config import train_layout

CASES: list[list[Any]] = [
    *(["configs/deepseek_v3_671b.yaml", rank] for rank in (0, 37, 511)),  # the first, a middle and the last stage
    ["configs/deepseek_r1.yaml", 300],
    ["configs/qwen3_235b.yaml", 0],
    ["configs/qwen3_235b.yaml", 127, "parallel.cp=2", "parallel.ep=8"],
    ["configs/llama3_70b.yaml", 64],
    *(["configs/deepseek_v3_671b_96.yaml", rank] for rank in (0, 95)),  # with all optimizer states on the host
]


@pytest.fixture(scope="module")
def built_ranks(run_ranks: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
    (result,) = run_ranks(1, "tests/megatron/ranks_full_size.py", json.dumps(CASES), timeout=500.0)
    return result  # type: ignore[return-value]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(map(str, case)) for case in CASES])
def test_megatron_builds_planned_shapes_and_bytes(built_ranks: list[dict[str, Any]], number: int) -> None:
    path, rank, *overrides = CASES[number]
    config = load_config(path, overrides)
    hf, parallel, built = load_hf_config(config.model.hf_config), config.parallel, built_ranks[number]
    layout = train_layout(hf, config)
    family = family_of(hf)
    experts = family.num_experts(hf)
    planned_shapes = {
        param.megatron: list(
            local_shape(
                param, layout.num_shards(param.expert is not None), layout.shard_index(rank, param.expert is not None)
            )
        )
        for param in family.params(hf, parallel.tp, parallel.etp)
        if layout.has_param(rank, param, experts)
    }
    assert built["shapes"] == planned_shapes  # by canonical name, as the weight sync reads them
    stage = layout.stages[rank // layout.stage_ranks]
    elements = stage_elements(hf, parallel, layout.stages)[layout.stages.index(stage)]
    dense, expert = (layout.stage_ranks // size for size in (parallel.tp, parallel.ep * parallel.etp))
    planned = state_bytes(elements, dense, expert, 2)
    assert built["weights"] == planned["weights"]
    # Megatron pads its buffers to give each rank the same share.
    for part in ("gradients", "optimizer"):
        assert planned[part] <= built[part] <= planned[part] * 1.0001 + 65536, part
    fraction = config.actor_optimizer.offload_fraction
    offloaded = offloaded_bytes(elements, dense, expert, fraction)
    assert built["optimizer on the device"] == (0 if fraction else built["optimizer"])
    if fraction:
        assert offloaded == {
            "optimizer, offloaded": built["optimizer"],
            "gradients, offloaded": built["gradients on the host"],
        }
        assert built["pinned"] < 1.1 * built["gradients on the host"]
    else:
        assert offloaded == {} and built["pinned"] == 0
