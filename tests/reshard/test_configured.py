"""Which layouts a configuration describes."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import ConfigError, from_dict
from megarl.reshard.configured import engine_layout, train_layout
from megarl.reshard.layout import EngineLayout, TrainLayout


def config(parallel: dict[str, Any] | None = None, megatron: dict[str, Any] | None = None, **rollout: Any) -> Any:
    return from_dict({"parallel": parallel or {}, "model": {"megatron": megatron or {}}, "rollout": rollout})


def test_the_trainer() -> None:
    settings = config({"world_size": 8, "tp": 2, "pp": 2, "ep": 4}, {"num_layers_in_last_pipeline_stage": 1})
    assert train_layout({"num_hidden_layers": 5}, settings) == TrainLayout(8, 2, 4, ((0, 1, 2, 3), (4,)))


def test_engines() -> None:
    assert engine_layout(config(tp=4, ep=2)) == EngineLayout(4, 2)
    attention = {"enable_dp_attention": True, "dp_size": 4, "enable_dp_lm_head": True}
    assert engine_layout(config(tp=8, ep=8, sglang=attention)) == EngineLayout(8, 8, 4, head_tp=2)
    assert engine_layout(config(tp=8, sglang={"attn_dp_size": 2})) == EngineLayout(8, 1, 2)


@pytest.mark.parametrize("key", ["pp_size", "ep_num_redundant_experts", "dp_size"])
def test_what_cannot_be_served_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.sglang"):
        engine_layout(config(tp=2, sglang={key: 2}))
