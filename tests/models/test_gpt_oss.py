"""gpt-oss's table: the order of gate and up, biases of experts, and options that are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import ConfigError
from megarl.models import megatron_fields
from megarl.models.layout_algebra import PADDING, Slice, split_with
from megarl.models.registry import family_of

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))

import tiny  # noqa: E402

pytestmark = pytest.mark.alone

HF: dict[str, Any] = tiny.HF["gpt_oss"]
FAMILY = family_of(HF)


def refused(match: str, **changes: Any) -> None:
    with pytest.raises(ConfigError, match=match) as error:
        FAMILY.check(HF | changes)
    assert "\n" not in str(error.value)


def test_activation_is_that_of_transformers() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    fields = FAMILY.megatron_config(HF)
    experts = GptOssExperts(GptOssConfig(swiglu_limit=HF["swiglu_limit"], num_local_experts=1, hidden_size=8))
    x = torch.randn(50, 12, generator=torch.Generator().manual_seed(0))
    limit, offset = fields["activation_func_clamp_value"], fields["glu_linear_offset"]
    gate, up = x[:, ::2].clamp(max=limit), x[:, 1::2].clamp(-limit, limit)
    assert torch.equal(fields["activation_func"](gate) * (up + offset), experts._apply_gate(x))


def test_experts_with_biases_need_etp_1() -> None:
    FAMILY.params(HF, 2)
    with pytest.raises(ConfigError, match=r"parallel.etp=2: Megatron-Core 0.19.2 supports biases of experts"):
        FAMILY.params(HF, 2, etp=2)


def test_engines_add_the_last_bias_once() -> None:
    (bias,) = (p for p in FAMILY.params(HF, 1) if p.megatron == "decoder.layers.0.mlp.experts.0.linear_fc2.bias")
    assert bias.slot is not None
    parts = [split_with(bias, bias.slot.sharding, 2, rank).slices for rank in range(2)]
    assert parts == [(Slice(0, 0, 32),), (Slice(PADDING, 0, 32),)]


def test_windows_follow_layer_types() -> None:
    full, sliding = "full_attention", "sliding_attention"
    assert FAMILY.megatron_config(HF)["window_attn_skip_freq"] == [1, 0]
    assert FAMILY.megatron_config(HF | {"layer_types": [full, full]})["window_attn_skip_freq"] == [0, 0]
    refused("layer_types has 1 entries for 2 layers", layer_types=[sliding])
    refused("layer_types with 'chunked_attention'", layer_types=[full, "chunked_attention"])


def test_refuses_options_that_engine_and_trainer_read_differently() -> None:
    refused(r"swiglu_alpha=1.5 is not implemented \(implemented: 1.702\)", swiglu_alpha=1.5)
    refused("hidden_act_alpha=1.5 is not implemented", hidden_act_alpha=1.5)
    refused("attention_bias=False is not implemented", attention_bias=False)
    refused("num_experts_per_tok=1 is not implemented: the softmax over one expert", num_experts_per_tok=1)
    refused("no rope_scaling, for which transformers takes YaRN", rope_parameters=None)
    rope = HF["rope_parameters"]
    refused("attention_factor=1.2 is not implemented", rope_parameters=rope | {"attention_factor": 1.2})
    refused("rope_type=.dynamic. is not implemented", rope_parameters={"rope_type": "dynamic", "factor": 2.0})


def test_refuses_megatron_fields_that_change_the_model() -> None:
    extras = FAMILY.extras(HF)
    megatron_fields.check({"cp_comm_type": "a2a"}, False, extras)
    for name, value, reason in (
        ("cp_comm_type", "p2p", "attention with sinks only with a2a"),
        ("moe_mlp_glu_interleave_size", 32, "order of gate and up"),
        ("softmax_type", "vanilla", "config.json decides it"),
    ):
        with pytest.raises(ConfigError, match=f"model.megatron.{name}.*{reason}"):
            megatron_fields.check({name: value}, False, extras)
