"""Settings of roles by name, from the section `roles` or `flow.register_worker`; any role that a controller calls.

Built-in roles keep their settings in older sections, which errors name if somebody sets them here. A role's model is
computed by its backend: Megatron, in a layout over the role's ranks, unless another is named.
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
"""Keys of each built-in role's model and layout; empty if it has none of its own."""


MEGATRON = "megatron"
SERVICES = ("http", "judge")
"""Reward backends that query a service, in addition to the backend that computes `reward.model`."""


@dataclass(frozen=True)
class RoleConfig:
    worker: str = ""
    """Implementation as `module:name`; empty for the controller's or the built-in one."""
    backend: tuple[str, ...] = ()
    """Backends by name; empty for the default.

    For a custom worker, the backend of its model (empty for Megatron). The reward may name two: one that computes
    `reward.model`, and http or judge.
    """
    model: str = ""
    """HF folder of the role's own model, which must have the policy's vocabulary."""
    parallel: dict[str, Any] = field(default_factory=dict)
    """Overrides of that model's layout: keys of `parallel` except world_size and ranks_per_node."""
    options: dict[str, Any] = field(default_factory=dict)
    """Additional arguments of the worker, by name."""


def role_settings(config: Config, role: str) -> RoleConfig:
    """Return a role's settings. Raises ConfigError for invalid keys and for keys that belong to another section."""
    settings: RoleConfig = strict.build_dataclass(RoleConfig, config.roles.get(role, {}), f"roles.{role}.", root=Config)
    for name, key in zip(("model", "parallel"), BUILTIN_ROLES.get(role, ()), strict=False):
        if getattr(settings, name) and key != f"roles.{role}.{name}":
            location = f"is {key}; set that" if key else "is that of the actor; remove it"
            raise ConfigError(f"roles.{role}.{name}: for the {role} this {location}")
    return settings


def role_backends(config: Config, role: str) -> tuple[str, str]:
    """Return the backend of the role's model and its service of `SERVICES`; each empty if unset.

    If a service is named and `reward.model` is set, Megatron computes that model unless another backend is named.
    Raises ConfigError for two of a kind.
    """
    backends = role_settings(config, role).backend
    services = [name for name in backends if role == "reward" and name in SERVICES]
    models = [name for name in backends if name not in services]
    for names in (services, models):
        if len(names) > 1:
            raise ConfigError(
                f"roles.{role}.backend=[{', '.join(backends)}]: name one of {' and '.join(names)}"
                + (", and http or judge beside it" if names is models and role == "reward" else "")
            )
    model, service = ("".join(models), "".join(services))
    return (MEGATRON if service and not model and config.reward.model else model), service


def has_model(config: Config, role: str) -> bool:
    """Return whether the role computes a model on ranks: every built-in role does, except a reward without a model."""
    if role == "reward":
        return bool(config.reward.model)
    return role in BUILTIN_ROLES or bool(role_settings(config, role).model)


def is_on_megatron(config: Config, role: str) -> bool:
    """Return whether the role has a model with a Megatron layout over its ranks."""
    has_own_model = role not in ("rollout", "reference") and has_model(config, role)
    return has_own_model and role_backends(config, role)[0] in ("", MEGATRON)


def with_role(
    config: Config, role: str, model: str | None, parallel: Mapping[str, Any] | None, backend: str = ""
) -> Config:
    """Return the configuration with a role's model, layout and backend set in their sections."""
    if backend:  # replaces a worker that the configuration names
        config = _replace_path(
            _replace_path(config, ["roles", role, "backend"], backend), ["roles", role, "worker"], ""
        )
    for name, value in (("model", model), ("parallel", parallel)):
        if value is None:
            continue
        key = BUILTIN_ROLES[role][name == "parallel"] if role in BUILTIN_ROLES else f"roles.{role}.{name}"
        if not key:
            raise ConfigError(f"register_worker({role!r}): the {role} has no separate {name}; remove it")
        new_value = dataclasses.replace(config.parallel, **dict(parallel or {})) if key == "parallel" else value
        config = _replace_path(config, key.split("."), new_value)
    return config


def _replace_path(section: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    if isinstance(section, Mapping):
        return {**section, first: _replace_path(section.get(first, {}), rest, value) if rest else value}
    return dataclasses.replace(
        section, **{first: _replace_path(getattr(section, first), rest, value) if rest else value}
    )
