"""The configuration of a role with a policy or engines besides the first. Pure.

Actor, engines and the checks of a dry run read one policy from `model.path`, `parallel`, `actor_optimizer`, `rollout`
and the placement of `actor` and `rollout`; a critic is read from `critic`. `policy_config` puts what belongs to another
role there, so that the same code builds, checks and plans all of them. There are two kinds: the roles `actor_b`,
`rollout_b`, `reference_b` and `critic_b` of another trained policy, here called b, and frozen models on engines of
their own, such as the judge.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable
from functools import partial

from megarl.config import Config, ConfigError, OptimizerConfig, RolloutConfig, stages, strict
from megarl.config.replay_source import ReplaySource
from megarl.parallel.placement import (
    POLICY_ROLES,
    has_model,
    is_engine_role,
    placement_of,
    role_parallel,
    role_settings,
    split_role,
)

JUDGE = "judge"
"""The role whose engines serve the judge of `roles.reward.backend: judge`."""
JUDGE_KEYS = (
    *("tp", "ep", "sglang", "max_context", "concurrency", "num_speculative_tokens"),
    *("request_timeout", "hang_timeout", "start_timeout"),
)
"""Keys of `rollout` that apply to engines that only answer the requests of another role."""
SHARED_ENGINE_KEYS = (
    *("engine", "tp", "ep", "sglang", "vllm", "max_context", "concurrency", "num_speculative_tokens"),
    *("request_timeout", "hang_timeout", "start_timeout", "tool_call_parser"),
    *("asynchronous", "sync_changes_only", "sync_adapters_only", "max_loras"),
)
"""Keys of `rollout` that policies with the same engines cannot set differently."""
POLICIES_FOLDER = "policies"
"""Subfolder of a run folder; holds one folder of recorded rollouts for each policy besides the first."""


def policy_config(config: Config, role: str) -> Config:
    """Return the configuration with the model, optimizer, layout, engine settings and ranks of a role's policy in place
    of the first policy's: `config` itself for roles of the first. Raises ConfigError for invalid settings."""
    policy = split_role(role)[1]
    if policy:
        return _trained_policy_config(config, policy)
    return _frozen_engine_config(config, role) if role != "rollout" and is_engine_role(config, role) else config


def _trained_policy_config(config: Config, policy: str) -> Config:
    """Return the configuration of a policy besides the first. Settings that its roles lack are the first policy's."""
    actor, rollout, critic = f"actor_{policy}", f"rollout_{policy}", f"critic_{policy}"
    settings, engine_settings = role_settings(config, actor), role_settings(config, rollout).rollout
    critic_settings = role_settings(config, critic)
    if "replay" in engine_settings:
        raise ConfigError(f"roles.{rollout}.rollout.replay: all policies replay the same run; set rollout.replay")
    # An engine outside of the job has the weights of one policy.
    defaults = dataclasses.replace(config.rollout, replay=_replay_of_policy(config.rollout.replay, policy), external=())
    placement = placement_of(config)
    ranks = {name: placement.format_ranks(name) for name in (actor, rollout, critic)}
    policy_ranks = {"actor": ranks[actor], "rollout": ranks[rollout], "critic": ranks[critic]}
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, seed=(config.run.seed + zlib.crc32(policy.encode())) % 2**31),
        model=dataclasses.replace(config.model, path=settings.model or config.model.path),
        parallel=dataclasses.replace(role_parallel(config, actor), world_size=config.parallel.world_size),
        rollout=strict.build_dataclass(RolloutConfig, engine_settings, f"roles.{rollout}.rollout.", Config, defaults),
        actor_optimizer=strict.build_dataclass(
            OptimizerConfig, settings.optimizer, f"roles.{actor}.optimizer.", Config, config.actor_optimizer
        ),
        critic=dataclasses.replace(
            config.critic,
            # By default a critic starts from its policy's model.
            path=critic_settings.model or ("" if settings.model else config.critic.path),
            parallel=critic_settings.parallel or config.critic.parallel,
            optimizer=strict.build_dataclass(
                OptimizerConfig,
                critic_settings.optimizer,
                f"roles.{critic}.optimizer.",
                Config,
                config.critic.optimizer,
            ),
        ),
        placement={**config.placement, **ranks, **policy_ranks},
    )


def has_other_model(config: Config, policy: str) -> bool:
    """Return whether a policy starts from another model than the first. policy: empty for the first."""
    return bool(policy) and role_settings(config, f"actor_{policy}").model not in ("", config.model.path)


def engine_key(config: Config, role: str, name: str) -> str:
    """Return the key that sets `rollout.NAME` of a role's engines: that of another policy's role if it is set there."""
    return f"roles.{role}.rollout.{name}" if name in role_settings(config, role).rollout else f"rollout.{name}"


def _replay_of_policy(replay: str, policy: str) -> str:
    """Return the `rollout.replay` of a policy besides the first: RUN/policies/b@7 for RUN@7."""
    if not replay:
        return ""
    source = ReplaySource.parse(replay)
    return str(source._replace(folder=source.folder / POLICIES_FOLDER / policy))


