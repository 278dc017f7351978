"""Critics and reward models: a language model's trunk with a scalar head, and their HF format.

In HF this is a sequence classifier with one label, `...ForSequenceClassification`. Its head is `score.weight` without
bias, and its score of a text is the head's output at the text's last token.
"""

from __future__ import annotations

from typing import Any

from megarl.models.family import HFConfig

VALUE_HEAD = "score.weight"
CAUSAL_LM, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


def is_classifier(hf: HFConfig) -> bool:
    """Return whether config.json describes a sequence classifier, which has no vocabulary output layer."""
    return str((hf.get("architectures") or [""])[0]).endswith(CLASSIFIER)


def padding_of(hf: HFConfig, pad_token_id: int | None, end_of_turn: int) -> int | None:
    """Return a padding token with which no conversation ends.

    None if neither tokenizer nor config.json has one; HF's class then accepts one conversation at a time.

    pad_token_id: the tokenizer's.
    """
    candidates = (pad_token_id, hf.get("pad_token_id"))
    return next((token for token in candidates if token not in (None, end_of_turn)), None)


def classifier_config(hf: HFConfig, architecture: str, pad_token_id: int | None) -> dict[str, Any]:
    """Return the config.json of a classifier with one label on the trunk of `hf`, a policy or a classifier.

    architecture: the policy's.
    pad_token_id: padding token of HF's classifiers. They score the last token that differs from it, so texts must not
        end with it. Without one they reject batches of more than one text.
    """
    return {
        **hf,
        "architectures": [architecture.replace(CAUSAL_LM, CLASSIFIER)],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "num_labels": 1,
        "pad_token_id": pad_token_id,
    }
