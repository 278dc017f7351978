"""Who plays a role: what a script registers, the configuration names, the controller says, or is known here.

All by `module:name`, so that a plan on paper need not import Megatron to know that a role is played.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megarl.config import Config, ConfigError, plugins
from megarl.config.strict import closest_match
from megarl.parallel.role_settings import role_backends, role_settings
from megarl.types.requirements import Requirements

TEACHER = "megarl.workers.teacher:TeacherWorker"
WORKERS: dict[str, dict[str, str]] = {
    "rollout": {"sglang": "megarl.workers.rollout:RolloutWorker"},
    "actor": {"megatron": "megarl.workers.actor:ActorWorker"},
    "reference": {"megatron": "megarl.workers.reference:ReferenceWorker"},
    "critic": {"megatron": "megarl.workers.critic:CriticWorker"},
    "reward": {
        "megatron": "megarl.workers.reward_megatron:MegatronRewardWorker",
        "transformers": "megarl.workers.reward_classifier:ClassifierRewardWorker",
        "pool": "megarl.workers.reward:RewardWorker",
        "http": "megarl.workers.reward:RewardWorker",
        "judge": "megarl.workers.reward:RewardWorker",
    },
    "reward_model": {"megatron": "megarl.workers.reward_training:RewardModelWorker"},
    "teacher": {"megatron": TEACHER},
}
"""By role and backend, the first of which is the default."""

ENTRY_POINT_GROUP = "megarl.workers"
"""Entry points of a fork's workers, each by the role that it plays."""


@dataclass(frozen=True)
class RegisteredWorker:
    """What a script has said of a role. worker: a class, or another callable that makes a worker of a `Context` and the
    options; or its `module:name`."""

    worker: Callable[..., Any] | str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def check_roles(config: Config, declared: Requirements, registered: Mapping[str, RegisteredWorker]) -> None:
    """Raise ConfigError for a role that nobody plays, and for settings of one that neither the algorithm nor anybody
    here knows. Nothing is imported."""
    for role in (*registered, *config.roles):
        if role not in declared.roles and role not in WORKERS:
            near = closest_match(str(role), declared.roles)
            hint = f"; did you mean {near}?" if near else ""
            where = f"register_worker({role!r})" if role in registered else f"roles.{role}"
            raise ConfigError(f"{where}: {declared.name} has no such role{hint} (it has {', '.join(declared.roles)})")
    for role in declared.roles:
        resolve_worker(config, declared, role, registered.get(role, RegisteredWorker()))


def resolve_worker(
    config: Config, declared: Requirements, role: str, registered: RegisteredWorker
) -> Callable[..., Any] | str:
    """A class or `module:name`. Raises ConfigError where there is none."""
    settings = role_settings(config, role)
    known = WORKERS.get(role, {})
    if found := registered.worker or settings.worker:
        return found
    model, service = role_backends(config, role)
    backend = model or service
    if backend in known:
        return known[backend]
    if role in declared.workers:
        return declared.workers[role]
    if backend:
        have = f"it has {', '.join(known)}" if known else "it has none that are known by name"
        raise ConfigError(f"roles.{role}.backend={backend}: there is no such backend of the {role}; {have}")
    if known:
        return next(iter(known.values()))
    if entry := plugins.list_entry_points(ENTRY_POINT_GROUP).get(role):
        return entry.value
    raise ConfigError(
        f"nobody plays the role {role} of algorithm={declared.name}: name its worker in the controller's `workers`, "
        f"set roles.{role}.worker to its module:name, or call flow.register_worker({role!r}, ...)"
    )


def check_user_workers(config: Config, declared: Requirements, registered: Mapping[str, RegisteredWorker]) -> None:
    """Raise ConfigError, as `load_workers` does, for workers that the user names. Imports only their modules."""
    for role in declared.roles:
        if role_settings(config, role).worker:
            load_worker(config, declared, role, registered.get(role, RegisteredWorker()))


def load_workers(
    config: Config, declared: Requirements, registered: Mapping[str, RegisteredWorker]
) -> dict[str, Callable[..., Any]]:
    """What makes the worker of each role, in their order. Raises ConfigError."""
    return {
        role: load_worker(config, declared, role, registered.get(role, RegisteredWorker())) for role in declared.roles
    }


def load_worker(config: Config, declared: Requirements, role: str, registered: RegisteredWorker) -> Callable[..., Any]:
    """What makes the role's worker, with its options. Raises ConfigError."""
    found = resolve_worker(config, declared, role, registered)
    made = plugins.load(found, f"the worker of the role {role}") if isinstance(found, str) else found
    if not callable(made):
        raise ConfigError(f"the worker of the role {role} is a {type(made).__name__}: it must be a class of workers")
    options = worker_options(config, role, registered)
    try:
        inspect.signature(made).bind_partial(None, **options)
    except TypeError as error:
        raise ConfigError(f"the options of the role {role}: {error}; see its worker, {_worker_name(made)}") from None
    except ValueError:  # of C, which does not say
        pass
    return partial(made, **options) if options else made


def is_builtin(config: Config, declared: Requirements, role: str, registered: RegisteredWorker) -> bool:
    """Whether one of our own workers plays the role."""
    return resolve_worker(config, declared, role, registered) in WORKERS.get(role, {}).values()


def worker_options(config: Config, role: str, registered: RegisteredWorker) -> dict[str, Any]:
    """What its worker is given besides the context: those of a script before those of the configuration."""
    return {**role_settings(config, role).options, **registered.options}


def _worker_name(worker: Any) -> str:
    return str(getattr(worker, "__qualname__", type(worker).__qualname__))
