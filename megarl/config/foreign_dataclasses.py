"""Validate values against another package's dataclass fields, parsed from its source without importing it.

A field's annotation determines the valid values. Types that YAML cannot express (a function, a dtype) accept none.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config.strict import ConfigError, closest_match

INT32_MAX = 2**31 - 1
"""Upper bound of all sizes and counts in these packages; their kernels use 32-bit integers."""
_UNKNOWN = object()


@dataclass(frozen=True)
class Field:
    """A dataclass field.

    annotation: without `Annotated`. choices: the valid values, if enumerated. default: None also if there is none,
    `...` if it is not a plain value. allows_minus_one: whether -1 has a meaning. group: the class of the field.
    """

    annotation: ast.expr
    choices: tuple[Any, ...] = ()
    default: Any = None
    allows_minus_one: bool = False
    group: str = ""


def parse_fields(body: Iterable[ast.stmt], names: Mapping[str, Any] | None = None, group: str = "") -> dict[str, Field]:
    """Return the annotated fields of a class body by name. names: values of the constants used in their metadata."""
    fields = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields[node.target.id] = _parse_field(node, names or {}, group)
    return fields


def check_field_value(where: str, value: Any, field: Field) -> None:
    """Raise ConfigError, naming the key `where`, for an invalid value of a field."""
    if value is None and field.default is None:
        return
    if field.choices:
        if not _is_scalar(value) or value not in field.choices:
            choices = ", ".join(map(str, field.choices))
            raise ConfigError(
                f"{where} must be one of {choices}, not {_short_repr(value)}{did_you_mean(value, field.choices)}"
            )
        return
    _check_numbers(where, value, field)
    if not _matches_type(value, field.annotation):
        kind = _describe_type(field.annotation)
        if not kind:
            type_name = ast.unparse(field.annotation)
            raise ConfigError(f"{where} cannot be set: it is of type {type_name}, which YAML cannot give")
        raise ConfigError(f"{where} must be {kind}, not {_short_repr(value)}{_number_hint(value, kind)}")


def did_you_mean(name: Any, known: Iterable[Any]) -> str:
    """Return a hint with the closest known name, or an empty string."""
    match = closest_match(str(name), map(str, known))
    return f"; did you mean {match}?" if match else ""


def eval_literal(node: ast.expr | None, names: Mapping[str, Any]) -> Any:
    """Evaluate an expression of plain values and known names; `_UNKNOWN` if it is anything else."""
    if node is None:
        return _UNKNOWN
    if isinstance(node, ast.Name):
        return names.get(node.id, _UNKNOWN)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset"):
        inner: Any = eval_literal(node.args[0], names) if len(node.args) == 1 else _UNKNOWN
        return inner if inner is _UNKNOWN else sorted(inner)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = eval_literal(node.left, names), eval_literal(node.right, names)
        return _UNKNOWN if _UNKNOWN in (left, right) or type(left) is not type(right) else left + right
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return _UNKNOWN


def parse_constants(tree: ast.Module) -> dict[str, Any]:
    """Return the plain values that a module assigns to names."""
    constants: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = eval_literal(node.value, constants)
            if value is not _UNKNOWN:
                constants[node.targets[0].id] = value
    return constants


def _parse_field(node: ast.AnnAssign, names: Mapping[str, Any], group: str) -> Field:
    annotation, choices, metadata_text = node.annotation, (), ""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated"):
        assert isinstance(annotation.slice, ast.Tuple)
        annotation, *metadata = annotation.slice.elts
        for item in metadata:
            metadata_text += ast.unparse(item)
            for keyword in item.keywords if isinstance(item, ast.Call) else ():
                if keyword.arg == "choices" and (values := eval_literal(keyword.value, names)) is not _UNKNOWN:
                    choices = tuple(values)
    value: Any = None
    if node.value is not None:
        default = node.value
        if isinstance(default, ast.Call):  # field(default=...)
            default = next((item.value for item in default.keywords if item.arg == "default"), default)
        value = eval_literal(default, names)
        value = ... if value is _UNKNOWN else value
    negative = isinstance(value, int | float) and value < 0
    return Field(annotation, choices, value, negative or "-1" in metadata_text, group)


def _matches_type(value: Any, annotation: ast.expr) -> bool:
    base, arguments = _split_type(annotation)
    match base:
        case "Union":
            return any(_matches_type(value, item) for item in arguments)
        case "Literal":
            return _is_scalar(value) and any(value == item and type(value) is type(item) for item in arguments)
        case "None":
            return value is None
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "list" | "set":
            return isinstance(value, list | tuple) and all(
                _matches_type(item, kind) for kind in arguments for item in value
            )
        case "tuple":
            kinds = [item for item in arguments if not isinstance(item, ast.Constant)]
            if not isinstance(value, list | tuple):
                return False
            if len(kinds) < len(arguments):  # tuple[int, ...]
                return all(_matches_type(item, kinds[0]) for item in value)
            return len(value) == len(kinds) and all(map(_matches_type, value, kinds))
        case "dict":
            if not isinstance(value, dict):
                return False
            return not arguments or all(
                _matches_type(k, arguments[0]) and _matches_type(v, arguments[1]) for k, v in value.items()
            )
        case "Any":
            return True
    return False


def _describe_type(annotation: ast.expr) -> str:
    """Describe the valid values; empty if YAML cannot express any."""
    base, arguments = _split_type(annotation)
    plain = {
        "bool": "true or false",
        "int": "a whole number",
        "float": "a number",
        "str": "text",
        "None": "null",
        "dict": "a mapping",
        "Any": "any value",
    }
    if base in plain:
        return plain[base]
    if base == "Union":
        return " or ".join(filter(None, (_describe_type(item) for item in arguments if _split_type(item)[0] != "None")))
    if base == "Literal":
        return "one of " + ", ".join(map(str, arguments))
    if base in ("list", "set", "tuple"):
        inner = dict.fromkeys(filter(None, (_describe_type(item) for item in arguments)))
        if arguments and not inner:
            return ""
        length = f" of {len(arguments)} items" if base == "tuple" and len(arguments) > 1 else ""
        return f"a list{length}" + (f", each {' or '.join(inner)}" if inner else "")
    return ""


def _split_type(annotation: ast.expr) -> tuple[str, list[Any]]:
    """Return a type's normalized name and its arguments; for a Literal, its values."""
    if isinstance(annotation, ast.Constant):
        if annotation.value is None:
            return "None", []
        if isinstance(annotation.value, str):
            return _split_type(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.BinOp):  # int | None
        return "Union", [annotation.left, annotation.right]
    arguments: list[Any] = []
    if isinstance(annotation, ast.Subscript):
        inner = annotation.slice
        arguments = list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]
        annotation = annotation.value
    name = ast.unparse(annotation).removeprefix("typing.")
    if name == "Optional":
        return "Union", [*arguments, ast.Constant(None)]
    if name == "Literal":
        return "Literal", [ast.literal_eval(item) for item in arguments]
    return {"List": "list", "Dict": "dict", "Set": "set", "Tuple": "tuple"}.get(name, name), arguments


def _check_numbers(where: str, value: Any, field: Field) -> None:
    """Raise ConfigError for non-finite numbers, numbers beyond 32 bits, and negative sizes."""
    for number in _numbers(value):
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"{where} must be a finite number, not {number}")
        if abs(number) > INT32_MAX:
            raise ConfigError(f"{where} must be at most {INT32_MAX}, not {_short_repr(number)}")
        if isinstance(number, int) and number < 0 and not (number == -1 and field.allows_minus_one):
            if "int" in ast.unparse(field.annotation):
                raise ConfigError(f"{where} must not be negative, but is {number}")


def _numbers(value: Any) -> list[int | float]:
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    if isinstance(value, dict):
        return [number for item in value.values() for number in _numbers(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _number_hint(value: Any, kind: str) -> str:
    """Suggest the number meant by input such as 1e6, which YAML reads as text or as a float."""
    if "number" not in kind or not isinstance(value, str | float):
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    if "whole" in kind:
        return f"; write {int(number)}" if number.is_integer() else ""
    return f"; write {number!r}" if math.isfinite(number) else ""


def _short_repr(value: Any) -> str:
    if isinstance(value, int) and abs(value) > 1 << 200:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print the longest
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."
