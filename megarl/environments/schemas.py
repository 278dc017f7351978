"""Build OpenAI schemas of functions and methods from their type hints and Google-style docstrings."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from megarl.config.plugins import format_error
from megarl.config.strict import ConfigError
from megarl.environments.tools import JSON_TYPES

_JSON_TYPES: dict[Any, str] = {types[-1]: name for name, types in JSON_TYPES.items() if name != "null"}
_SECTION = re.compile(r"\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?)\s*:\s*")
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def build_schema(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Return {"type": "function", "function": {name, description, parameters}}.

    Raises ConfigError, prefixed with `where`, if the docstring or a type hint is missing, or a hint has no JSON schema.
    """
    name = str(getattr(function, "__name__", ""))
    description, argument_docs = parse_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ConfigError(f"{where} needs a docstring, which the policy reads")
    properties: dict[str, Any] = {}
    required = []
    for parameter in get_parameters(function, where):
        label = f"{where}: the argument {parameter.name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{label} must be usable as a keyword, not * or **")
        if parameter.annotation is parameter.empty:
            raise ConfigError(f"{label} needs a type hint, such as {parameter.name}: str")
        property_schema = hint_to_schema(parameter.annotation, label)
        if parameter.name in argument_docs:
            property_schema["description"] = argument_docs[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            try:
                property_schema["default"] = json.loads(json.dumps(parameter.default, allow_nan=False))
            except (TypeError, ValueError, RecursionError):
                raise ConfigError(f"{label} has a default that is not JSON; use None") from None
        properties[parameter.name] = property_schema
    if unknown := [argument for argument in argument_docs if argument not in properties]:
        raise ConfigError(f"{where}: its docstring describes an argument {unknown[0]}, which it does not have")
    arguments = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": arguments}}


def get_parameters(function: Callable[..., Any], where: str) -> list[inspect.Parameter]:
    """Return the parameters with resolved type hints. Raises ConfigError."""
    try:
        return list(inspect.signature(function, eval_str=True).parameters.values())
    except Exception as error:  # a hint may be any expression
        raise ConfigError(f"{where}: its type hints cannot be read: {format_error(error)}") from None


def hint_to_schema(hint: Any, where: str) -> dict[str, Any]:
    """Convert a type hint to a JSON schema.

    Raises ConfigError unless it is str, int, float, bool, list, dict, Literal, or one of these or None.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin is Annotated:
        return hint_to_schema(arguments[0], where)
    if origin in (list, tuple) and (len(arguments) == 1 or arguments[1:] == (...,)):
        return {"type": "array", "items": hint_to_schema(arguments[0], where)}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": hint_to_schema(arguments[1], where)}
    if origin in (Union, types.UnionType):
        non_none = [argument for argument in arguments if argument is not type(None)]
        if len(non_none) == 1:
            return {**hint_to_schema(non_none[0], where), "nullable": True}
    if (
        origin is Literal
        and len({type(argument) for argument in arguments}) == 1
        and type(arguments[0]) in (str, int, bool)
    ):
        return {"type": _JSON_TYPES[type(arguments[0])], "enum": list(arguments)}
    shown = getattr(hint, "__name__", "") if isinstance(hint, type) and origin is None else str(hint)
    raise ConfigError(
        f"{where} has the hint {shown[:80]}; it must be str, int, float, bool, list[...], dict, Literal[...], or one "
        "of these or None"
    )


def parse_docstring(doc: str) -> tuple[str, Mapping[str, str]]:
    """Return the text before the first section as one paragraph, and the description of each argument."""
    head: list[str] = []
    arguments: dict[str, str] = {}
    section, current, argument_indent = "", "", 0
    for line in doc.splitlines():
        heading = _SECTION.fullmatch(line) if not line.startswith(" ") else None
        if heading:
            section, current = heading[1], ""
        elif not section:
            head.append(line.strip())
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            indent = len(line) - len(line.lstrip())
            argument_match = _ARGUMENT.fullmatch(line.strip())
            if argument_match and (not current or indent <= argument_indent):
                current, argument_indent = argument_match[1], indent
                arguments[current] = argument_match[2].strip()
            elif current:
                arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    return " ".join(" ".join(head).split()), arguments
