"""Configurations of roles with engines besides the policy's."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import Config, from_dict
from megarl.controllers.controller import load_requirements
from megarl.parallel.placement import engine_ranks, is_engine_role, is_on_megatron
from megarl.parallel.policy_configs import (
    adapter_name,
    find_shared_ranks,
    list_engine_roles,
    policy_config,
    serves_adapters,
    takes_turns,
)

pytestmark = pytest.mark.alone

JUDGE = {"backend": "sglang", "model": "/judge", "rollout": {"tp": 2, "concurrency": 7, "sglang": {"page_size": 4}}}
ROLES = ("judge", "rollout", "actor", "reward")


def config(placement: dict[str, Any], **sections: Any) -> Config:
    tree = {"placement": placement, "parallel": {"world_size": 4}, "roles": {"judge": JUDGE}, **sections}
    return from_dict({"algorithm": "grpo", "rollout": {"tp": 1, "max_context": 99, "temperature": 0.5}, **tree})


def test_judge_has_its_own_model_settings_and_ranks() -> None:
    full = config({"rollout": "0-1", "actor": "0-1", "judge": "2-3"}, train={"routing_replay": True})
    judge = policy_config(full, "judge")
    assert (judge.model.path, judge.rollout.tp, judge.rollout.concurrency) == ("/judge", 2, 7)
    assert (judge.rollout.max_context, judge.rollout.temperature) == (4096, 1.0)  # the defaults, not the policy's
    assert judge.rollout.sglang == {"page_size": 4} and not judge.train.routing_replay
    assert engine_ranks(judge) == [(2, 3)] and engine_ranks(full) == [(0,), (1,)]
    assert policy_config(full, "rollout") is full
    assert is_engine_role(full, "judge") and not is_on_megatron(full, "judge")


def test_judge_of_the_reward_starts_first() -> None:
    assert load_requirements(config({})).roles[0] == "judge"
    assert "judge" not in load_requirements(from_dict({"algorithm": "grpo"})).roles


def test_engines_take_turns_where_they_share_ranks() -> None:
    """A policy's engines share the actor's ranks without turns: they get its weights whenever they wake."""
    colocated, split = config({}), config({"actor": "0-1", "rollout": "0-1", "judge": "2-3"})
    beside_the_actor = config({"actor": "0-1", "rollout": "2-3", "judge": "0-1"})
    turns = {
        name: [takes_turns(tree, ROLES, role) for role in ("rollout", "judge")]
        for name, tree in (("colocated", colocated), ("split", split), ("beside the actor", beside_the_actor))
    }
    assert turns == {"colocated": [True, True], "split": [False, False], "beside the actor": [False, True]}
    assert not takes_turns(colocated, ("rollout", "actor", "reward"), "rollout")
    replay = config({}, rollout={"replay": "run"})
    assert list_engine_roles(replay, ROLES) == ("judge",)


def test_policies_whose_adapters_are_served_have_the_engines_of_the_first() -> None:
    """They take turns with the judge, and with the trainers of other policies, but not with each other."""
    roles, algorithm = ("judge", "rollout", "rollout_b", "actor", "actor_b"), {"rollout": {"max_loras": 2}}
    serves = algorithm | {"lora": {"rank": 4}}
    apart = {"actor": "0-1", "actor_b": "0-1", "rollout": "2-3", "rollout_b": "2-3", "judge": "0-1"}
    shared, merged = config(apart, **serves), config(apart, lora={"rank": 4})
    assert list_engine_roles(shared, roles) == ("judge", "rollout")
    assert list_engine_roles(merged, roles) == list_engine_roles(config(apart, **algorithm), roles) == roles[:3]
    both = "rollout", "rollout_b"
    assert [takes_turns(shared, roles, role) for role in both] == [False, False]
    assert [takes_turns(merged, roles, role) for role in both] == [True, True]
    assert [find_shared_ranks(shared, roles, role) for role in both] == [frozenset()] * 2
    assert find_shared_ranks(merged, roles, "rollout") == {2, 3}
    colocated = config({}, **serves)
    assert [takes_turns(colocated, roles, role) for role in both] == [True, True]
    assert [adapter_name(role) for role in both] == ["actor", "actor_b"] and serves_adapters(shared)
