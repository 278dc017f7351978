"""INT4 experts in the real SGLang: it computes with the dequantised values, and keeps them where the tables say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
from compare import assert_matches_transformers
from engine_config import make_config
from int4_folder import dequantised_model, quantise_experts
from kimi_k25_folder import add_tower

from megarl.config import ConfigError
from megarl.engine.engine_host import HOST_VARIABLE
from megarl.engine.sglang.engine_settings import check_int4
from megarl.engine.sglang.sglang_backend import SGLangBackend
from megarl.engine.sglang.sglang_engine import SGLangEngine
from megarl.engine.weight_sender import OrderBuffer
from megarl.models.registry import family_of, load_hf_config
from megarl.reshard.plan.layout import EngineLayout, find_engine_problems


@pytest.mark.nightly
@pytest.mark.parametrize("has_tower", [False, True], ids=["kimi_k2", "kimi_k25"])
def test_engine_computes_with_int4_experts(
    has_tower: bool, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, so that all but the experts' values is exact; on two expert parallel ranks."""
    model, layout = tiny_models.kimi_k2(), EngineLayout(2, ep=2)
    dense = quantise_experts(tiny_models.save(model, tmp_path / "plain"), folder := tmp_path / "int4")
    if has_tower:
        add_tower(folder)
    config = make_config(folder, tmp_path / "run", tp=layout.tp, ep=layout.ep)
    engine = SGLangEngine(replace(config, train=replace(config.train, routing_replay=True)), threads=1)
    monkeypatch.setenv(HOST_VARIABLE, host)
    engine.start()
    try:
        engine.wait_ready()
        assert_matches_transformers(engine, dequantised_model(model, dense), 0)
        buffers = [OrderBuffer(SGLangBackend()) for _ in range(layout.tp)]
        engine.begin_update()
        engine.call_loader([buffer.make_payload({"do": "describe"}) for buffer in buffers])
        engine.end_update(0)
    finally:
        engine.shutdown()
    hf = load_hf_config(folder)
    for position, answer in enumerate(buffer.read_answer() for buffer in buffers):
        assert answer["odd"] == []
        found = answer["tensors"]
        assert found["model.layers.1.mlp.experts.w13_weight_packed"][0] == "uint8"
        params = family_of(hf).params(hf, 1)
        always_fp32 = {param.slot.name for param in params if param.slot and param.is_sent_as_fp32}
        for name in found.keys() - always_fp32:  # the engine's dtype is fp32 here
            found[name][0] = found[name][0].replace("float32", "bfloat16")
        assert find_engine_problems(found, params, layout, position, family_of(hf).num_experts(hf), "int4") == []


def test_settings_that_repack_int4_experts_are_rejected() -> None:
    check_int4({})
    check_int4({"moe_runner_backend": "triton"})
    with pytest.raises(ConfigError, match="deep_gemm: for an INT4 checkpoint SGLang then takes Marlin"):
        check_int4({"moe_runner_backend": "deep_gemm"})
    with pytest.raises(ConfigError, match="moe_a2a_backend=deepep: with an INT4 checkpoint"):
        check_int4({"moe_a2a_backend": "deepep"})
