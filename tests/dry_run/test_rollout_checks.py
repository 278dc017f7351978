"""Checks of oversampling, asynchronous rollouts and replays."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config, ConfigError, from_dict
from megarl.controllers.controller import load_requirements
from megarl.dry_run.rollout_checks import (
    check_asynchronous,
    check_cache_budget,
    check_enough_prompts,
    check_expert_balance,
    check_external,
    check_external_weights_dir,
    check_oversampling,
    check_served_adapters,
)
from megarl.dry_run.validation import check_step
from megarl.engine.sglang.server_args import check_sampling
from megarl.types.requirements import Requirements


def on_policy_requirements(config: Config) -> Requirements:
    return replace(load_requirements(config), is_off_policy=False)


def make_config(**rollout: Any) -> Config:
    return from_dict({"algorithm": "grpo", "rollout": rollout, "data": {"prompts_per_step": 4}})


@pytest.mark.parametrize(
    ("rollout", "message"),
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
def test_warns_of_oversampling_bias(rollout: dict[str, Any], message: str) -> None:
    config, warnings = make_config(**rollout), list[str]()
    check_oversampling(config, on_policy_requirements(config), warnings)
    assert len(warnings) == bool(message) and all(re.search(message, line) for line in warnings)


def test_no_oversampling_warning_with_off_policy_correction() -> None:
    config, warnings = make_config(oversample=2), list[str]()
    check_oversampling(config, load_requirements(config), warnings)
    assert warnings == []


def test_keys_of_engines_have_no_effect_on_a_replay() -> None:
    """Without a replay the last three checks refuse them."""
    keys = {"oversample": 1.5, "asynchronous": True, "on_weight_sync": "in_place", "max_staleness": 2}
    keys |= {"top_k": 20, "sglang": {"sampling_mask_max_tokens": 10}}
    tree = {"algorithm": "remax", "train": {"routing_replay": True}, "data": {"prompts_per_step": 4}}
    for replay in ("", "runs/other"):
        config, warnings = from_dict({**tree, "rollout": {**keys, "replay": replay}}), list[str]()
        declared = load_requirements(config)
        refused: list[Callable[[], None]] = [
            partial(check_asynchronous, config, declared, warnings),  # the actor is on the engine's rank
            partial(check_enough_prompts, 5, config),
            partial(check_sampling, config.rollout),
        ]
        for check in refused:
            with nullcontext() if replay else pytest.raises(ConfigError):
                check()
    check_oversampling(config, declared, warnings)
    assert warnings == []


def test_too_few_prompts_for_oversampling_raise() -> None:
    check_enough_prompts(6, make_config(oversample=1.5))
    check_enough_prompts(3, make_config())
    with pytest.raises(ConfigError, match="prompts_per_step=4 has 6 prompts in flight, but data.train has 5; lower"):
        check_enough_prompts(5, make_config(oversample=1.5))


def test_warnings_and_errors_name_the_key_of_the_policy_that_sets_it() -> None:
    tree = {
        "algorithm": "megarl.controllers.policies:PPOAndReMaxController",
        "parallel": {"world_size": 2},
        "placement": {"actor": "0", "rollout": "1"},
        "rollout": {"max_staleness": 3},
        "roles": {"rollout_b": {"rollout": {"oversample": 4, "asynchronous": True}}},
        "data": {"prompts_per_step": 4},
    }
    config, warnings = from_dict(tree), list[str]()
    with pytest.raises(
        ConfigError, match=r"^roles.rollout_b.rollout.oversample=4 with data.prompts_per_step=4 has 16 "
    ):
        check_enough_prompts(5, config)
    check_asynchronous(config, on_policy_requirements(config), warnings)
    check_oversampling(config, on_policy_requirements(config), warnings)
    (overlapping, oversampled) = warnings
    assert overlapping.startswith("roles.rollout_b.rollout.asynchronous with rollout.max_staleness=3: tokens")
    assert oversampled.startswith("roles.rollout_b.rollout.oversample=4 with rollout.max_staleness=3: tokens")
    both, warnings = from_dict(tree | {"rollout": {"oversample": 2}, "roles": {}}), []
    check_oversampling(both, on_policy_requirements(both), warnings)
    assert [line.partition(":")[0] for line in warnings] == ["rollout.oversample=2 with rollout.max_staleness=1"]


def test_asynchronous_rollouts_need_correction_and_a_kv_cache_of_their_own() -> None:
    split = {"placement": {"actor": "0", "rollout": "1"}, "parallel": {"world_size": 2}}
    tree: dict[str, Any] = {"algorithm": "grpo", "rollout": {"asynchronous": True}, **split}
    config, warnings = from_dict(tree), list[str]()
    check_asynchronous(config, load_requirements(config), warnings)
    assert warnings == []
    check_asynchronous(config, on_policy_requirements(config), warnings)
    assert len(warnings) == 1 and "algorithm=grpo does not correct" in warnings[0]
    on_policy = replace(config, rollout=replace(config.rollout, max_staleness=0))
    check_asynchronous(on_policy, on_policy_requirements(on_policy), warnings)
    assert len(warnings) == 1
    colocated = replace(config, placement={})
    check_asynchronous(colocated, load_requirements(config), [])
    keeping = replace(colocated.rollout, on_weight_sync="in_place")
    check_asynchronous(replace(config, rollout=keeping), load_requirements(config), [])
    with pytest.raises(ConfigError, match=r"^rollout.on_weight_sync=in_place with engines on the ranks of the actor"):
        check_asynchronous(replace(colocated, rollout=keeping), load_requirements(config), [])


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        (["10.0.0.5:7000", "node-3:7000", "[fd00::1]:7000"], ""),
        (["10.0.0.5"], "rollout.external: '10.0.0.5' is not HOST:PORT, such as"),
        (["10.0.0.5:7000", "10.0.0.5:7000"], "rollout.external names 10.0.0.5:7000 twice"),
        (["8.8.8.8:7000"], "8.8.8.8:7000 is an address of the public internet, .* MEGARL_PUBLIC_NETWORK=1"),
    ],
)
def test_checks_addresses_of_external_engines(
    addresses: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(external=addresses)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_external(config, load_requirements(config))
    if "public" in message:
        monkeypatch.setenv("MEGARL_PUBLIC_NETWORK", "1")
        check_external(config, load_requirements(config))


def test_external_engines_need_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_ENGINE_SECRET", "short")
    with pytest.raises(ConfigError, match="MEGARL_ENGINE_SECRET has 5 characters: set it to 16"):
        check_external(config := make_config(external=["10.0.0.5:7000"]), load_requirements(config))


def test_external_engines_need_a_trainer() -> None:
    config = from_dict({"algorithm": "generate", "rollout": {"external": ["10.0.0.5:7000"]}})
    with pytest.raises(ConfigError, match="rollout.external with algorithm=generate: .* nothing trains here"):
        check_external(config, load_requirements(config))


def test_the_folder_for_weights_of_external_engines_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, message in ((tmp_path / "new", ""), (tmp_path / "file", "external_weights_dir .*file is not a folder")):
        config = make_config(external_weights_dir=str(folder))
        with pytest.raises(ConfigError, match=message) if message else nullcontext():
            check_external_weights_dir(config, load_requirements(config))


def test_engines_record_routing_to_replay_it_or_to_count_it() -> None:
    assert not make_config().records_routing
    assert make_config(rebalance_experts_every=1).records_routing
    assert not make_config(rebalance_experts_every=1, replay="/run").records_routing  # there are no engines
    assert from_dict({"train": {"routing_replay": True}}).records_routing
    config = make_config(rebalance_experts_every=1)
    check_expert_balance(config, load_requirements(config))


def test_an_external_engine_has_one_policy() -> None:
    algorithm = "megarl.controllers.policies:PPOAndReMaxController"
    config = from_dict({"algorithm": algorithm, "rollout": {"external": ["10.0.0.5:7000"]}})
    check_external(config, load_requirements(config))  # the second policy does not inherit it
    roles = {"rollout_b": {"rollout": {"external": ["10.0.0.5:7000"]}}}
    config = from_dict({"algorithm": algorithm, "rollout": {"external": ["10.0.0.5:7000"]}, "roles": roles})
    with pytest.raises(ConfigError, match="roles.rollout_b.rollout.external names 10.0.0.5:7000, and so does rollout"):
        check_external(config, load_requirements(config))


def served(rollout: dict[str, Any] | None = None, roles: dict[str, Any] | None = None, **sections: Any) -> Config:
    tree = {"algorithm": "megarl.controllers.policies:PPOAndReMaxController", "lora": {"rank": 4}, **sections}
    return from_dict({"rollout": {"engine": "vllm", "max_loras": 2, **(rollout or {})}, "roles": roles or {}, **tree})


def test_policies_share_engines_that_serve_their_adapters() -> None:
    """Each may sample in its own way."""
    for config in (served(roles={"rollout_b": {"rollout": {"temperature": 0.5}}}), served({"max_loras": 3})):
        check_served_adapters(config, load_requirements(config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (served({"max_loras": 1}), "rollout.max_loras=1 is fewer than the policies, actor, actor_b; set it to 2"),
        (served(algorithm="generate"), "rollout.max_loras=2 with algorithm=generate: nothing trains adapters here"),
        (served({"external": ["10.0.0.5:7000"]}), "rollout.external with rollout.max_loras=2 is not implemented"),
        (
            served(roles={"rollout_b": {"rollout": {"external": ["10.0.0.5:7000"]}}}),
            "roles.rollout_b.rollout.external with rollout.max_loras=2 is not implemented",
        ),
        (
            served({"asynchronous": True}),
            "rollout.asynchronous with rollout.max_loras=2: .* would pause or abort the requests of the",
        ),
        (served(roles={"actor_b": {"model": "/other"}}), "roles.actor_b.model with .*: engines serve adapters of one"),
        (
            served(roles={"rollout_b": {"rollout": {"max_context": 99}}}),
            "roles.rollout_b.rollout.max_context with .*: rollout_b has the engines of rollout; set rollout.max_con",
        ),
        (
            served(parallel={"world_size": 2}, placement={"actor": 0, "rollout": 0, "actor_b": 1, "rollout_b": 1}),
            "placement.rollout_b with rollout.max_loras=2: it has the engines of rollout; remove it",
        ),
    ],
)
def test_refuses_policies_with_other_engines(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check_served_adapters(config, load_requirements(config))
    assert "\n" not in str(error.value)


def test_an_engine_that_is_added_during_the_run_is_refused_beside_adapters() -> None:
    config = served({"external": ["10.0.0.5:7000"]})
    with pytest.raises(ConfigError, match="rollout.external with rollout.max_loras=2 is not implemented"):
        check_step({}, config, load_requirements(config))


def test_one_policy_with_an_adapter_may_be_asynchronous() -> None:
    config = served({"max_loras": 1, "asynchronous": True}, algorithm="grpo")
    check_served_adapters(config, load_requirements(config))


def test_cache_budget_is_refused_with_external_engines() -> None:
    for rollout in ({}, {"engine": "vllm"}):
        config = make_config(fit_kv_cache=True, **rollout)
        check_cache_budget(config, load_requirements(config))
    for fits, replay in ((False, None), (True, "/run")):
        config = make_config(fit_kv_cache=fits, replay=replay, external=["10.0.0.5:7000"])
        check_cache_budget(config, load_requirements(config))
    config = make_config(fit_kv_cache=True, external=["10.0.0.5:7000"])
    with pytest.raises(ConfigError, match="rollout.fit_kv_cache with rollout.external"):
        check_cache_budget(config, load_requirements(config))
    for settings in ({"sglang": {"disable_radix_cache": True}}, {"vllm": {"enable_prefix_caching": False}}):
        config = make_config(fit_kv_cache=True, engine=next(iter(settings)), **settings)
        with pytest.raises(ConfigError, match="rollout.fit_kv_cache with an engine whose cache keeps no prefixes"):
            check_cache_budget(config, load_requirements(config))
