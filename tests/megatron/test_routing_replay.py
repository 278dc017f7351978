"""Routing replay in one router; `test_model.py` checks models in every layout."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("kind", ["softmax after", "softmax before", "sigmoid, bias, groups"])
def test_replayed_weights_and_gradient_match_fp64(units: dict[str, Any], kind: str) -> None:
    result = units["replayed_routing"][kind]
    assert result["chosen"] and result["others"] >= 3  # of the five replayed tokens
    assert result["weights"] < 1e-6 and result["gradient"] < 1e-6


def test_refuses_routing_of_another_model(units: dict[str, Any]) -> None:
    refused = units["replayed_routing"]["refused"]
    assert refused["valid"] == ""
    assert "names the experts [0, 0] for a token in layer 1, not 2 different ones of 8" in refused["zeros"]
    assert "[8, 1]" in refused["foreign"] and "[-1, 3]" in refused["half"]
    assert "of 1 layers with 3 experts a token, the trainer's model has 1 with 2" in refused["topk"]


def test_only_the_actor_receives_routing(units: dict[str, Any]) -> None:
    result = units["routing_by_role"]
    assert len(result["actor"]) > 1 and set(map(tuple, result["actor"])) == {tuple(result["shape"])}
    assert set(result["critic"]) == set(result["reward_model"]) == {None}
