"""Load and describe tools, environments and agents by their specs; runs in their own process, never in a rank."""

from __future__ import annotations

import importlib
import inspect
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megarl.config import plugins
from megarl.config.plugins import format_error
from megarl.config.strict import ConfigError
from megarl.environments.protocol import ADAPTER_PREFIXES, RESERVED_METHODS, REWARD_ARGUMENTS, EnvironmentInfo
from megarl.environments.schemas import build_schema, get_parameters
from megarl.environments.tools import Tool, check_function, check_schema

TOOLS_KEY, ENVIRONMENTS_KEY = "rollout.tools", "rollout.environments"


@dataclass(frozen=True)
class LoadedEnvironment:
    """`target` is a `Tool`, a class, or an agent's coroutine function."""

    info: EnvironmentInfo
    target: Any


def load(spec: str, key: str) -> LoadedEnvironment:
    """Load an entry of `rollout.tools` or `rollout.environments`. Raises ConfigError with one line."""
    prefix, _, name = spec.partition(":")
    where, is_adapter = f"{key}: {spec}", prefix in ADAPTER_PREFIXES and name != ""
    if is_adapter:
        try:
            target = importlib.import_module(f"megarl.environments.{prefix}").environment(name)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        except BaseException as error:  # noqa: B036  a required package may raise anything
            raise ConfigError(f"{where} cannot be loaded: {format_error(error)}") from None
    else:
        try:
            target = plugins.load(spec, key)
        except KeyboardInterrupt as error:  # raised by the module: Ctrl-C does not reach the processes that load
            module_name = spec.partition(":")[0]
            raise ConfigError(f"{key}: cannot import {module_name} of {spec!r}: {format_error(error)}") from None
    kind = type(target).__name__
    if isinstance(target, type):
        if key == TOOLS_KEY and not is_adapter:
            raise ConfigError(f"{where} is a {kind}: name a class in {ENVIRONMENTS_KEY}")
        return LoadedEnvironment(_describe_class(target, spec, key), target)
    if key == TOOLS_KEY:
        if inspect.isfunction(target):
            target = Tool(build_schema(target, where), target, spec)
        if not isinstance(target, Tool):
            raise ConfigError(
                f"{where} is a {kind}, not a megarl.environments.tools.Tool or a function with type hints"
            )
        check_schema(target.schema, spec)
        check_function(target, spec)
        is_async = plugins.is_async(target.function)
        return LoadedEnvironment(
            EnvironmentInfo(spec, target.name, "tools", (target.schema,), is_async=is_async), target
        )
    if not inspect.iscoroutinefunction(target):
        raise ConfigError(f"{where} is a {kind}, neither a class nor a coroutine function run(row, base_url, api_key)")
    try:
        inspect.signature(target).bind(row=None, base_url="", api_key="")
    except TypeError as error:
        raise ConfigError(f"{where} must take row, base_url and api_key: {error}") from None
    return LoadedEnvironment(EnvironmentInfo(spec, name, "agent", has_reward=True, is_async=True), target)


def build_schemas(cls: type) -> list[dict[str, Any]]:
    """Return the OpenAI schemas of an environment's tools, as prompts of a run list them; for `tools` of SFT rows.

    The order is that of definition. Methods of base classes come first; a method that overrides one takes its place.
    Raises ConfigError as `load` does, and if the tools are known only at run time.
    """
    spec = f"{cls.__module__}:{cls.__qualname__}"
    info = _describe_class(cls, spec, ENVIRONMENTS_KEY)
    if info.has_dynamic_tools:
        raise ConfigError(f"{ENVIRONMENTS_KEY}: the tools of {spec} are known only at run time; call its `tools`")
    return list(info.schemas)


def _describe_class(cls: type, spec: str, key: str) -> EnvironmentInfo:
    where = f"{key}: {spec}"
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise ConfigError(f"{where}: its constructor must take no arguments: {error}") from None
    except ValueError:  # a C function without a signature
        pass
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    methods = {name: method for name in names if (method := _get_method(cls, name, where)) is not None}
    if ("tools" in methods) != ("call" in methods):
        present, missing = ("tools", "call") if "tools" in methods else ("call", "tools")
        raise ConfigError(
            f"{where} has a method {present} but not {missing}; a dynamic set of tools needs both: rename it, or add "
            f"the other"
        )
    schemas: list[dict[str, Any]] = []
    for name, method in methods.items():
        if "tools" not in methods and not name.startswith("_") and name not in RESERVED_METHODS:
            schemas.append(build_schema(method, f"{where}.{name}"))
            check_schema(schemas[-1], spec, key)
    if not (schemas or methods.keys() & {"tools", "reset", "reward"}):
        raise ConfigError(f"{where} is not an environment: it has no reset, no reward and no tool method")
    required: tuple[str, ...] = ()
    accepted: tuple[str, ...] | None = ()
    if "reset" in methods:
        required, accepted = _list_arguments(methods["reset"], f"{where}.reset")
    reward_arguments: tuple[str, ...] = ()
    if "reward" in methods:
        needed, optional = _list_arguments(methods["reward"], f"{where}.reward")
        if unknown := [name for name in needed if name not in REWARD_ARGUMENTS]:
            available = ", ".join(REWARD_ARGUMENTS)
            raise ConfigError(f"{where}.reward takes {unknown[0]}; available arguments are {available}")
        reward_arguments = tuple(name for name in REWARD_ARGUMENTS if optional is None or name in optional)
    timeout = getattr(cls, "timeout", 0)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < math.inf:
        raise ConfigError(f"{where}: its `timeout` must be a number of seconds, not {str(timeout)[:80]!r}")
    return EnvironmentInfo(
        spec,
        spec.partition(":")[2],
        "tools" if key == TOOLS_KEY else "environment",
        tuple(schemas),
        "tools" in methods,
        required,
        accepted,
        has_reward="reward" in methods,
        reward_arguments=reward_arguments,
        timeout=float(timeout),
        is_sandboxed=bool(getattr(cls, "sandboxed", False)),
        is_async=any(map(inspect.iscoroutinefunction, methods.values())),
    )


def _get_method(cls: type, name: str, where: str) -> Callable[..., Any] | None:
    """Return a method defined by the user, as if bound to an object; None if it is none.

    Private ones are included, to detect whether any is a coroutine function.
    """
    attribute = inspect.getattr_static(cls, name, None)
    function = attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute
    if not inspect.isfunction(function) and not (name in RESERVED_METHODS and callable(function)):
        return None
    if not name.startswith("_") and (inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)):
        raise ConfigError(f"{where}.{name} is a generator; it must return")
    return function if isinstance(attribute, staticmethod) else types.MethodType(function, cls)


def _list_arguments(method: Callable[..., Any], where: str) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Return the names of the arguments that a method requires and those it accepts, None for all."""
    required, accepted, accepts_all = [], [], False
    for parameter in get_parameters(method, where):
        if parameter.kind is parameter.VAR_KEYWORD:
            accepts_all = True
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{where}: the argument {parameter.name} must be usable as a keyword")
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            accepted.append(parameter.name)
            if parameter.default is parameter.empty:
                required.append(parameter.name)
    return tuple(required), None if accepts_all else tuple(accepted)


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
