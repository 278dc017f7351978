"""Which controller a name in the configuration means: one of ours, of a fork's entry points, or `module:name`."""

from __future__ import annotations

import difflib
from typing import Any

from megarl import forks
from megarl.config import Config, ConfigError
from megarl.controllers.base import Controller
from megarl.controllers.grpo import GRPOController
from megarl.controllers.ppo import PPOController
from megarl.controllers.reward_model import RewardModelController
from megarl.controllers.sft import SFTController
from megarl.types.declared import ITEM_KINDS, Declared

CONTROLLERS: dict[str, type[Controller]] = {
    "ppo": PPOController,
    "grpo": GRPOController,
    "sft": SFTController,
    "reward_model": RewardModelController,
}

GROUP = "megarl.controllers"
"""Entry points of a fork's controllers."""


def find_controller(name: str) -> type[Controller]:
    """The class that `algorithm` names. Raises ConfigError for one that is not there, or is no whole controller."""
    if name in CONTROLLERS:
        return CONTROLLERS[name]
    declared = forks.entries(GROUP)
    if name in declared:
        return _checked(forks.load(declared[name].value, f"algorithm={name}"), name)
    if ":" in name:
        return _checked(forks.load(name, "algorithm"), name)
    known = [*CONTROLLERS, *declared]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"algorithm must be one of {', '.join(known)}, or module:name of a Controller, not {name[:200]!r}{hint}"
    )


def declare(config: Config) -> Declared:
    """What the algorithm of a configuration needs. Raises ConfigError where it is not there, or contradicts itself."""
    cls, key = find_controller(config.algorithm), f"algorithm={config.algorithm}"
    try:
        found = cls.declare(config)
    except Exception as error:  # of a fork
        raise ConfigError(f"{key}: {cls.__name__}.roles(config) raised {forks.worded(error)}") from error
    if not found.roles or not all(isinstance(role, str) and role.isidentifier() for role in found.roles):
        raise ConfigError(f"{key}: {cls.__name__}.roles(config) gives {found.roles!r}, not a tuple of names of roles")
    if twice := {role for role in found.roles if found.roles.count(role) > 1}:
        raise ConfigError(f"{key}: {cls.__name__}.roles(config) lists {min(twice)} twice; once will do")
    if not found.trains or (missing := [role for role in found.trains if role not in found.roles]):
        what = f"{missing[0]}, which its roles do not list" if found.trains else "nothing"
        raise ConfigError(f"{key}: {cls.__name__}.trains names {what} (they are {', '.join(found.roles)})")
    if found.generates and "actor" not in found.roles:
        raise ConfigError(f"{key}: {cls.__name__} lists the role rollout, whose weights are the actor's, but no actor")
    return found


def make_controller(config: Config) -> Controller:
    return find_controller(config.algorithm)(config)


def _checked(found: Any, name: str) -> type[Controller]:
    key = f"algorithm={name}"
    if not isinstance(found, type) or not issubclass(found, Controller):
        kind = "another class" if isinstance(found, type) else f"a {type(found).__name__}"
        raise ConfigError(f"{key} is {kind}, and no Controller: derive it from megarl.controllers.base.Controller")
    if lacking := sorted(found.__abstractmethods__):
        raise ConfigError(f"{key}: {found.__name__} lacks {', '.join(lacking)}, which every controller has")
    if getattr(found, "item", None) not in ITEM_KINDS:
        raise ConfigError(f"{key}: {found.__name__}.item must be one of {', '.join(ITEM_KINDS)}: what its items are")
    return found
