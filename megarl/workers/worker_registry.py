"""Resolve the worker of each role: registered by a script, named in the configuration or the controller, or built in.

Workers are named by `module:name`, so that a dry run can resolve roles without importing Megatron.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megarl.config import Config, ConfigError, plugins
from megarl.parallel.placement import (
    has_separate_reference,
    is_engine_role,
    role_backends,
    role_settings,
    split_role,
    suggest_role,
)
from megarl.types.requirements import Requirements

TEACHER = "megarl.workers.actor:TeacherWorker"
SEPARATE_REFERENCE = "megarl.workers.actor:SeparateReferenceWorker"
ENGINES = "megarl.workers.engines:EngineWorker"
"""Worker of a role that the built-in ones do not name, with `backend: sglang`."""
WORKERS: dict[str, dict[str, str]] = {
    "rollout": {"sglang": "megarl.workers.rollout:RolloutWorker"},
    "actor": {"megatron": "megarl.workers.actor:ActorWorker"},
    "reference": {"megatron": "megarl.workers.actor:ReferenceWorker"},
    "critic": {"megatron": "megarl.workers.critic:CriticWorker"},
    "reward": {
        "megatron": "megarl.workers.reward_models:MegatronRewardWorker",
        "transformers": "megarl.workers.reward_models:ClassifierRewardWorker",
        "pool": "megarl.workers.reward:RewardWorker",
        "http": "megarl.workers.reward:RewardWorker",
        "judge": "megarl.workers.reward:RewardWorker",
    },
    "reward_model": {"megatron": "megarl.workers.critic:RewardModelWorker"},
    "teacher": {"megatron": TEACHER},
}
"""Built-in workers by role and backend; the first backend is the default."""

ENTRY_POINT_GROUP = "megarl.workers"
"""Entry point group of a fork's workers, named by their roles."""


@dataclass(frozen=True)
class RegisteredWorker:
    """A script's registration of a role.

    worker: a class or another callable that builds a worker from a `Context` and the options, or its `module:name`.
    """

    worker: Callable[..., Any] | str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def check_roles(config: Config, requirements: Requirements, registered: Mapping[str, RegisteredWorker]) -> None:
    """Raise ConfigError for a role without a worker, and for settings of an unknown role. Imports nothing."""
    for role in (*registered, *config.roles):
        if role not in requirements.roles and role not in WORKERS:
            where = f"register_worker({role!r})" if role in registered else f"roles.{role}"
            hint = suggest_role(str(role), requirements.roles)
            raise ConfigError(
                f"{where}: {requirements.name} has no such role{hint} (it has {', '.join(requirements.roles)})"
            )
    for role in requirements.roles:
        resolve_worker(config, requirements, role, registered.get(role, RegisteredWorker()))


def resolve_worker(
    config: Config, requirements: Requirements, role: str, registered: RegisteredWorker
) -> Callable[..., Any] | str:
    """Return the role's worker as a class or `module:name`. Raises ConfigError if there is none."""
    settings = role_settings(config, role)
    builtin = WORKERS.get(split_role(role)[0], {})
    if worker := registered.worker or settings.worker:
        return worker
    model, service = role_backends(config, role)
    backend = model or service
    if role == "reference" and backend in ("", *builtin) and has_separate_reference(config):
        return SEPARATE_REFERENCE
    if backend in builtin:
        return builtin[backend]
    if role in requirements.workers:
        return requirements.workers[role]
    if not builtin and is_engine_role(config, role):
        return ENGINES
    if backend:
        choices = f"it has {', '.join(builtin)}" if builtin else "it has no named backends"
        raise ConfigError(f"roles.{role}.backend={backend}: no such backend for the {role}; {choices}")
    if builtin:
        return next(iter(builtin.values()))
    if entry := plugins.list_entry_points(ENTRY_POINT_GROUP).get(role):
        return entry.value
    raise ConfigError(
        f"no worker for the role {role} of algorithm={requirements.name}: name its worker in the controller's "
        f"`workers`, set roles.{role}.worker to its module:name, or call flow.register_worker({role!r}, ...)"
    )


def check_user_workers(config: Config, requirements: Requirements, registered: Mapping[str, RegisteredWorker]) -> None:
    """Raise ConfigError, as `load_workers` does, for workers that the user names. Imports their modules only."""
    for role in requirements.roles:
        if role_settings(config, role).worker:
            load_worker(config, requirements, role, registered.get(role, RegisteredWorker()))


def load_workers(
    config: Config, requirements: Requirements, registered: Mapping[str, RegisteredWorker]
) -> dict[str, Callable[..., Any]]:
    """Return the factory of each role's worker, in the order of the roles. Raises ConfigError."""
    return {
        role: load_worker(config, requirements, role, registered.get(role, RegisteredWorker()))
        for role in requirements.roles
    }


def load_worker(
    config: Config, requirements: Requirements, role: str, registered: RegisteredWorker
) -> Callable[..., Any]:
    """Return the factory of the role's worker, with its options bound. Raises ConfigError."""
    resolved = resolve_worker(config, requirements, role, registered)
    factory = plugins.load(resolved, f"the worker of the role {role}") if isinstance(resolved, str) else resolved
    if not callable(factory):
        raise ConfigError(f"the worker of the role {role} is a {type(factory).__name__}: it must be a worker class")
    options = worker_options(config, role, registered)
    try:
        inspect.signature(factory).bind_partial(None, **options)
    except TypeError as error:
        name = getattr(factory, "__qualname__", type(factory).__qualname__)
        raise ConfigError(f"the options of the role {role}: {error}; see its worker, {name}") from None
    except ValueError:  # a C callable without a signature
        pass
    return partial(factory, **options) if options else factory


def is_builtin(config: Config, requirements: Requirements, role: str, registered: RegisteredWorker) -> bool:
    """True if a built-in worker implements the role."""
    return resolve_worker(config, requirements, role, registered) in WORKERS.get(role, {}).values()


def worker_options(config: Config, role: str, registered: RegisteredWorker) -> dict[str, Any]:
    """Return the options of the role's worker. A script's registration takes precedence over the configuration."""
    return {**role_settings(config, role).options, **registered.options}
