"""The gather gives back, bit for bit, what was cut; who owns what; buckets keep modules whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megarl.checkpoint.export import Owner, find_owners
from megarl.config import ConfigError
from megarl.models.layout_algebra import HFTensor, Param, Replicated

SCRIPT = "tests/checkpoint/ranks_export.py"
Run = Callable[..., list[dict[str, Any]]]


@pytest.mark.parametrize(
    ("world", "tp", "pp", "ep", "etp"),
    [(2, 2, 1, 1, 1), (2, 1, 1, 2, 1), (2, 1, 2, 1, 1), (2, 2, 1, 2, 1), (4, 2, 2, 2, 1), (4, 1, 1, 2, 2)],
)
def test_every_rank_gathers_every_tensor_bitwise(
    run_ranks: Run, world: int, tp: int, pp: int, ep: int, etp: int
) -> None:
    for rank, result in enumerate(run_ranks(world, SCRIPT, str(tp), str(pp), str(ep), str(etp))):
        for family in ("qwen2", "qwen3_moe", "deepseek_v3"):
            assert result[family] == [True] * 3, family  # tiny, small and endless buckets
        assert result["held_everything"] == (pp == ep == 1)
        # What is wrong on the last rank is an error on all, before anybody waits for anybody.
        name, faults = "decoder.layers.2.mlp.experts.3.linear_fc2.weight", result["faults"]
        assert f"rank {world - 1} lacks {name}" in faults["missing"], rank
        assert f"{name} on rank {world - 1} has shape (1, {4 // etp}), not (8, {4 // etp})" in faults["misshapen"]
        assert f"{name} on rank {world - 1} is torch.float32, not torch.bfloat16" in faults["dtype"]
        assert f"rank {world - 1} has value_head.weight, which is not in the table" in faults["unknown"]


def row(megatron: str, expert: int | None = None) -> Param:
    return Param(megatron, (HFTensor(megatron, (1,)),), Replicated(), expert=expert)


TABLE = [
    row("embedding.word_embeddings.weight"),
    row("decoder.layers.0.input_layernorm.weight"),
    *[row(f"decoder.layers.1.mlp.experts.{e}.linear_fc1.weight", e) for e in range(4)],
    row("decoder.final_layernorm.weight"),
    row("output_layer.weight"),
]


def test_owners() -> None:
    owner = find_owners(TABLE, [[0], [1]], ep=2)
    assert owner == {
        "embedding.word_embeddings.weight": Owner(0, None),
        "decoder.layers.0.input_layernorm.weight": Owner(0, None),
        "decoder.layers.1.mlp.experts.0.linear_fc1.weight": Owner(1, 0),
        "decoder.layers.1.mlp.experts.1.linear_fc1.weight": Owner(1, 0),
        "decoder.layers.1.mlp.experts.2.linear_fc1.weight": Owner(1, 1),
        "decoder.layers.1.mlp.experts.3.linear_fc1.weight": Owner(1, 1),
        "decoder.final_layernorm.weight": Owner(1, None),
        "output_layer.weight": Owner(1, None),
    }


def test_layouts_that_own_nothing_twice_or_not_at_all() -> None:
    with pytest.raises(ConfigError, match="the 4 experts of layer 1 do not divide by parallel.ep=3; .* 1, 2, 4"):
        find_owners(TABLE, [[0], [1]], ep=3)
    with pytest.raises(ConfigError, match="layer 1 is not on any pipeline stage"):
        find_owners(TABLE, [[0], []], ep=1)
    with pytest.raises(ConfigError, match="layer 0 is on the pipeline stages 0 and 1"):
        find_owners(TABLE, [[0], [0, 1]], ep=1)
