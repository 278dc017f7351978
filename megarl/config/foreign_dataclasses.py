"""Validate values against another package's dataclass fields, parsed from its source without importing it.

A field's annotation determines the valid values. Types that YAML cannot express (a function, a dtype) accept none.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarl.config.strict import INT32_MAX, ConfigError, describe_type, did_you_mean, is_valid, short_repr

_UNKNOWN = object()
_TYPES: dict[str, Any] = {item.__name__: item for item in (bool, int, float, str, list, dict, set, tuple)}
_TYPES |= {"List": list, "Dict": dict, "Set": set, "Tuple": tuple, "Any": Any}


class _Inexpressible:
    """Stands for a type whose values YAML cannot express."""


@dataclass(frozen=True)
class Field:
    """A dataclass field.

    type: that of valid values. type_name: its annotation, without `Annotated`. choices: the valid values, if
    enumerated. default: None also if there is none, `...` if it is not a plain value. allows_minus_one: whether -1 has
    a meaning. group: the class of the field.
    """

    type: Any
    type_name: str
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
        if not isinstance(value, str | int | float) or value not in field.choices:
            choices, hint = ", ".join(map(str, field.choices)), did_you_mean(value, field.choices)
            raise ConfigError(f"{where} must be one of {choices}, not {short_repr(value)}{hint}")
        return
    for number in _numbers(value):
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"{where} must be a finite number, not {number}")
        if abs(number) > INT32_MAX:  # their kernels use 32-bit integers
            raise ConfigError(f"{where} must be at most {INT32_MAX}, not {short_repr(number)}")
        is_minus_one = number == -1 and field.allows_minus_one
        if isinstance(number, int) and number < 0 and not is_minus_one and "int" in field.type_name:
            raise ConfigError(f"{where} must not be negative, but is {number}")
    if not is_valid(value, field.type):
        kind = describe_type(field.type).removesuffix(", or null")
        if not kind:
            raise ConfigError(f"{where} cannot be set: it is of type {field.type_name}, which YAML cannot give")
        raise ConfigError(f"{where} must be {kind}, not {short_repr(value)}{_number_hint(value, kind)}")


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
    allows_minus_one = (isinstance(value, int | float) and value < 0) or "-1" in metadata_text
    return Field(_parse_type(annotation), ast.unparse(annotation), choices, value, allows_minus_one, group)


def _parse_type(annotation: ast.expr) -> Any:
    """Return the type that an annotation names."""
    if isinstance(annotation, ast.Constant):
        if isinstance(annotation.value, str):
            return _parse_type(ast.parse(annotation.value, mode="eval").body)
        return annotation.value if annotation.value is ... else types.NoneType
    if isinstance(annotation, ast.BinOp):  # int | None
        return _parse_type(annotation.left) | _parse_type(annotation.right)
    if not isinstance(annotation, ast.Subscript):
        return _TYPES.get(ast.unparse(annotation).removeprefix("typing."), _Inexpressible)
    name, inner = ast.unparse(annotation.value).removeprefix("typing."), annotation.slice
    items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if name == "Literal":
        return Literal[tuple(ast.literal_eval(item) for item in items)]  # type: ignore[misc]
    arguments = tuple(map(_parse_type, items))
    if name in ("Optional", "Union"):
        return functools.reduce(operator.or_, arguments, *([types.NoneType] if name == "Optional" else []))
    generic = _TYPES.get(name, _Inexpressible)
    return generic[arguments] if generic is not _Inexpressible else generic


def _numbers(value: Any) -> list[int | float]:
    if isinstance(value, list | tuple | dict):
        return [number for item in (value.values() if isinstance(value, dict) else value) for number in _numbers(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def _number_hint(value: Any, kind: str) -> str:
    """Suggest the number meant by input such as 1e6, which YAML reads as text or as a float."""
    try:
        number = float(value) if "number" in kind and isinstance(value, str | float) else math.nan
    except ValueError:
        return ""
    if "whole" in kind:
        return f"; write {int(number)}" if number.is_integer() else ""
    return f"; write {number!r}" if math.isfinite(number) else ""
