"""The score label, context length and batches of a classifier that serves as a reward model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megarl.config import ConfigError
from megarl.rewards.sequence_classifier import ClassifierOptions, batches, get_context_length, resolve_label

pytestmark = pytest.mark.alone

ONE_LABEL = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
THREE_LABELS = ONE_LABEL | {"id2label": {"0": "bad", "1": "good", "2": "0"}}


def label(hf: dict[str, Any], **options: Any) -> int:
    return resolve_label(hf, ClassifierOptions.read(options), "/judge")


def test_resolves_the_score_label() -> None:
    assert (
        label(ONE_LABEL)
        == label(ONE_LABEL, label="0")
        == label(ONE_LABEL, label=0)
        == label(ONE_LABEL, label="LABEL_0")
        == 0
    )
    assert label(THREE_LABELS, label="good") == label(THREE_LABELS, label=1) == 1
    assert label(THREE_LABELS, label="0") == 2  # label names take precedence over indices
    assert label({"architectures": ONE_LABEL["architectures"], "num_labels": 1}) == 0


@pytest.mark.parametrize(
    ("hf", "options", "message"),
    [
        (
            THREE_LABELS,
            {},
            r"^reward\.model=/judge has 3 labels, .* set roles\.reward\.options\.label .*\(bad, good, 0\)$",
        ),
        (
            {"architectures": ONE_LABEL["architectures"]},
            {},
            r"has 2 labels.*\(LABEL_0, LABEL_1\)",
        ),  # the default of transformers
        (
            THREE_LABELS,
            {"label": "fine"},
            r"^roles\.reward\.options\.label=fine: reward\.model=/judge has the labels bad, go",
        ),
        (THREE_LABELS, {"label": 3}, r"label=3: "),
        (
            {"architectures": ["BertForMaskedLM"]},
            {},
            r"is not a sequence classifier: its architecture in config\.json is Bert",
        ),
        ({}, {}, "its architecture in config.json is"),
        (ONE_LABEL, {"labels": "good"}, r"^unknown key roles\.reward\.options\.labels; did you mean .*label\?"),
        (ONE_LABEL, {"dtype": "int8"}, r"roles\.reward\.options\.dtype must be one of float32, bfloat16"),
        (ONE_LABEL, {"on_overlong": "drop"}, r"roles\.reward\.options\.on_overlong must be one of error, truncate"),
    ],
)
def test_refuses_ambiguous_labels_and_other_models(hf: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        label(hf, **options)


def test_context_length_comes_from_the_config_or_tokenizer() -> None:
    assert get_context_length({"max_position_embeddings": 514}, 512) == 512
    assert get_context_length({"n_positions": 1024}, 10**30) == 1024
    assert get_context_length({}, 77) == 77


def test_batches_sort_by_length() -> None:
    assert batches([3, 9, 4, 4], 12) == [[1], [2, 3, 0]]  # 3 x 4 tokens, padded
    assert batches([3, 9, 4, 4], 1) == [[1], [2], [3], [0]]
    assert batches([], 12) == []


def test_batches_stay_within_the_token_budget() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        lengths = rng.integers(1, 60, int(rng.integers(1, 40))).tolist()
        budget = int(rng.integers(1, 200))
        result = batches(lengths, budget)
        assert sorted(i for part in result for i in part) == list(range(len(lengths)))
        for part in result:
            assert len(part) == 1 or len(part) * max(lengths[i] for i in part) <= budget
