"""A language model's trunk with one number per token in place of words: critics and reward models, and their HF form.

In HF's terms that is a sequence classifier with one label, `...ForSequenceClassification`, whose head is `score.weight`
without bias, and whose score of a text is the head's number at the text's last token.
"""

from __future__ import annotations

from typing import Any

from megarl.models.family import HFConfig

VALUE_HEAD = "score.weight"
CAUSAL_LM, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


def is_classifier(hf: HFConfig) -> bool:
    """Whether config.json describes a sequence classifier, which has no output layer for words."""
    return str((hf.get("architectures") or [""])[0]).endswith(CLASSIFIER)


def padding_of(hf: HFConfig, pad_token_id: int | None, end_of_turn: int) -> int | None:
    """A token to pad batches with that no conversation ends with; None where the tokenizer and config.json have none,
    and HF's class then takes one conversation at a time. pad_token_id: the tokenizer's."""
    known = (pad_token_id, hf.get("pad_token_id"))
    return next((token for token in known if token not in (None, end_of_turn)), None)


def classifier_config(hf: HFConfig, architecture: str, pad_token_id: int | None) -> dict[str, Any]:
    """config.json of a classifier with one label on the trunk of `hf`, be that a policy's or a classifier's.

    architecture: the policy's. pad_token_id: what HF's classifiers pad batches with. They read their score at the last
    token that is another one, so it must not be one that texts end with; without any they refuse batches of more than
    one text.
    """
    return {
        **hf,
        "architectures": [architecture.replace(CAUSAL_LM, CLASSIFIER)],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "num_labels": 1,
        "pad_token_id": pad_token_id,
    }
