"""The configuration of a role with engines other than the policy's. Pure.

`Engines`, `Engine` and the checks of a dry run read one model from `model.path`, its engines' settings from `rollout`
and their ranks from `placement.rollout`. `engine_config` puts the model, settings and ranks of another role there, so
that the same code starts, checks and plans all engines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from megarl.config import Config, ConfigError, RolloutConfig, strict
from megarl.parallel.placement import has_model, is_engine_role, placement_of, role_settings

JUDGE = "judge"
"""The role whose engines serve the judge of `roles.reward.backend: judge`."""
JUDGE_KEYS = (
    *("tp", "ep", "sglang", "max_context", "concurrency", "num_speculative_tokens"),
    *("request_timeout", "hang_timeout", "start_timeout"),
)
"""Keys of `rollout` that apply to engines that only answer the requests of another role."""


def engine_config(config: Config, role: str) -> Config:
    """Return the configuration with a role's model, engine settings and ranks in place of those of `rollout`.

    Settings that `roles.<role>.rollout` lacks have the defaults of `rollout`. Raises ConfigError for invalid settings.
    """
    if role == "rollout":
        return config
    settings, key = role_settings(config, role), f"roles.{role}.rollout."
    if not settings.model:
        raise ConfigError(f"roles.{role}.model is not set; it must name the HF folder of the {role}")
    if settings.parallel:
        raise ConfigError(f"roles.{role}.parallel: engines have no such layout; set {key}tp and {key}ep")
    for name in settings.rollout:
        if name not in JUDGE_KEYS and name in {field.name for field in dataclasses.fields(RolloutConfig)}:
            raise ConfigError(f"{key}{name} does not apply to the {role}; its keys are {', '.join(JUDGE_KEYS)}")
    rollout: RolloutConfig = strict.build_dataclass(RolloutConfig, settings.rollout, key, root=Config)
    placement = {**config.placement, "rollout": placement_of(config).format_ranks(role)}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=settings.model, hf_config=""),
        rollout=rollout,
        placement=placement,
        # Records of the policy's choices that a trainer would replay.
        train=dataclasses.replace(config.train, routing_replay=False, sparse_index_replay=False),
    )


def list_engine_roles(config: Config, roles: Iterable[str]) -> tuple[str, ...]:
    """Return the roles with engines, in order. A replay has none for `rollout`."""
    return tuple(
        role for role in roles if is_engine_role(config, role) and not (role == "rollout" and config.rollout.replay)
    )


def takes_turns(config: Config, roles: Iterable[str], role: str) -> bool:
    """Return whether the engines of a role share ranks with other engines or, if they never get weights from a trainer,
    with any model."""
    placement, engine_roles = placement_of(config), list_engine_roles(config, roles)
    ranks = set(placement.ranks_of(role))
    others = engine_roles if role == "rollout" else [r for r in roles if r in engine_roles or has_model(config, r)]
    return any(other != role and ranks & set(placement.ranks_of(other)) for other in others)
