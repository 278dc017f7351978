"""Settings of a role by its name, of the section `roles` or `flow.register_worker`: any name that a controller calls.

Ours have their settings in sections that are as old as they are; those are named where somebody looks for them here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl import strict
from megarl.config import Config, ConfigError

OURS: dict[str, tuple[str, str]] = {
    "actor": ("model.path", "parallel"),
    "reward_model": ("model.path", "parallel"),
    "critic": ("critic.path", "critic.parallel"),
    "reward": ("reward.model", ""),
    "reference": ("", ""),
    "rollout": ("", ""),
}
"""Of each role of ours, the keys of its model and of its layout; empty where it has none of its own."""


@dataclass(frozen=True)
class RoleConfig:
    worker: str = ""
    """Who plays it, as `module:name`; empty for who the controller says, or is known to."""
    backend: str = ""
    """Which of those that are known to play it; empty for the first of them."""
    model: str = ""
    """HF folder of a model of its own, with the policy's vocabulary."""
    parallel: dict[str, Any] = field(default_factory=dict)
    """Layout of that where it differs: keys of `parallel` but world_size and ranks_per_node."""


def role_settings(config: Config, role: str) -> RoleConfig:
    """Raises ConfigError for what the section cannot hold, or another one holds."""
    found: RoleConfig = strict.build(RoleConfig, config.roles.get(role, {}), f"roles.{role}.", root=Config)
    for name, key in zip(("model", "parallel"), OURS.get(role, ()), strict=False):
        if getattr(found, name):
            where = f"is {key}; set that" if key else "is that of the actor; leave it out"
            raise ConfigError(f"roles.{role}.{name}: for the {role} this {where}")
    return found


def with_role(config: Config, role: str, model: str | None, parallel: Mapping[str, Any] | None) -> Config:
    """The configuration with a role's model and layout, wherever they belong."""
    for name, value in (("model", model), ("parallel", parallel)):
        if value is None:
            continue
        key = OURS[role][name == "parallel"] if role in OURS else f"roles.{role}.{name}"
        if not key:
            raise ConfigError(f"register_worker({role!r}): the {role} has no {name} of its own; leave it out")
        whole = dataclasses.replace(config.parallel, **dict(parallel or {})) if key == "parallel" else value
        config = _with(config, key.split("."), whole)
    return config


def _with(section: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    if isinstance(section, Mapping):
        return {**section, first: _with(section.get(first, {}), rest, value) if rest else value}
    return dataclasses.replace(section, **{first: _with(getattr(section, first), rest, value) if rest else value})
