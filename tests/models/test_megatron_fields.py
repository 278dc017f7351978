"""The names read from Megatron's source are those of its dataclasses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megarl.config import ConfigError
from megarl.models.megatron_fields import FIXED, OURS, check, known_fields

# In a process of its own, and by way of this package, which fits Megatron to the machine before it is imported.
SCRIPT = """
import dataclasses, json
from megarl.megatron.build import MLATransformerConfig, TransformerConfig
kinds = TransformerConfig, MLATransformerConfig
print("RESULT", json.dumps([[item.name for item in dataclasses.fields(kind) if item.init] for kind in kinds]))
"""


def test_fields_are_megatrons_own() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, check=True)
    plain, mla_too = json.loads(done.stdout.partition("RESULT ")[2].splitlines()[0])
    for names, mla in ((plain, False), (mla_too, True)):
        own = set(names)
        assert own <= known_fields(mla)
        assert not {name for name in known_fields(mla) - own if not name.startswith("_")}
    assert (OURS.keys() | FIXED.keys()) <= known_fields(False)


def test_what_may_be_passed_through() -> None:
    check({"recompute_granularity": "full", "num_layers_in_last_pipeline_stage": 2}, mla=False)
    check({"mscale": 1.0}, mla=True)
    refused = {"tensor_model_parallel_size": "set parallel.tp", "fp16": "not implemented", "x": "not a field"}
    for name, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            check({name: 1}, mla=False)
