"""The OpenAI schema of a function or method: by its type hints and its docstring, as Google's style has it."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from megarl.config.plugins import format_error
from megarl.config.strict import ConfigError

_JSON_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
}
_SECTION = re.compile(r"\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?)\s*:\s*")
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def build_schema(function: Callable[..., Any], where: str, bound: bool = False) -> dict[str, Any]:
    """{"type": "function", "function": {name, description, parameters}}. bound: leave out the first parameter, which is
    the object. Raises ConfigError, which begins with `where`, for a function without a docstring, and for a parameter
    without a hint, or with one that no schema has."""
    name = str(getattr(function, "__name__", ""))
    description, described = parse_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ConfigError(f"{where} needs a docstring, which is what the policy reads of it")
    properties: dict[str, Any] = {}
    required = []
    for parameter in get_parameters(function, where, bound):
        about = f"{where}: the argument {parameter.name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{about} must be one that a name is given to, not * or **")
        if parameter.annotation is parameter.empty:
            raise ConfigError(f"{about} needs a type hint, such as {parameter.name}: str")
        own = hint_to_schema(parameter.annotation, about)
        if parameter.name in described:
            own["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            own["default"] = _check_default(parameter.default, about)
        properties[parameter.name] = own
    if unknown := [argument for argument in described if argument not in properties]:
        raise ConfigError(f"{where}: its docstring describes an argument {unknown[0]}, which it does not have")
    arguments = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": arguments}}


def get_parameters(function: Callable[..., Any], where: str, bound: bool = False) -> list[inspect.Parameter]:
    """With hints that are types, not text. Raises ConfigError."""
    try:
        own = list(inspect.signature(function).parameters.values())
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:  # a hint may be any expression
        raise ConfigError(f"{where}: its type hints cannot be read: {format_error(error)}") from None
    return [one.replace(annotation=hints.get(one.name, one.annotation)) for one in own[bound:]]


def hint_to_schema(hint: Any, where: str) -> dict[str, Any]:
    """Raises ConfigError for a hint that is none of str, int, float, bool, list, dict, Literal, and these or None."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin is Annotated:
        return hint_to_schema(inside[0], where)
    if origin in (list, tuple) and (len(inside) == 1 or inside[1:] == (...,)):
        return {"type": "array", "items": hint_to_schema(inside[0], where)}
    if origin is dict and inside[0] is str:
        return {"type": "object", "additionalProperties": hint_to_schema(inside[1], where)}
    if origin in (Union, types.UnionType):
        others = [one for one in inside if one is not type(None)]
        if len(others) == 1:
            return {**hint_to_schema(others[0], where), "nullable": True}
    if origin is Literal and len({type(one) for one in inside}) == 1 and type(inside[0]) in (str, int, bool):
        return {"type": _JSON_TYPES[type(inside[0])], "enum": list(inside)}
    shown = getattr(hint, "__name__", "") if isinstance(hint, type) and origin is None else str(hint)
    raise ConfigError(
        f"{where} has the hint {shown[:80]}; it must be str, int, float, bool, list[...], dict, Literal[...], or one "
        "of these or None"
    )


def parse_docstring(doc: str) -> tuple[str, Mapping[str, str]]:
    """What stands before the first section of a docstring, in one paragraph, and what is said of each argument."""
    head: list[str] = []
    arguments: dict[str, str] = {}
    section, last, depth = "", "", 0
    for line in doc.splitlines():
        found = _SECTION.fullmatch(line) if not line.startswith(" ") else None
        if found:
            section, last = found[1], ""
        elif not section:
            head.append(line.strip())
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            indent = len(line) - len(line.lstrip())
            begun = _ARGUMENT.fullmatch(line.strip())
            if begun and (not last or indent <= depth):
                last, depth = begun[1], indent
                arguments[last] = begun[2].strip()
            elif last:
                arguments[last] = f"{arguments[last]} {line.strip()}".strip()
    return " ".join(" ".join(head).split()), arguments


def _check_default(value: Any, where: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise ConfigError(f"{where} has a default that JSON cannot hold; use None") from None
