"""Marks by which a gradient counts once in the norm of all; the norm itself is compared in `ranks_layout.py`."""

from __future__ import annotations

import pytest
import torch

from megarl.models import norm_counting
from megarl.models.layout_algebra import Dim1Sharding, HFTensor, Param, Replicated, Sharding

pytestmark = pytest.mark.alone


def param(name: str, cut: Sharding, expert: int | None = None) -> Param:
    return Param(name, (HFTensor(name, (4, 4)),), cut, expert=expert)


def test_marks_are_the_tables_whatever_a_layer_has_set() -> None:
    tensors = {name: torch.nn.Parameter(torch.zeros(4, 4)) for name in ("expert", "down", "cut", "norm")}
    tensors["down"].tensor_model_parallel = True  # type: ignore[attr-defined]
    tensors["cut"].tensor_model_parallel = True  # type: ignore[attr-defined]
    cut, full = Dim1Sharding(4, "columns"), Replicated()
    table = [param("expert", cut, 3), param("down", full), param("cut", cut), param("norm", full)]
    buffer = {"bias": torch.zeros(4)}
    named = {**tensors, **buffer}
    assert norm_counting.set_flags(named, [*table, param("bias", full), param("elsewhere", cut)]) == ["expert", "down"]
    marks = {name: tensor.tensor_model_parallel for name, tensor in tensors.items()}  # type: ignore[attr-defined]
    assert marks == {"expert": True, "down": False, "cut": True, "norm": False}
    assert norm_counting.set_flags(named, table) == []


class Grouped(torch.nn.Module):
    """As Transformer Engine's grouped experts are named."""

    def __init__(self) -> None:
        super().__init__()
        self.weight0 = torch.nn.Parameter(torch.zeros(2))
        self.weight1 = torch.nn.Parameter(torch.zeros(2))


def chunk() -> torch.nn.Module:
    module = torch.nn.Module()
    module.mlp = torch.nn.Module()
    module.mlp.experts = torch.nn.Module()
    module.mlp.experts.linear_fc1 = Grouped()
    top = torch.nn.Module()
    top.layer = module
    return top


def test_an_expert_that_would_drop_out_of_the_norm_stops_the_build() -> None:
    model = chunk()
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
