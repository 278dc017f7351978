"""What is said of over-sampling and of generation beside training."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from megarl.config import Config, ConfigError, from_dict
from megarl.controllers.controller import load_requirements
from megarl.dry_run.rollout_checks import (
    check_asynchronous,
    check_enough_prompts,
    check_oversampling,
    check_replayed_prefixes,
)
from megarl.types.requirements import Requirements


def uncorrected(config: Config) -> Requirements:
    return replace(load_requirements(config), is_off_policy=False)


def oversampled(**rollout: Any) -> Config:
    return from_dict({"algorithm": "grpo", "rollout": rollout, "data": {"prompts_per_step": 4}})


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({}, ""),
        ({"max_staleness": 0}, ""),
        (
            {"oversample": 1.5, "max_staleness": 0},
            "rollout.max_staleness=0: .* longer than a step are never trained on",
        ),
        ({"oversample": 1.5, "max_staleness": 3}, "rollout.max_staleness=3: .* algorithm=grpo does not correct"),
    ],
)
def test_what_over_sampling_does_to_the_data_is_said(rollout: dict[str, Any], said: str) -> None:
    config, warnings = oversampled(**rollout), list[str]()
    check_oversampling(config, uncorrected(config), warnings)
    assert len(warnings) == bool(said) and all(re.search(said, line) for line in warnings)


def test_a_controller_that_corrects_for_lag_is_not_warned_of() -> None:
    config, warnings = oversampled(oversample=2), list[str]()
    check_oversampling(config, load_requirements(config), warnings)
    assert warnings == []


def test_a_replayed_run_has_nothing_to_over_sample() -> None:
    config = oversampled(oversample=1.5, replay="runs/other")
    with pytest.raises(ConfigError, match="rollout.oversample=1.5 with rollout.replay: .* set the first to 1"):
        check_oversampling(config, load_requirements(config), [])
    check_oversampling(oversampled(replay="runs/other"), load_requirements(config), [])


def test_no_prompt_is_under_way_twice() -> None:
    check_enough_prompts(6, oversampled(oversample=1.5))
    check_enough_prompts(3, oversampled())
    with pytest.raises(ConfigError, match="prompts_per_step=4 has 6 prompts in flight, but data.train has 5; lower"):
        check_enough_prompts(5, oversampled(oversample=1.5))


def test_generation_beside_training_needs_ranks_of_its_own_and_is_warned_of_where_nothing_corrects() -> None:
    apart = {"placement": {"actor": "0", "rollout": "1"}, "parallel": {"world_size": 2}}
    tree: dict[str, Any] = {"algorithm": "grpo", "rollout": {"asynchronous": True}, **apart}
    config, warnings = from_dict(tree), list[str]()
    check_asynchronous(config, load_requirements(config), warnings)
    assert warnings == []
    check_asynchronous(config, uncorrected(config), warnings)
    assert len(warnings) == 1 and "algorithm=grpo does not correct" in warnings[0]
    on_policy = replace(config, rollout=replace(config.rollout, max_staleness=0))
    check_asynchronous(on_policy, uncorrected(on_policy), warnings)
    assert len(warnings) == 1
    with pytest.raises(ConfigError, match="rank 0 also runs the actor"):
        check_asynchronous(replace(config, placement={}), load_requirements(config), [])
    for key, value, what in (("oversample", 1.5, "set only one of them"), ("replay", "runs/x", "need no generation")):
        odd = replace(config, rollout=replace(config.rollout, **{key: value}))
        with pytest.raises(ConfigError, match=what):
            check_asynchronous(odd, load_requirements(odd), [])


TOOLS = {"tools": ["a:b"], "max_turns": 2}


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        (
            {"oversample": 1.5},
            "rollout.oversample=1.5: .* set the first to false, rollout.oversample to 1, or rollout.ma",
        ),
        ({"oversample": 1.5, "max_staleness": 0}, ""),  # which begins anew what a step leaves
        (
            {"asynchronous": True},
            "rollout.on_weight_sync=retract: .* rollout.on_weight_sync to wait or in_place, or rollout.max_staleness",
        ),
        ({"asynchronous": True, **TOOLS}, "to wait or in_place, rollout.max_turns to 1, or rollout.max_staleness to 0"),
        ({"asynchronous": True, "max_staleness": 0, **TOOLS}, ""),  # no conversation goes on through a push
        *(({"asynchronous": True, "on_weight_sync": how}, "") for how in ("wait", "in_place")),
        *(
            (
                {"asynchronous": True, "on_weight_sync": how, **turns},
                "rollout.max_turns=2: .* rollout.max_turns to 1, or",
            )
            for how in ("wait", "in_place")  # the next turn reads those before it by the weights of then
            for turns in (TOOLS, {"environments": ["a:B"], "max_turns": 2})
        ),
        ({**TOOLS}, ""),
    ],
)
def test_replayed_routing_is_of_conversations_that_one_version_reads(rollout: dict[str, Any], said: str) -> None:
    tree = {"algorithm": "grpo", "train": {"routing_replay": True}}
    config = from_dict(tree | {"rollout": rollout})
    if said:
        with pytest.raises(ConfigError, match=f"^train.routing_replay with .*{said}"):
            check_replayed_prefixes(config, load_requirements(config))
    else:
        check_replayed_prefixes(config, load_requirements(config))
    free = from_dict({"algorithm": "grpo", "rollout": rollout})
    check_replayed_prefixes(free, load_requirements(free))
    nothing_trained = from_dict({**tree, "algorithm": "generate", "rollout": rollout})
    check_replayed_prefixes(nothing_trained, load_requirements(nothing_trained))
