import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.config import Config, ConfigError, from_dict
from megarl.rollout import server_args


def test_fields_of_the_installed_sglang() -> None:
    assert {"attention_backend", "max_total_tokens", "weight_version", "sleep_on_idle"} <= server_args.known_fields()
    server_args.check({"attention_backend": "triton", "log_level": "info"})


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        ("atention_backend", "not a field of SGLang's ServerArgs; did you mean attention_backend?"),
        ("tp_size", "cannot be set; it is decided by rollout.tp"),
    ],
)
def test_wrong_keys(key: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.sglang.{key} .*".replace(".", r"\.", 2)) as caught:
        server_args.check({key: "x"})
    assert complaint in str(caught.value)


HF = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 512,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1024,
}


def drafts(folder: Path | None = None, number: int = 3, **rollout: Any) -> Config:
    model = {"path": str(folder)} if folder else {}
    return from_dict({"model": model, "rollout": {"draft_tokens": number, "max_context": 1020, **rollout}})


def test_drafts_need_a_layer_and_its_tensors(tmp_path: Path) -> None:
    server_args.check_drafts(HF, drafts())
    server_args.check_drafts(HF | {"num_nextn_predict_layers": 0}, drafts(number=0))
    (tmp_path / "config.json").write_text(json.dumps(HF))
    save_file({"model.layers.2.mlp.gate.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"but {re.escape(str(tmp_path))} has no tensors model\.layers\.3\."):
        server_args.check_drafts(HF, drafts(tmp_path))
    save_file({"model.layers.3.eh_proj.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    server_args.check_drafts(HF, drafts(tmp_path))


@pytest.mark.parametrize(
    ("changes", "rollout", "complaint"),
    [
        ({}, {"number": -1}, "must not be negative, but is -1; 0 turns drafts off"),
        ({"num_nextn_predict_layers": 2}, {}, "this DeepseekV3ForCausalLM has 2; set it to 0"),
        ({}, {"max_context": 1021}, "rollout.draft_tokens=3 needs 1025 positions.* the model has 1024; lower"),
        ({}, {"sglang": {"attn_dp_size": 2}}, "rollout.draft_tokens=3 with rollout.sglang.attn_dp_size: never tried"),
    ],
)
def test_drafts_that_cannot_be(changes: dict[str, Any], rollout: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        server_args.check_drafts(HF | changes, drafts(**rollout))


def test_how_sglang_is_told_to_draft() -> None:
    assert server_args.speculative(0) == {}
    told = server_args.speculative(3)
    assert (told["speculative_num_steps"], told["speculative_num_draft_tokens"]) == (3, 4)
    assert told.keys() <= server_args.known_fields()
    for key in told:
        with pytest.raises(ConfigError, match="decided by rollout.draft_tokens"):
            server_args.check({key: told[key]})
