"""Which engines of several policies are awake while one of them trains; `policy_engines.py` scripts them."""

from __future__ import annotations

from typing import Any


def test_no_engine_is_awake_while_a_policy_trains_on_its_ranks(units: dict[str, Any]) -> None:
    """All ranks put the engines to sleep in the same order, by which their collectives match."""
    *awake, calls = units["engine_turns"]["shared"]
    assert awake == [[], ["rollout_b"], [], ["rollout"], []]
    assert calls == ["rollout", "rollout_b"]


def test_engines_on_the_rank_of_another_policys_actor_sleep_while_it_trains(units: dict[str, Any]) -> None:
    """Those of the first policy go on generating."""
    at_start, generated, first_trains, second_trains = units["engine_turns"]["beside another actor"]
    assert at_start == first_trains == second_trains == ["rollout"] and generated == ["rollout", "rollout_b"]


def test_engines_on_ranks_of_their_own_stay_awake(units: dict[str, Any]) -> None:
    assert units["engine_turns"]["separate"] == ["rollout_b"]
