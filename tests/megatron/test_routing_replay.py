"""One router's replay; whole models with it, in every layout, are in `test_model.py`."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("kind", ["softmax after", "softmax before", "sigmoid, bias, groups"])
def test_weights_of_given_experts_and_their_gradient_are_those_of_fp64(units: dict[str, Any], kind: str) -> None:
    result = units["routing"][kind]
    assert result["chosen"] and result["others"] >= 3  # of the five tokens that were given experts
    assert result["weights"] < 1e-6 and result["gradient"] < 1e-6


def test_a_record_that_is_none_of_this_model_is_one_error(units: dict[str, Any]) -> None:
    refused = units["routing"]["refused"]
    assert refused["valid"] == ""
    assert "names the experts [0, 0] for a token in layer 1, not 2 different ones of 8" in refused["zeros"]
    assert "[8, 1]" in refused["foreign"] and "[-1, 3]" in refused["half"]
    assert "of 1 layers with 3 experts a token, the trainer's model has 1 with 2" in refused["topk"]


def test_only_the_model_that_replays_has_routing(units: dict[str, Any]) -> None:
    result = units["who_gets_routing"]
    assert len(result["actor"]) > 1 and set(map(tuple, result["actor"])) == {tuple(result["shape"])}
    assert set(result["critic"]) == set(result["reward_model"]) == {None}
