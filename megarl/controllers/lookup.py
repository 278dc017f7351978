"""Find the controller that `algorithm` names, and check its declared requirements."""

from __future__ import annotations

from typing import Any

from megarl.config import Config, ConfigError, plugins
from megarl.config.recipes import find_recipe
from megarl.controllers.controller import Controller
from megarl.types.requirements import ITEM_KINDS, Requirements


def find_controller(name: str) -> type[Controller]:
    """Return the class that `algorithm` names. Raises ConfigError if it does not exist or is no complete controller."""
    controller = find_recipe(name).controller
    return _check_controller(
        plugins.load(controller, f"algorithm={name}") if isinstance(controller, str) else controller, name
    )


def load_requirements(config: Config) -> Requirements:
    """Return the requirements of the configured algorithm. Raises ConfigError if it does not exist or contradicts
    itself."""
    cls, key = find_controller(config.algorithm), f"algorithm={config.algorithm}"
    cls.read_options(config)
    try:
        requirements = cls.declare_requirements(config)
    except Exception as error:  # of third-party code
        raise ConfigError(f"{key}: {cls.__name__}.roles(config) raised {plugins.format_error(error)}") from error
    if not requirements.roles or not all(isinstance(role, str) and role.isidentifier() for role in requirements.roles):
        raise ConfigError(
            f"{key}: {cls.__name__}.roles(config) gives {requirements.roles!r}, not a tuple of names of roles"
        )
    if duplicates := {role for role in requirements.roles if requirements.roles.count(role) > 1}:
        raise ConfigError(f"{key}: {cls.__name__}.roles(config) lists {min(duplicates)} twice; once will do")
    if missing := [role for role in requirements.trained_roles if role not in requirements.roles]:
        name_and_reason = f"{missing[0]}, which its roles do not list"
        raise ConfigError(
            f"{key}: {cls.__name__}.trained_roles names {name_and_reason} (they are {', '.join(requirements.roles)})"
        )
    if not requirements.trained_roles and not requirements.has_rollout:
        raise ConfigError(
            f"{key}: {cls.__name__} trains nothing, and generates nothing: name a role in `trained_roles`"
        )
    if requirements.trained_roles and requirements.has_rollout and "actor" not in requirements.roles:
        raise ConfigError(f"{key}: {cls.__name__} lists the role rollout, whose weights are the actor's, but no actor")
    return requirements


def make_controller(config: Config) -> Controller:
    return find_controller(config.algorithm)(config)


def _check_controller(cls: Any, name: str) -> type[Controller]:
    key = f"algorithm={name}"
    if not isinstance(cls, type) or not issubclass(cls, Controller):
        kind = "another class" if isinstance(cls, type) else f"a {type(cls).__name__}"
        raise ConfigError(
            f"{key} is {kind}, and no Controller: derive it from megarl.controllers.controller.Controller"
        )
    if missing := sorted(cls.__abstractmethods__):
        raise ConfigError(f"{key}: {cls.__name__} lacks {', '.join(missing)}, which every controller has")
    if getattr(cls, "item", None) not in ITEM_KINDS:
        raise ConfigError(f"{key}: {cls.__name__}.item must be one of {', '.join(ITEM_KINDS)}: what its items are")
    return cls