def _frozen_engine_config(config: Config, role: str) -> Config:
    """Return the configuration of a frozen model's engines. Settings that the role lacks have their defaults."""
    settings, key = role_settings(config, role), f"roles.{role}.rollout."
    if not settings.model:
        raise ConfigError(f"roles.{role}.model is not set; it must name the HF folder of the {role}")
    if settings.parallel:
        raise ConfigError(f"roles.{role}.parallel: engines have no such layout; set {key}tp and {key}ep")
    for name in settings.rollout:
        if name not in JUDGE_KEYS and name in {field.name for field in dataclasses.fields(RolloutConfig)}:
            raise ConfigError(f"{key}{name} does not apply to the {role}; its keys are {', '.join(JUDGE_KEYS)}")
    defaults = RolloutConfig(engine=settings.backend[0])
    rollout: RolloutConfig = strict.build_dataclass(RolloutConfig, settings.rollout, key, Config, defaults)
    placement = {**config.placement, "rollout": placement_of(config).format_ranks(role)}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=settings.model, hf_config=""),
        rollout=rollout,
        placement=placement,
        # Records of the policy's choices that a trainer would replay.
        train=dataclasses.replace(config.train, routing_replay=False, sparse_index_replay=False),
    )


def check_change(config: Config, changed: Config, where: str = "") -> None:
    """Apply `stages.check_change` to the engines of all policies."""
    stages.check_change(config, changed, where)
    for role in config.roles:
        base, policy = split_role(role)
        if base == "rollout" and policy:
            key_of = partial(engine_key, config, role)
            stages.check_change(policy_config(config, role), policy_config(changed, role), where, key_of)


def list_engine_roles(config: Config, roles: Iterable[str]) -> tuple[str, ...]:
    """Return the roles with engines of their own, in order. A replay has none for the policies, and policies besides
    the first have none if the first's serve their adapters."""
    replays, serves = bool(config.rollout.replay), serves_adapters(config)

    def has_own(role: str) -> bool:
        base, policy = split_role(role)
        return base != "rollout" or not (replays or (serves and policy))

    return tuple(role for role in roles if is_engine_role(config, role) and has_own(role))


def sleeps_with_weights(config: Config, roles: Iterable[str], role: str) -> bool:
    """Return whether the engines of a role sleep with a copy of their weights on the host."""
    roles = tuple(roles)
    if takes_turns(config, roles, role):
        return True
    own = policy_config(config, role)
    needs_weights = syncs_changes(own) or syncs_adapters(own)
    return needs_weights and (not own.rollout.asynchronous or bool(find_shared_ranks(config, roles, role)))


def syncs_changes(config: Config) -> bool:
    """Return whether weight syncs send changes alone: there are other nodes to send to."""
    parallel, rollout = config.parallel, config.rollout
    return rollout.sync_changes_only and not rollout.replay and parallel.world_size > parallel.ranks_per_node


def syncs_adapters(config: Config) -> bool:
    """Return whether weight syncs send LoRA's adapters alone."""
    rollout = config.rollout
    return (rollout.sync_adapters_only or rollout.max_loras > 0) and not rollout.replay and config.lora.rank > 0


def serves_adapters(config: Config) -> bool:
    """Return whether the engines of the first policy serve the adapters of all policies, beside the base weights."""
    return config.rollout.max_loras > 0 and syncs_adapters(config)


def adapter_name(role: str) -> str:
    """Return the name of the adapter that requests of these engines ask for: that of the role which trains it."""
    return role.replace("rollout", "actor", 1)


def _list_same_engines(config: Config, roles: Iterable[str], role: str) -> set[str]:
    """Return the roles that have a role's engines."""
    is_shared = split_role(role)[0] == "rollout" and serves_adapters(config)
    return {role, *(other for other in roles if is_shared and split_role(other)[0] == "rollout")}


def find_shared_ranks(config: Config, roles: Iterable[str], role: str) -> frozenset[int]:
    """Return the ranks of a role's engines that also have a model, or engines of another role."""
    placement = placement_of(config)
    own = _list_same_engines(config, roles := tuple(roles), role)
    others = [other for other in roles if other not in own and has_model(config, other)]
    return frozenset(placement.ranks_of(role)).intersection(
        rank for other in others for rank in placement.ranks_of(other)
    )


def takes_turns(config: Config, roles: Iterable[str], role: str) -> bool:
    """Return whether the engines of a role share ranks with other engines, with a model of another policy or, if they
    never get weights from a trainer, with any model.

    The policy's own models need no turns: the engines get new weights after each of its steps. Policies whose
    adapters are served by the same engines need no turns with each other.
    """
    placement, roles = placement_of(config), tuple(roles)
    base, policy = split_role(role)
    ranks, others = set(placement.ranks_of(role)), set(list_engine_roles(config, roles))
    for other in roles:
        other_base, other_policy = split_role(other)
        is_other_policys = other_base in POLICY_ROLES and other_policy != policy
        if has_model(config, other) and (is_other_policys or base != "rollout"):
            others.add(other)
    others -= _list_same_engines(config, roles, role)
    return any(ranks & set(placement.ranks_of(other)) for other in others)
