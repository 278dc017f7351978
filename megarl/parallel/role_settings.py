"""Settings of a role by its name, of the section `roles` or `flow.register_worker`: any name that a controller calls.

Ours have their settings in sections that are as old as they are; those are named where somebody looks for them here.
What computes a role's model is its backend: Megatron, in a layout over the role's ranks, unless another is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.config import Config, ConfigError, strict

BUILTIN_ROLES: dict[str, tuple[str, str]] = {
    "actor": ("model.path", "parallel"),
    "reward_model": ("model.path", "parallel"),
    "critic": ("critic.path", "critic.parallel"),
    "reward": ("reward.model", "roles.reward.parallel"),
    "reference": ("", ""),
    "rollout": ("", ""),
}
"""Of each role of ours, the keys of its model and of its layout; empty where it has none of its own."""


MEGATRON = "megatron"
SERVICES = ("http", "judge")
"""Backends of the reward that are asked elsewhere, beside whatever computes `reward.model`."""


@dataclass(frozen=True)
class RoleConfig:
    worker: str = ""
    """Who plays it, as `module:name`; empty for who the controller says, or is known to."""
    backend: tuple[str, ...] = ()
    """Which of those that are known to play it; empty for the first of them. Of a worker of your own: what computes its
    model, empty for Megatron. The reward may name two: what computes `reward.model`, and http or judge."""
    model: str = ""
    """HF folder of a model of its own, with the policy's vocabulary."""
    parallel: dict[str, Any] = field(default_factory=dict)
    """Layout of that where it differs: keys of `parallel` but world_size and ranks_per_node."""
    options: dict[str, Any] = field(default_factory=dict)
    """What its worker is given besides, by name."""


def role_settings(config: Config, role: str) -> RoleConfig:
    """Raises ConfigError for what the section cannot hold, or another one holds."""
    found: RoleConfig = strict.build_dataclass(RoleConfig, config.roles.get(role, {}), f"roles.{role}.", root=Config)
    for name, key in zip(("model", "parallel"), BUILTIN_ROLES.get(role, ()), strict=False):
        if getattr(found, name) and key != f"roles.{role}.{name}":
            where = f"is {key}; set that" if key else "is that of the actor; leave it out"
            raise ConfigError(f"roles.{role}.{name}: for the {role} this {where}")
    return found


def role_backends(config: Config, role: str) -> tuple[str, str]:
    """What computes the role's model, and which of `SERVICES` is asked besides; each empty where there is none, or
    nothing is said. Beside a service `reward.model` is computed by Megatron unless another is named. Raises ConfigError
    for two of a kind."""
    named = role_settings(config, role).backend
    services = [name for name in named if role == "reward" and name in SERVICES]
    models = [name for name in named if name not in services]
    for several in (services, models):
        if len(several) > 1:
            raise ConfigError(
                f"roles.{role}.backend=[{', '.join(named)}]: name one of {' and '.join(several)}"
                + (", and http or judge beside it" if several is models and role == "reward" else "")
            )
    model, service = ("".join(models), "".join(services))
    return (MEGATRON if service and not model and config.reward.model else model), service


def has_model(config: Config, role: str) -> bool:
    """Whether it computes on ranks, as all of ours do but a reward without a model."""
    if role == "reward":
        return bool(config.reward.model)
    return role in BUILTIN_ROLES or bool(role_settings(config, role).model)


def is_on_megatron(config: Config, role: str) -> bool:
    """Whether it has a model that is laid out over its ranks, as those of Megatron are."""
    laid_out = role not in ("rollout", "reference") and has_model(config, role)
    return laid_out and role_backends(config, role)[0] in ("", MEGATRON)


def with_role(
    config: Config, role: str, model: str | None, parallel: Mapping[str, Any] | None, backend: str = ""
) -> Config:
    """The configuration with a role's model, layout and backend, wherever they belong."""
    if backend:  # in place of a worker that the configuration names
        config = _replace_path(
            _replace_path(config, ["roles", role, "backend"], backend), ["roles", role, "worker"], ""
        )
    for name, value in (("model", model), ("parallel", parallel)):
        if value is None:
            continue
        key = BUILTIN_ROLES[role][name == "parallel"] if role in BUILTIN_ROLES else f"roles.{role}.{name}"
        if not key:
            raise ConfigError(f"register_worker({role!r}): the {role} has no {name} of its own; leave it out")
        whole = dataclasses.replace(config.parallel, **dict(parallel or {})) if key == "parallel" else value
        config = _replace_path(config, key.split("."), whole)
    return config


def _replace_path(section: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    if isinstance(section, Mapping):
        return {**section, first: _replace_path(section.get(first, {}), rest, value) if rest else value}
    return dataclasses.replace(
        section, **{first: _replace_path(getattr(section, first), rest, value) if rest else value}
    )
