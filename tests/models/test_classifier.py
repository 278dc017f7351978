"""The config.json of a classifier, whose trunk has the table of the language model."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import ConfigError
from megarl.models.family import classifier_config, is_classifier
from megarl.models.registry import family_of, load_hf_config

pytestmark = pytest.mark.alone

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs/models").glob("*.json"))
CONFIGS = [path for path in CONFIGS if "vision_config" not in path.read_text()]  # which have no classifier


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_classifier_config_round_trip(path: Path) -> None:
    policy = load_hf_config(path)
    family = family_of(policy)
    result = classifier_config(policy, family.architecture, 7)
    assert not is_classifier(policy) and is_classifier(result)
    assert result["architectures"] == [family.architecture.replace("CausalLM", "SequenceClassification")]
    assert (result["id2label"], result["num_labels"], result["pad_token_id"]) == ({"0": "LABEL_0"}, 1, 7)
    assert family_of(result) is family
    changed = {"architectures", "id2label", "label2id", "num_labels", "pad_token_id"}
    assert {key: result[key] for key in result.keys() - changed} == {
        key: policy[key] for key in policy.keys() - changed
    }
    assert classifier_config(result, family.architecture, None) == {**result, "pad_token_id": None}


def test_error_names_unknown_classifier() -> None:
    with pytest.raises(
        ConfigError, match="no model family for the architecture BertForSequenceClassification; known: Qwen2"
    ):
        family_of({"architectures": ["BertForSequenceClassification"]})
    with pytest.raises(ConfigError, match="Qwen2ForTokenClassification"):
        family_of({"architectures": ["Qwen2ForTokenClassification"]})
