"""Exported reward models load as transformers sequence classifiers and serve with the same scores."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "megatron"))
import tiny

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss")
WITHOUT_CLASS = {"glm4_moe"}  # transformers 5.19 has no sequence classifier of these


@pytest.fixture(scope="module")
def trained(
    run_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("reward_models")
    first, second = run_ranks(2, "tests/workers/ranks_reward_model.py", str(folder), ",".join(FAMILIES))
    assert first == second
    return folder, first


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - WITHOUT_CLASS))
def test_transformers_loads_the_export_with_equal_scores(family: str, trained: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoModelForSequenceClassification

    folder, results = trained
    options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True, "attn_implementation": "eager"}
    model, result = AutoModelForSequenceClassification.from_pretrained(folder / family, **options)
    assert not result["missing_keys"] and not result["unexpected_keys"] and not result["mismatched_keys"]
    policy = tiny.HF[family]["architectures"][0]
    assert type(model).__name__ == policy.replace("CausalLM", "SequenceClassification")
    assert model.config.num_labels == 1 and model.config.pad_token_id == 199
    batch = tiny.pairs()
    texts = batch.tokens.split(batch.lengths.tolist())
    with torch.no_grad():
        single_scores = [float(model(ids[None]).logits) for ids in texts]
        padded = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True, padding_value=199)
        padded_scores = model(padded, attention_mask=(padded != 199).long()).logits[:, 0].tolist()
    assert results[family]["trained"] == pytest.approx(single_scores, abs=1e-5)
    assert results[family]["trained"] == pytest.approx(padded_scores, abs=1e-5)
    assert max(single_scores) - min(single_scores) > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_export_serves_in_fp32_with_a_function(family: str, trained: tuple[Path, dict[str, Any]]) -> None:
    folder, results = trained
    lengths = tiny.pairs().lengths.tolist()
    for score, served, length in zip(results[family]["trained"], results[family]["served"], lengths, strict=True):
        # Up to rounding: what sequences on different ranks have in common is found for their prompts alone.
        expected = {"model": score, "length": length, "reward": length + score, "only": score}
        assert served == pytest.approx(expected, abs=1e-5)
    config = json.loads((folder / family / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification") and config["dtype"] == "float32"
