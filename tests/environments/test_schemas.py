"""Build schemas from type hints and docstrings, and check and coerce arguments."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional

import pytest
import toy_environments

from megarl.config.strict import ConfigError
from megarl.environments.schemas import build_schema, hint_to_schema, parse_docstring
from megarl.environments.tools import coerce_argument, find_argument_error, read_declared_types

pytestmark = pytest.mark.alone

PICK = {
    "type": "function",
    "function": {
        "name": "pick",
        "description": "Pick something. Of this and that.",
        "parameters": {
            "type": "object",
            "properties": {
                "one": {"type": "string", "enum": ["a", "b"], "description": "the first of two"},
                "many": {"type": "array", "items": {"type": "integer"}, "description": "numbers"},
                "table": {"type": "object", "additionalProperties": {"type": "number"}},
                "maybe": {"type": "number", "nullable": True, "default": None},
                "flag": {"type": "boolean", "default": False},
            },
            "required": ["one", "many", "table"],
        },
    },
}


def test_builds_the_schema_of_a_method() -> None:
    assert build_schema(toy_environments.Choosy().pick, "here") == PICK


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, {"type": "string"}),
        (list[list[str]], {"type": "array", "items": {"type": "array", "items": {"type": "string"}}}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (list, {"type": "array"}),
        (dict, {"type": "object"}),
        (Optional[int], {"type": "integer", "nullable": True}),  # noqa: UP045  a common spelling
        (None | Literal[1, 2], {"type": "integer", "enum": [1, 2], "nullable": True}),
        (Annotated[str, "a word"], {"type": "string"}),
        (Any, {}),
    ],
)
def test_converts_hints(hint: Any, schema: dict[str, Any]) -> None:
    assert hint_to_schema(hint, "here") == schema


@pytest.mark.parametrize("hint", [bytes, int | str, dict[int, str], set[str], Literal["a", 1], object, tuple[int, str]])
def test_refuses_unsupported_hints(hint: Any) -> None:
    with pytest.raises(ConfigError, match="here has the hint .*; it must be str, int, float"):
        hint_to_schema(hint, "here")


def no_docstring(x: int) -> None: ...


def no_hint(x) -> None:  # type: ignore[no-untyped-def]
    """It."""


def positional_only(*x: int) -> None:
    """It."""


def unknown_hint(x: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
    """It."""


def stale_docstring(x: int) -> None:
    """It.

    Args:
        y: a removed argument
    """


def odd_default(x: int = object()) -> None:  # type: ignore[assignment]  # noqa: B008
    """It."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "here needs a docstring"),
        (no_hint, "here: the argument x needs a type hint, such as x: str"),
        (positional_only, "here: the argument x must be usable as a keyword"),
        (unknown_hint, "here: its type hints cannot be read: NameError: .*Nowhere"),
        (stale_docstring, "here: its docstring describes an argument y, which it does not have"),
        (odd_default, "here: the argument x has a default that is not JSON"),
    ],
)
def test_refuses_functions_without_a_schema(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build_schema(function, "here")
    assert "\n" not in str(error.value)


def test_parses_docstrings() -> None:
    assert parse_docstring("One.\n\nReturns:\n    two: three\n") == ("One.", {})
    assert parse_docstring("Note that: it is.\nMore.") == ("Note that: it is. More.", {})
    assert parse_docstring("") == ("", {})
    head, arguments = parse_docstring(
        "X.\n\nArgs:\n    a: first, such as\n        b: no argument\n    c (int): third\n"
    )
    assert (head, arguments) == ("X.", {"a": "first, such as b: no argument", "c": "third"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"one": "c", "many": [], "table": {}}, "argument one must be one of a, b"),
        ({"one": "a", "many": [], "table": {}, "maybe": None}, ""),
        ({"one": "a", "many": [], "table": {}, "maybe": "x"}, "argument maybe must be of type number"),
        ({"one": None, "many": [], "table": {}}, "argument one must be of type string"),
        ({"one": "a", "many": [1]}, "argument table is missing"),
    ],
)
def test_finds_argument_errors(arguments: dict[str, Any], message: str) -> None:
    assert find_argument_error(PICK, arguments) == message


NULLABLE_INTEGER = {"anyOf": [{"type": "integer"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, set()),
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        (NULLABLE_INTEGER, {"integer", "null"}),
        ({"oneOf": [{"type": "string"}, {}]}, set()),
        ({"enum": ["1", 2]}, {"string", "integer", "number"}),
        ({"const": None}, {"null"}),
        ({"type": "date"}, set()),
    ],
)
def test_reads_declared_types(schema: dict[str, Any], types: set[str]) -> None:
    assert read_declared_types(schema) == types


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        *((text, {"type": "string"}, text) for text in ("1e5", "true", "null", "007", " x ", '"x"', "[1]", "")),
        ("5", {"type": "integer"}, 5),
        (" -5\n", {"type": "integer"}, -5),
        ("5.0", {"type": "integer"}, 5),
        ("1e3", {"type": "integer"}, 1000),
        ("5.5", {"type": "integer"}, "5.5"),
        ("five", {"type": "integer"}, "five"),
        ("true", {"type": "integer"}, "true"),
        ("1e5", {"type": "number"}, 1e5),
        ("3", {"type": "number"}, 3),
        ("1e999", {"type": "number"}, "1e999"),
        ("NaN", {"type": "number"}, "NaN"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, "1"),
        ('["007", 1]', {"type": "array"}, ["007", 1]),
        ("('a', -1)", {"type": "array"}, ["a", -1]),
        ("{'a': None}", {"type": "object"}, {"a": None}),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("null", NULLABLE_INTEGER, None),
        ("7", NULLABLE_INTEGER, 7),
        ("x", NULLABLE_INTEGER, "x"),
        ("null", {"type": ["string", "null"]}, None),
        ("1e5", {"type": ["string", "null"]}, "1e5"),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {}, 1),
        ("1 apple", {}, "1 apple"),
    ],
)
def test_coerces_text_to_declared_types(text: str, schema: dict[str, Any], value: Any) -> None:
    result = coerce_argument(text, schema)
    assert result == value and type(result) is type(value)


def test_accepts_any_of_several_types() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": NULLABLE_INTEGER}}}}
    assert find_argument_error(tool, {"x": None}) == find_argument_error(tool, {"x": 3}) == ""
    assert find_argument_error(tool, {"x": "3"}) == "argument x must be of type integer"
