"""Load and describe tools, environments and agents by their specs; runs in their own process, never in a rank."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megarl.config.plugins import is_async
from megarl.config.strict import ConfigError
from megarl.environments.protocol import (
    ADAPTER_PREFIXES,
    RESERVED_METHODS,
    REWARD_ARGUMENTS,
    EnvironmentInfo,
    EnvironmentKind,
)
from megarl.environments.schemas import build_schema, get_parameters
from megarl.environments.tools import Tool, check_function, check_schema, format_error

TOOLS_KEY, ENVIRONMENTS_KEY = "rollout.tools", "rollout.environments"


@dataclass(frozen=True)
class LoadedEnvironment:
    """`target` is a `Tool`, a class, or an agent's coroutine function."""

    info: EnvironmentInfo
    target: Any


def load(spec: str, key: str) -> LoadedEnvironment:
    """Load an entry of `rollout.tools` or `rollout.environments`. Raises ConfigError with one line."""
    prefix, _, rest = spec.partition(":")
    target = _load_adapter(prefix, rest, key) if prefix in ADAPTER_PREFIXES else _import_target(spec, key)
    where, name = f"{key}: {spec}", rest
    if key == TOOLS_KEY:
        if isinstance(target, type):
            if prefix not in ADAPTER_PREFIXES:
                raise ConfigError(f"{where} is a {type(target).__name__}: name a class in {ENVIRONMENTS_KEY}")
            return LoadedEnvironment(_describe_class(target, spec, name, where, "tools"), target)
        if inspect.isfunction(target):
            target = Tool(build_schema(target, where), target, spec)
        if not isinstance(target, Tool):
            raise ConfigError(
                f"{where} is a {type(target).__name__}, not a megarl.environments.tools.Tool or a function "
                "with type hints"
            )
        check_schema(target.schema, spec)
        check_function(target, spec)
        return LoadedEnvironment(
            EnvironmentInfo(spec, target.name, "tools", (target.schema,), is_async=is_async(target.function)), target
        )
    if isinstance(target, type):
        return LoadedEnvironment(_describe_class(target, spec, name, where, "environment"), target)
    if inspect.iscoroutinefunction(target):
        try:
            inspect.signature(target).bind(row=None, base_url="", api_key="")
        except TypeError as error:
            raise ConfigError(f"{where} must take row, base_url and api_key: {error}") from None
        return LoadedEnvironment(EnvironmentInfo(spec, name, "agent", has_reward=True, is_async=True), target)
    raise ConfigError(
        f"{where} is a {type(target).__name__}, neither a class nor a coroutine function run(row, base_url, api_key)"
    )


def _load_adapter(prefix: str, rest: str, key: str) -> Any:
    module = f"megarl.environments.{prefix}"
    try:
        return importlib.import_module(module).environment(rest)
    except BaseException as error:  # noqa: B036  a required package may raise anything
        if isinstance(error, ConfigError):
            raise ConfigError(f"{key}: {prefix}:{rest}: {error}") from None
        raise ConfigError(f"{key}: {prefix}:{rest} cannot be loaded: {format_error(error)}") from None


def _import_target(spec: str, key: str) -> Any:
    module, _, name = spec.partition(":")
    try:
        target = getattr(importlib.import_module(module), name, None)
    except BaseException as error:  # noqa: B036  an import may raise anything, including SystemExit
        raise ConfigError(f"{key}: cannot import {module} of {spec!r}: {format_error(error)}") from None
    if target is None:
        raise ConfigError(f"{key}: {module} has no {name}")
    return target


def check_spec(spec: str, key: str) -> None:
    """Raise ConfigError if the spec is not of the form module:name."""
    module, _, name = spec.partition(":")
    if not module or not name or module.startswith("."):
        raise ConfigError(f"{key}: {spec!r} is not of the form module:name")


