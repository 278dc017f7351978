"""What the weight loader knows about SGLang's models: where their weights are, and what is derived from them."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.engine import weight_loader
from megarl.engine.sglang import sglang_loader

pytestmark = pytest.mark.alone


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.zeros(4, 6))


def execute(model: torch.nn.Module, order: dict[str, Any]) -> dict[str, Any]:
    answer = torch.zeros(1 << 12, dtype=torch.uint8)
    encoded = torch.frombuffer(bytearray(json.dumps(order).encode()), dtype=torch.uint8)
    sglang_loader.load(model, [("order", encoded), ("answer", answer)])
    return weight_loader.read_answer(answer)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("load_up_proj_weight_first", True, "has the rows of up before those of gate"),
        ("use_flashinfer_trtllm_moe", True, "packs them into blocks"),
        ("w13_swiglu_interleaved", True, "gate and up in turn"),
        ("use_triton_kernels", True, "transposed"),
        ("use_marlin", True, "repacked"),
        ("load_up_proj_weight_first", False, ""),
        ("_block_fp8_bf16_weight", None, ""),
    ],
)
def test_describe_reports_unusual_weight_layouts(attribute: str, value: Any, message: str) -> None:
    """The attribute may be on the layer or on its quantization method."""
    for owner in ("layer", "method"):
        layer = Model()
        layer.quant_method = type("Method", (), {})()
        setattr(layer if owner == "layer" else layer.quant_method, attribute, value)
        unusual = execute(torch.nn.Sequential(Model(), layer), {"do": "describe"})["odd"]
        assert len(unusual) == bool(message)
        assert all(line.startswith("1 has ") and message in line for line in unusual)


def test_describe_reports_shuffled_weights() -> None:
    model = Model()
    model.matrix.is_shuffled = True  # type: ignore[attr-defined]
    assert execute(model, {"do": "describe"})["odd"] == ["the model has its weights shuffled (is_shuffled)"]


@pytest.mark.parametrize(
    ("experts", "is_moved"),
    [([[0, 1, 2, 3]] * 2, False), ([[0, 1, 2, 3, 0, 1]], False), ([[0, 1, 2, 3], [0, 2, 1, 3]], True)],
)
def test_describe_reports_moved_experts(
    monkeypatch: pytest.MonkeyPatch, experts: list[list[int]], is_moved: bool
) -> None:
    table = SimpleNamespace(physical_to_logical_map_cpu=torch.tensor(experts), num_logical_experts=4)
    fake_module = SimpleNamespace(get_global_expert_location_metadata=lambda: table)
    monkeypatch.setitem(sys.modules, "sglang.srt.eplb.expert_location", fake_module)  # type: ignore[arg-type]
    unusual = execute(Model(), {"do": "describe"})["odd"]
    assert unusual == (["the engine's experts are not at their index (init_expert_location)"] if is_moved else [])


def test_finish_recomputes_derived_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    fake_module = ModuleType("sglang.srt.model_loader.loader")
    fake_module.post_load_weights = done.append  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, fake_module.__name__, fake_module)
    model = Model()
    monkeypatch.setattr(Model, "refresh_gemma_weight", lambda norm: done.append(("1 + w", norm)), raising=False)
    assert execute(model, {"do": "finish"}) == {}
    assert done == [model, ("1 + w", model)]


def test_finish_checks_the_placement_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/engine/test_engine_orders.py` moves the experts of real engines."""
    monkeypatch.setattr(sglang_loader, "finish", lambda model: None)
    table = SimpleNamespace(physical_to_logical_map_cpu=torch.zeros(2, 4), num_physical_experts=4)
    tables: list[Any] = [None, table, table]
    location = SimpleNamespace(get_global_expert_location_metadata=lambda: tables.pop(0))
    for name in ("sglang", "sglang.srt", "sglang.srt.eplb", "sglang.srt.runtime_context"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang.srt.runtime_context"].get_parallel = None  # type: ignore[attr-defined]
    monkeypatch.setattr(sys.modules["sglang.srt.eplb"], "expert_location", location, raising=False)
    for layer, experts, message in (
        ("0", [0, 1, 2, 3], "SGLang has no expert locations for this model"),
        ("0", [0, 1, 2], "layer 0 with 3 experts, but the engine has 2 layers with 4"),
        ("2", [0, 1, 2, 3], "layer 2 with 4 experts, but the engine has 2 layers with 4"),
    ):
        assert execute(Model(), {"do": "finish", "experts": {layer: experts}}) == {"error": f"ValueError: {message}"}
