"""Flags that count each gradient once in the global norm; `ranks_layout.py` compares the norm itself."""

from __future__ import annotations

import pytest
import torch

from megarl.models import norm_counting
from megarl.models.layout_algebra import Dim1Sharding, HFTensor, Param, Replicated, Sharding

pytestmark = pytest.mark.alone


def param(name: str, sharding: Sharding, expert: int | None = None) -> Param:
    return Param(name, (HFTensor(name, (4, 4)),), sharding, expert=expert)


def test_flags_follow_the_table_over_layer_settings() -> None:
    tensors = {name: torch.nn.Parameter(torch.zeros(4, 4)) for name in ("expert", "down", "cut", "norm")}
    tensors["down"].tensor_model_parallel = True  # type: ignore[attr-defined]
    tensors["cut"].tensor_model_parallel = True  # type: ignore[attr-defined]
    column_sharding, full = Dim1Sharding(4, "columns"), Replicated()
    table = [
        param("expert", column_sharding, 3),
        param("down", full),
        param("cut", column_sharding),
        param("norm", full),
    ]
    buffer = {"bias": torch.zeros(4)}
    all_tensors = {**tensors, **buffer}
    assert norm_counting.set_flags(all_tensors, [*table, param("bias", full), param("elsewhere", column_sharding)]) == [
        "expert",
        "down",
    ]
    flags = {name: tensor.tensor_model_parallel for name, tensor in tensors.items()}  # type: ignore[attr-defined]
    assert flags == {"expert": True, "down": False, "cut": True, "norm": False}
    assert norm_counting.set_flags(all_tensors, table) == []


class GroupedExperts(torch.nn.Module):
    """Expert weights with the names of Transformer Engine's grouped experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight0 = torch.nn.Parameter(torch.zeros(2))
        self.weight1 = torch.nn.Parameter(torch.zeros(2))


def model_chunk() -> torch.nn.Module:
    module = torch.nn.Module()
    module.mlp = torch.nn.Module()
    module.mlp.experts = torch.nn.Module()
    module.mlp.experts.linear_fc1 = GroupedExperts()
    model = torch.nn.Module()
    model.layer = module
    return model


def test_refuses_experts_missing_from_the_norm() -> None:
    model = model_chunk()
    weights = list(model.parameters())
    with pytest.raises(RuntimeError, match="linear_fc1.weight0 is not marked tensor_model_parallel"):
        norm_counting.check_expert_flags([model])
    for weight in weights:
        weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="weight0 is marked as a dense parameter"):
        norm_counting.check_expert_flags([model])
    weights[0].allreduce = False  # type: ignore[attr-defined]
    weights[1].requires_grad_(False)
    norm_counting.check_expert_flags([model])
