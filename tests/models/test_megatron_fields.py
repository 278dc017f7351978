"""The fields parsed from Megatron's source are those of its dataclasses, and values are checked against them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config import ConfigError, foreign_dataclasses
from megarl.models.megatron_fields import (
    _CLASSES,
    _DDP,
    _MLA_CLASSES,
    CONFIG_KEYS,
    FORBIDDEN,
    MODEL_FIELDS,
    _parse_fields,
    check,
    check_ddp,
)
from megarl.models.registry import family_of

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))
import tiny  # noqa: E402

pytestmark = pytest.mark.alone

# In another process, because importing megarl.megatron adapts Megatron to the machine first.
SCRIPT = """
import dataclasses, json
from megarl.megatron.build import MLATransformerConfig, TransformerConfig
kinds = TransformerConfig, MLATransformerConfig
print("RESULT", json.dumps([[item.name for item in dataclasses.fields(kind) if item.init] for kind in kinds]))
"""


def test_parsed_fields_match_megatron_dataclasses() -> None:
    process = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, check=True)
    plain_fields, mla_too = json.loads(process.stdout.partition("RESULT ")[2].splitlines()[0])
    for names, classes in ((plain_fields, _CLASSES), (mla_too, _MLA_CLASSES)):
        init_fields, fields = set(names), _parse_fields(classes).keys()
        assert init_fields <= fields
        assert not {name for name in fields - init_fields if not name.startswith("_")}
    assert CONFIG_KEYS.keys() <= _parse_fields(_CLASSES).keys()
    assert _parse_fields(_MLA_CLASSES).keys() >= MODEL_FIELDS | FORBIDDEN.keys()


OVERRIDABLE = {
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",  # weights are loaded afterwards
    "moe_router_dtype",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_router_bias_update_rate",
}


@pytest.mark.parametrize("family", tiny.HF)
def test_refuses_fields_that_config_json_decides(family: str) -> None:
    settings = family_of(tiny.HF[family]).megatron_config(tiny.HF[family])
    fields_set = settings.keys()
    assert fields_set - OVERRIDABLE <= MODEL_FIELDS | FORBIDDEN.keys()
    for name in fields_set - OVERRIDABLE:
        with pytest.raises(ConfigError, match=f"model.megatron.{name} cannot be set: "):
            check({name: None}, mla=True)
    check({name: settings[name] for name in fields_set & OVERRIDABLE}, mla=True)


def test_passes_other_fields_through() -> None:
    full_recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    check({**full_recompute, "num_layers_in_last_pipeline_stage": 2, "moe_aux_loss_coeff": [0.1, 0.2]}, mla=False)
    check({"attention_dropout": 0.1, "recompute_granularity": "selective", "recompute_modules": ["moe"]}, mla=True)
    check_ddp({"overlap_grad_reduce": True, "bucket_size": None})
    refused = {"tensor_model_parallel_size": "set parallel.tp", "fp16": "not implemented", "x": "not a field"}
    refused |= {"num_layers": "the model's config.json decides it", "mscale": "the model's config.json decides it"}
    for name, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            check({name: 1}, mla=False)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("moe_z_loss_coeff", "much", "must be a number, not 'much'"),
        ("moe_z_loss_coeff", "1e-3", "; write 0.001"),
        ("recompute_num_layers", 1.5, "must be a whole number, not 1.5"),
        ("recompute_num_layers", 10**400, "must be at most 2147483647, not a number of 401 digits"),
        ("moe_token_dispatcher_type", "all2all", "must be one of allgather, alltoall, flex"),
        ("apply_rope_fusion", 1, "must be true or false, not 1"),
        ("init_method", "normal", "cannot be set: it is of type"),
        ("attention_dropout", 1.0, "must be at least 0 and below 1"),
        ("recompute_modules", ["mpl"], "mpl is not one of .* did you mean mlp"),
        ("recompute_granularity", "full", "needs recompute_method and recompute_num_layers"),
    ],
)
def test_refuses_values_of_other_types(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check({name: value}, mla=False)


def test_refuses_ddp_values_of_other_types() -> None:
    for name, value, message in (
        ("bucket_size", "big", "whole number"),
        ("overlap_grad_reduce", "yes", "true or false"),
    ):
        with pytest.raises(ConfigError, match=f"train.ddp.{name} must be .*{message}"):
            check_ddp({name: value})


def test_accepts_megatrons_defaults() -> None:
    for name, field in {**_parse_fields(_MLA_CLASSES), **_parse_fields(_DDP)}.items():
        if field.default is not ...:
            foreign_dataclasses.check_field_value(name, field.default, field)