def _describe_class(cls: type, spec: str, name: str, where: str, kind: EnvironmentKind) -> EnvironmentInfo:
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise ConfigError(f"{where}: its constructor must take no arguments: {error}") from None
    except ValueError:  # a C function without a signature
        pass
    methods = {name: method for name in dir(cls) if (method := _get_method(cls, name, where)) is not None}
    if ("tools" in methods) != ("call" in methods):
        present, missing = ("tools", "call") if "tools" in methods else ("call", "tools")
        raise ConfigError(
            f"{where} has a method {present} but not {missing}; a dynamic set of tools needs both: rename it, or add "
            f"the other"
        )
    has_dynamic_tools = "tools" in methods
    schemas: tuple[dict[str, Any], ...] = ()
    if not has_dynamic_tools:
        tool_names = [name for name in methods if not name.startswith("_") and name not in RESERVED_METHODS]
        schemas = tuple(build_schema(*methods[name][:1], f"{where}.{name}", methods[name][1]) for name in tool_names)
        for schema in schemas:
            check_schema(schema, spec, where.partition(":")[0])
    if not (has_dynamic_tools or schemas or "reset" in methods or "reward" in methods):
        raise ConfigError(f"{where} is not an environment: it has no reset, no reward and no tool method")
    required, accepted = _inspect_reset(*methods["reset"], f"{where}.reset") if "reset" in methods else ((), ())
    timeout = getattr(cls, "timeout", 0)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < math.inf:
        raise ConfigError(f"{where}: its `timeout` must be a number of seconds, not {str(timeout)[:80]!r}")
    return EnvironmentInfo(
        spec,
        name,
        kind,
        schemas,
        has_dynamic_tools,
        required,
        accepted,
        has_reward="reward" in methods,
        reward_arguments=_inspect_reward(*methods["reward"], f"{where}.reward") if "reward" in methods else (),
        timeout=float(timeout),
        is_sandboxed=bool(getattr(cls, "sandboxed", False)),
        is_async=any(inspect.iscoroutinefunction(function) for function, _ in methods.values()),
    )


Method = tuple[Callable[..., Any], bool]
"""A function, and whether its first parameter is the object."""


def _get_method(cls: type, name: str, where: str) -> Method | None:
    """Return a method defined by the user, or None.

    Private ones are included, to detect whether any is a coroutine function.
    """
    attribute = inspect.getattr_static(cls, name, None)
    is_bound = not isinstance(attribute, staticmethod)
    function = attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute
    if not inspect.isfunction(function):
        if name in RESERVED_METHODS and callable(function):
            return function, is_bound
        return None
    if not name.startswith("_") and (inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)):
        raise ConfigError(f"{where}.{name} is a generator; it must return")
    return function, is_bound


def _inspect_reset(
    function: Callable[..., Any], bound: bool, where: str
) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Return the columns that `reset` requires and those it accepts, None for all."""
    required, accepted, accepts_all = [], [], False
    for parameter in get_parameters(function, where, bound):
        if parameter.kind is parameter.VAR_KEYWORD:
            accepts_all = True
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{where}: the argument {parameter.name} must be usable as a keyword")
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            accepted.append(parameter.name)
            if parameter.default is parameter.empty:
                required.append(parameter.name)
    return tuple(required), None if accepts_all else tuple(accepted)


def _inspect_reward(function: Callable[..., Any], bound: bool, where: str) -> tuple[str, ...]:
    """Return which of `REWARD_ARGUMENTS` it takes."""
    accepted = []
    for parameter in get_parameters(function, where, bound):
        if parameter.name in REWARD_ARGUMENTS:
            accepted.append(parameter.name)
        elif parameter.kind is parameter.VAR_KEYWORD:
            accepted += [name for name in REWARD_ARGUMENTS if name not in accepted]
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            raise ConfigError(f"{where} takes {parameter.name}; available arguments are {', '.join(REWARD_ARGUMENTS)}")
    return tuple(accepted)


def with_schemas(info: EnvironmentInfo, schemas: Any, key: str) -> EnvironmentInfo:
    """Add the schemas returned by `tools` at run time to a description. Raises ConfigError."""
    if not isinstance(schemas, list | tuple):
        raise ConfigError(f"{key}: the tools of {info.spec} are a {type(schemas).__name__}, not a list of schemas")
    names = set()
    for schema in schemas:
        check_schema(schema, info.spec, key)
        if (name := schema["function"]["name"]) in names:
            raise ConfigError(f"{key}: {info.spec} has two tools called {name}")
        names.add(name)
    return replace(info, schemas=tuple(schemas))
