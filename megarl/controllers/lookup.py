"""The controller that a recipe names, and whether what it declares fits together."""

from __future__ import annotations

from typing import Any

from megarl.config import Config, ConfigError, plugins
from megarl.config.recipes import find_recipe
from megarl.controllers.controller import Controller
from megarl.types.requirements import ITEM_KINDS, Requirements


def find_controller(name: str) -> type[Controller]:
    """The class that `algorithm` names. Raises ConfigError for one that is not there, or is no whole controller."""
    found = find_recipe(name).controller
    return _check_controller(plugins.load(found, f"algorithm={name}") if isinstance(found, str) else found, name)


def load_requirements(config: Config) -> Requirements:
    """What the algorithm of a configuration needs. Raises ConfigError where it is not there, or contradicts itself."""
    cls, key = find_controller(config.algorithm), f"algorithm={config.algorithm}"
    cls.read_options(config)
    try:
        found = cls.declare_requirements(config)
    except Exception as error:  # of a fork
        raise ConfigError(f"{key}: {cls.__name__}.roles(config) raised {plugins.format_error(error)}") from error
    if not found.roles or not all(isinstance(role, str) and role.isidentifier() for role in found.roles):
        raise ConfigError(f"{key}: {cls.__name__}.roles(config) gives {found.roles!r}, not a tuple of names of roles")
    if twice := {role for role in found.roles if found.roles.count(role) > 1}:
        raise ConfigError(f"{key}: {cls.__name__}.roles(config) lists {min(twice)} twice; once will do")
    if missing := [role for role in found.trained_roles if role not in found.roles]:
        what = f"{missing[0]}, which its roles do not list"
        raise ConfigError(f"{key}: {cls.__name__}.trained_roles names {what} (they are {', '.join(found.roles)})")
    if not found.trained_roles and not found.has_rollout:
        raise ConfigError(f"{key}: {cls.__name__} trains nothing, and generates nothing: name a role in `trained_roles`")
    if found.trained_roles and found.has_rollout and "actor" not in found.roles:
        raise ConfigError(f"{key}: {cls.__name__} lists the role rollout, whose weights are the actor's, but no actor")
    return found


def make_controller(config: Config) -> Controller:
    return find_controller(config.algorithm)(config)


def _check_controller(found: Any, name: str) -> type[Controller]:
    key = f"algorithm={name}"
    if not isinstance(found, type) or not issubclass(found, Controller):
        kind = "another class" if isinstance(found, type) else f"a {type(found).__name__}"
        raise ConfigError(
            f"{key} is {kind}, and no Controller: derive it from megarl.controllers.controller.Controller"
        )
    if lacking := sorted(found.__abstractmethods__):
        raise ConfigError(f"{key}: {found.__name__} lacks {', '.join(lacking)}, which every controller has")
    if getattr(found, "item", None) not in ITEM_KINDS:
        raise ConfigError(f"{key}: {found.__name__}.item must be one of {', '.join(ITEM_KINDS)}: what its items are")
    return found
