"""Stateless tools: an OpenAI function schema and a Python function, listed in `rollout.tools` as `module:name`.

They are the user's own code, not sandboxed, which may hang, crash or print, and so run in another process.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.config.plugins import format_error, is_generator
from megarl.config.strict import ConfigError

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tool:
    """A tool.

    Attributes:
        schema: OpenAI's {"type": "function", "function": {name, description, parameters}}
        function: takes the arguments as keywords and returns text or JSON-serializable values; a coroutine function is
            awaited
        spec: where it was loaded from, `module:name`
    """

    schema: dict[str, Any]
    function: Callable[..., Any]
    spec: str = ""

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def check_schema(schema: Any, spec: str, key: str = "rollout.tools") -> None:
    """Raise ConfigError unless it is an OpenAI function schema.

    Templates, parsers and `find_argument_error` must be able to read it.
    """

    def need(is_valid: bool, what: str) -> None:
        if not is_valid:
            raise ConfigError(f"{key}: {spec} has no OpenAI function schema: {what}")

    need(isinstance(schema, dict) and schema.get("type") == "function", "it must have type=function")
    function = schema.get("function")
    need(isinstance(function, dict), "`function` must be a mapping")
    name, parameters = function.get("name"), function.get("parameters")
    has_valid_name = isinstance(name, str) and bool(_NAME.fullmatch(name))
    need(has_valid_name, f"its name must be 1 to 64 of the characters a-zA-Z0-9_.-, not {str(name)[:80]!r}")
    need(isinstance(function.get("description", ""), str), "`description` must be text")
    need(parameters is None or isinstance(parameters, dict), "`parameters` must be a mapping")
    properties, required = (parameters or {}).get("properties") or {}, (parameters or {}).get("required") or []
    are_mappings = isinstance(properties, dict) and all(isinstance(entry, dict) for entry in properties.values())
    need(are_mappings, "`properties` must map names to mappings")
    need(isinstance(required, list | tuple), "`required` must be a list of names")
    for argument in required:
        need(argument in properties, f"`required` names {argument!r}, which is not among its `properties`")
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        need(False, f"it is not JSON, {format_error(error)}")


def check_function(tool: Tool, spec: str) -> None:
    """Raise ConfigError if the function cannot be called with the schema's arguments."""
    if not callable(tool.function):
        raise ConfigError(f"rollout.tools: the function of {spec} is a {type(tool.function).__name__}")
    if is_generator(tool.function):
        raise ConfigError(f"rollout.tools: the function of {spec} is a generator; it must return text")
    try:
        signature = inspect.signature(tool.function)
    except (TypeError, ValueError):  # a C function without a signature
        return
    parameters = tool.schema["function"].get("parameters") or {}
    for names in (parameters.get("required") or (), parameters.get("properties") or ()):
        try:
            signature.bind(**dict.fromkeys(names))
        except TypeError as error:
            raise ConfigError(
                f"rollout.tools: the function of {spec} cannot be called with the schema's arguments "
                f"({', '.join(names)}): {error}"
            ) from None


JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_LITERALS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}


def read_declared_types(schema: dict[str, Any]) -> set[str]:
    """Return the JSON types that an argument's schema allows, through `anyOf`, `oneOf`, `enum` and `nullable`.

    Empty if it declares none, or an unknown one.
    """
    declared = schema.get("type")
    names = {declared} if isinstance(declared, str) else set(declared) if isinstance(declared, list) else set()
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key) or ():
            option_types = read_declared_types(option) if isinstance(option, dict) else set()
            if not option_types:
                return set()
            names |= option_types
    if not names and isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        names = {name for value in values for name in JSON_TYPES if _is_of_type(value, name)}
    if names and schema.get("nullable"):
        names.add("null")
    return names if names <= set(JSON_TYPES) else set()


def coerce_argument(text: str, schema: dict[str, Any]) -> Any:
    """Convert an argument that the policy wrote as bare text to its declared type.

    A declared string is the text as is: 1e5, true, null, 007. If other types are allowed besides, the result is the
    first of null, boolean, integer, number, array and object that parses. Text that matches no declared type is
    returned unchanged, and `find_argument_error` reports it. Without a declared type, it is parsed as JSON.
    """
    types = read_declared_types(schema)
    if types == {"string"}:
        return text
    value = _read_value(text.strip())
    if not types:
        return text if value is _UNPARSED else value
    if isinstance(value, float) and value.is_integer() and "number" not in types:
        value = int(value)
    return value if value is not _UNPARSED and any(_is_of_type(value, name) for name in types - {"string"}) else text


_UNPARSED = object()


def _read_value(text: str) -> Any:
    """Parse as JSON, else as a Python literal; `_UNPARSED` if neither works or a number is not finite."""
    if text.lower() in _LITERALS:
        return _LITERALS[text.lower()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escape sequences
        for read in (json.loads, ast.literal_eval):
            with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return json.loads(json.dumps(read(text), allow_nan=False))
    return _UNPARSED


def _is_of_type(value: Any, name: str) -> bool:
    return isinstance(value, JSON_TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def find_argument_error(schema: dict[str, Any], arguments: Any) -> str:
    """Return what is wrong with a call's arguments, worded for the policy; empty if nothing is."""
    if not isinstance(arguments, dict):
        return "the arguments must be a JSON object"
    parameters = schema["function"].get("parameters") or {}
    properties = parameters.get("properties") or {}
    for name in parameters.get("required") or ():
        if name not in arguments:
            return f"argument {name} is missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"unknown argument {name}"
        types = read_declared_types(properties[name])
        if types and not any(_is_of_type(value, type_name) for type_name in types):
            return f"argument {name} must be of type {' or '.join(sorted(types - {'null'} or types))}"
        if value is None and "null" in types:
            continue
        if isinstance(allowed := properties[name].get("enum"), list) and value not in allowed:
            return f"argument {name} must be one of {', '.join(map(str, allowed))}"
    return ""
