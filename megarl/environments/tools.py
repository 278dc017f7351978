"""A tool without a state: an OpenAI function schema and a Python function, `rollout.tools` names it as `module:name`.

A function with type hints and a docstring does as well, whose schema is made of these. No sandbox: tools are code that
the user chose, which may hang, crash or print, and so runs in another process.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.config.plugins import is_generator
from megarl.config.strict import ConfigError

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tool:
    """schema: OpenAI's {"type": "function", "function": {name, description, parameters}}; function: takes the arguments
    as keywords and returns text, or anything that JSON can hold; a coroutine function is awaited. `spec` is where it
    was loaded from, `module:name`."""

    schema: dict[str, Any]
    function: Callable[..., Any]
    spec: str = ""

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def format_error(error: BaseException, named: bool = True) -> str:
    """What an error says, in one line; `named` by its class, which stands alone where it says nothing."""
    kind = type(error).__name__
    try:
        text = " ".join(str(error).split())[:2000]
    except Exception:  # its __str__ is a user's, too
        text = ""
    return f"{kind}: {text}" if text and named else text or kind


def check_schema(schema: Any, spec: str, key: str = "rollout.tools") -> None:
    """Raise ConfigError where it is no OpenAI function schema that templates, parsers and `find_argument_error` can read."""

    def need(fine: bool, what: str) -> None:
        if not fine:
            raise ConfigError(f"{key}: {spec} has no OpenAI function schema: {what}")

    need(isinstance(schema, dict) and schema.get("type") == "function", "it must have type=function")
    function = schema.get("function")
    need(isinstance(function, dict), "`function` must be a mapping")
    name, parameters = function.get("name"), function.get("parameters")
    plain = isinstance(name, str) and bool(_NAME.fullmatch(name))
    need(plain, "its name must be 1 to 64 of the characters a-zA-Z0-9_.-")
    need(isinstance(function.get("description", ""), str), "`description` must be text")
    need(parameters is None or isinstance(parameters, dict), "`parameters` must be a mapping")
    properties, required = (parameters or {}).get("properties") or {}, (parameters or {}).get("required") or []
    fine = isinstance(properties, dict) and all(isinstance(about, dict) for about in properties.values())
    need(fine, "`properties` must map names to mappings")
    need(isinstance(required, list | tuple), "`required` must be a list of names")
    for argument in required:
        need(argument in properties, f"`required` names {argument!r}, which is not among its `properties`")
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        need(False, f"JSON cannot hold it, {format_error(error)}")


def check_function(tool: Tool, spec: str) -> None:
    """Raise ConfigError where the function cannot be called with what the schema asks for."""
    if not callable(tool.function):
        raise ConfigError(f"rollout.tools: the function of {spec} is a {type(tool.function).__name__}")
    if is_generator(tool.function):
        raise ConfigError(f"rollout.tools: the function of {spec} is a generator; it must return text")
    try:
        signature = inspect.signature(tool.function)
    except (TypeError, ValueError):  # of C, which does not say
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


_JSON_TYPES: dict[str, tuple[type, ...]] = {
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
    """Names of the JSON types that a schema of an argument allows, through `anyOf`, `oneOf`, `enum` and `nullable`;
    empty where it says nothing, or what is not known here."""
    wanted = schema.get("type")
    found = {wanted} if isinstance(wanted, str) else set(wanted) if isinstance(wanted, list) else set()
    for key in ("anyOf", "oneOf"):
        for one in schema.get(key) or ():
            inner = read_declared_types(one) if isinstance(one, dict) else set()
            if not inner:
                return set()
            found |= inner
    if not found and isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        found = {name for value in values for name in _JSON_TYPES if _is_of_type(value, name)}
    if found and schema.get("nullable"):
        found.add("null")
    return found if found <= set(_JSON_TYPES) else set()


def coerce_argument(text: str, schema: dict[str, Any]) -> Any:
    """An argument that the policy wrote as bare text, as its schema declares it.

    A string is the text as it is: 1e5, true, null, 007. Where other types are allowed besides, the first of null,
    boolean, integer, number, array and object that it can be read as. A text that is none of what is declared stays a
    text, of which `find_argument_error` says what is wrong. Without a declared type, what JSON makes of it.
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
    """By JSON, else as a literal of Python's; `_UNPARSED` where it is neither, or no finite number."""
    if text.lower() in _LITERALS:
        return _LITERALS[text.lower()]
    for read in (json.loads, _parse_literal):
        try:
            return json.loads(json.dumps(read(text), allow_nan=False))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
    return _UNPARSED


def _parse_literal(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python does not know
        return ast.literal_eval(text)


def _is_of_type(value: Any, name: str) -> bool:
    return isinstance(value, _JSON_TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def find_argument_error(schema: dict[str, Any], arguments: Any) -> str:
    """What is wrong with the arguments of a call, in words for the policy; empty if nothing is."""
    if not isinstance(arguments, dict):
        return "the arguments must be a JSON object"
    parameters = schema["function"].get("parameters") or {}
    properties = parameters.get("properties") or {}
    for name in parameters.get("required") or ():
        if name not in arguments:
            return f"argument {name} is missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"there is no argument {name}"
        types = read_declared_types(properties[name])
        if types and not any(_is_of_type(value, one) for one in types):
            return f"argument {name} must be of type {' or '.join(sorted(types - {'null'} or types))}"
        if value is None and "null" in types:
            continue
        if isinstance(allowed := properties[name].get("enum"), list) and value not in allowed:
            return f"argument {name} must be one of {', '.join(map(str, allowed))}"
    return ""
