"""Layouts and plans from a configuration."""

from __future__ import annotations

from typing import Any

import pytest
from int4_folder import QUANTIZATION

from megarl.config import ConfigError, from_dict
from megarl.reshard.plan.from_config import build_plan, train_layout
from megarl.reshard.plan.layout import EngineLayout, TrainLayout

pytestmark = pytest.mark.alone

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
}


def config(parallel: dict[str, Any] | None = None, megatron: dict[str, Any] | None = None, **rollout: Any) -> Any:
    return from_dict({"parallel": parallel or {}, "model": {"megatron": megatron or {}}, "rollout": rollout})


def test_train_layout() -> None:
    settings = config({"world_size": 8, "tp": 2, "pp": 2, "ep": 4}, {"num_layers_in_last_pipeline_stage": 1})
    assert train_layout({"num_hidden_layers": 5}, settings) == TrainLayout(8, 2, 4, ((0, 1, 2, 3), (4,)))


def test_wire_dtype() -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    hf = {**MODEL, "model_type": "qwen2"}
    wires = [
        build_plan(model, from_dict({"model": {"dtype": dtype}}), EngineLayout(1)).assignment.wire
        for model, dtype in ((hf, "float32"), (hf, "bfloat16"), (hf | fp8, "bfloat16"))
    ]
    assert wires == ["fp32", "bf16", "fp8"]
    with pytest.raises(ConfigError, match="set model.dtype=bfloat16"):
        build_plan(hf | fp8, from_dict({"model": {"dtype": "float32"}}), EngineLayout(1))


def test_int4_experts() -> None:
    """They make the wire INT4, and no cut may go through a group of 32."""
    moe = {"num_experts": 2, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 96}
    hf = MODEL | moe | {"architectures": ["Qwen3MoeForCausalLM"], "quantization_config": QUANTIZATION}

    def build(engine: EngineLayout, **sections: Any) -> Any:
        return build_plan(hf, from_dict({"model": {"dtype": "bfloat16"}, **sections}), engine)

    assert build(EngineLayout(1)).assignment.wire == "int4"
    two = {"world_size": 2, "ep": 2}
    assert build(EngineLayout(2, ep=2), parallel=two).assignment.wire == "int4"
    with pytest.raises(ConfigError, match="as INT4: the engine cuts it at 0 and 48, through a block of 32"):
        build(EngineLayout(2), parallel=two)
    with pytest.raises(ConfigError, match="as INT4: the trainer cuts .* block of 32; use another parallel.etp"):
        build(EngineLayout(2, ep=2), parallel={"world_size": 2, "etp": 2})
    with pytest.raises(ConfigError, match="the engine of an INT4 checkpoint keeps the rest in bfloat16"):
        build(EngineLayout(1), model={"dtype": "float32"})


def test_plan_on_separate_ranks() -> None:
    hf, settings = {**MODEL, "model_type": "qwen2"}, config({"world_size": 8, "tp": 2}, tp=2)
    engine = EngineLayout(2)
    plan = build_plan(hf, settings, engine, train_ranks=range(4), engine_ranks=(6, 7, 4, 5))
    assert (plan.train.world, plan.train.ranks, plan.engine.ranks) == (4, (0, 1, 2, 3), (6, 7, 4, 5))
    assert set(plan.list_transfers().src.tolist()) <= set(range(8)) and set(plan.list_transfers().dst.tolist()) == {
        4,
        5,
        6,
        7,
    }
    assert (plan.rank_map.participants, plan.rank_map.is_colocated) == (list(range(8)), False)
    assert build_plan(hf, settings, engine, train_ranks=range(4)).engine.ranks == tuple(range(8))
    everywhere = build_plan(hf, settings, engine)
    assert (everywhere.train.ranks, everywhere.engine.ranks, everywhere.rank_map.is_colocated) == ((), (), True)
    for train, engines, message in (
        (None, (0, 0), "the ranks of the engines name rank 0 more than once"),
        (None, (0, 1, 2), "tp=2 does not divide the 3 ranks of the engines"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_plan(hf, settings, engine, train, engines)
