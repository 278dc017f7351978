"""Nested plain values into dataclasses, strictly: what is unknown, of the wrong type or out of range is named, with the
remedy. A range is part of a field's type: `lr: Annotated[float, Range(0, 1)]`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import math
import re
import reprlib
import textwrap
import types
import typing
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin


class ConfigError(ValueError):
    """A mistake in the configuration: one line that names the key and the remedy."""


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, which are in it, or above and below numbers that are not."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        return (
            (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        ends = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return " and ".join(f"{word} {_format_number(end)}" for word, end in ends if end is not None)


UNBOUNDED = Range()
INT32_MAX = 2**31 - 1
"""What others keep in 32 bits: numpy's seeds, SGLang's counts of tokens."""
PositiveInt = Annotated[int, Range(1, INT32_MAX)]
NonNegativeInt = Annotated[int, Range(0, INT32_MAX)]
"""0 is none, or off."""
Share = Annotated[float, Range(0, 1)]
PositiveFloat = Annotated[float, Range(above=0, most=1e12)]
NonNegativeFloat = Annotated[float, Range(0, 1e12)]
Seconds = Annotated[float, Range(above=0, most=2_000_000)]
"""Of a wait: poll() knows no longer ones, 23 days."""


@dataclass(frozen=True)
class PathMarker:
    """Marks text that is a path, in which `~` and `$NAME` are expanded (`megarl/config/paths.py`)."""


PathStr = Annotated[str, PathMarker()]

LFS_HEADER = b"version https://git-lfs"
"""How the note begins that Git LFS leaves in the place of a file."""
LFS_REMEDY = "is a pointer of Git LFS, not the file itself: run git lfs pull in its folder, or copy the file there"
_MAX_PATH_LENGTH, _MAX_NAME_LENGTH = 4000, 255  # of a path and of each part of it, which all texts here might be
_NUMBER = re.compile(r"[-+]?((0|[1-9][0-9_]*)(\.[0-9_]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_REPR = reprlib.Repr()
_REPR.maxstring, _REPR.maxother, _REPR.maxlevel = 80, 80, 3


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values, of which `build` makes the same again."""
    tree: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            value = to_dict(value)
        tree[item.name] = list(value) if isinstance(value, tuple) else value
    return tree


def list_keys(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Every key of a dataclass and of those in it, `section.key`, with its value, in order."""
    rows: list[tuple[str, Any]] = []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        section = dataclasses.is_dataclass(value)
        rows += list_keys(value, f"{prefix}{item.name}.") if section else [(prefix + item.name, value)]
    return rows


def collect_key_types(cls: type, prefix: str = "") -> dict[str, Any]:
    """The type of every key, with its range; keys as of `list_keys`."""
    kinds: dict[str, Any] = {}
    for name, kind in field_types(cls).items():
        section = dataclasses.is_dataclass(kind)
        kinds |= collect_key_types(typing.cast(type, kind), f"{prefix}{name}.") if section else {prefix + name: kind}
    return kinds


def collect_key_docs(cls: type, prefix: str = "") -> dict[str, str]:
    """The first sentence of what stands behind each key's line, where something does; keys as of `list_keys`."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    said: dict[str, str] = {}
    for line, behind in itertools.pairwise(tree.body):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(behind, ast.Expr):
            text = " ".join(str(ast.literal_eval(behind.value)).split())
            said[line.target.id] = re.split(r"(?<=[a-z`)\]])\. (?=[A-Z`])", text)[0].rstrip(".")
    found: dict[str, str] = {}
    for name, kind in field_types(cls).items():
        if dataclasses.is_dataclass(kind):
            found |= collect_key_docs(typing.cast(type, kind), f"{prefix}{name}.")
        elif name in said:
            found[prefix + name] = said[name]
    return found


def is_path_type(kind: Any) -> bool:
    """Whether a field holds a path, or a list of them."""
    if get_origin(kind) is Annotated:
        return any(isinstance(note, PathMarker) for note in get_args(kind)[1:])
    return get_origin(kind) in (tuple, list) and is_path_type(get_args(kind)[0])


def describe_type(kind: Any) -> str:
    """A type in words: `a number, above 0 and at most 1, or null`."""
    base, within, optional = _split_type(kind)
    origin, args = get_origin(base), get_args(base)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}
    if origin is Literal:
        text = f"one of {', '.join(map(str, args))}"
    elif origin is tuple or origin is list:
        text = "a list of text" if args and _split_type(args[0])[0] is str else "a list"
    else:
        text = words[origin or base]
    return text + (f", {within}" if str(within) else "") + (", or null" if optional else "")


def is_valid(value: Any, kind: Any) -> bool:
    """Whether a value is of a type as it stands, and in its range; floats must be finite."""
    base, within, optional = _split_type(kind)
    origin, args = get_origin(base), get_args(base)
    if value is None:
        return optional
    if base is int:
        return isinstance(value, int) and not isinstance(value, bool) and value in within
    if base is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (isinstance(value, int) or math.isfinite(value)) and value in within
    if base is str:
        return isinstance(value, str) and _is_text(value)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin is tuple or origin is list:
        return isinstance(value, list | tuple) and all(is_valid(item, args[0]) for item in value)
    return isinstance(value, origin or base)


def check_value(value: Any, kind: Any, name: str) -> None:
    """Raise ConfigError unless a value `fits`."""
    if not is_valid(value, kind):
        base, _, _ = _split_type(kind)
        hint = ""
        if get_origin(base) is Literal:
            near = closest_match(short_repr(value).strip("'"), get_args(base))
            hint = f"; did you mean {near}?" if near else ""
        if base is str and isinstance(value, str):
            odd = any(c < " " for c in value) or not _is_text(value, whole=False)
            fault = "without control characters and halves of characters" if odd else "that is a name"
            why = "" if odd else ", which is too long; choose another"
            raise ConfigError(f"{name} must be text {fault}, not {short_repr(value)}{why}")
        if base is str and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15:
            hint = f"; in quotes it is text: {name}: '{value}' in a file, \"{name}='{value}'\" on a command line"
        raise ConfigError(f"{name} must be {describe_type(kind)}, not {short_repr(value)}{hint}")
    if isinstance(value, dict):
        _check_plain(value, name)


def check_dataclass(config: Any, where: str = "") -> None:
    """Raise ConfigError for the first value of a dataclass that does not fit its field, as `build` would: for those
    that were made in Python."""
    for name, kind in field_types(type(config)).items():
        value = getattr(config, name)
        if not dataclasses.is_dataclass(kind):
            check_value(value, kind, where + name)
        elif isinstance(value, typing.cast(type, kind)):
            check_dataclass(value, f"{where}{name}.")
        else:
            raise ConfigError(f"{where}{name} must be a {getattr(kind, '__name__', kind)}, not {short_repr(value)}")


def build_dataclass(cls: Any, tree: Any, where: str, root: type, default: Any = None) -> Any:
    """A dataclass out of nested plain values. `where`: what comes before its keys in messages; `root`: the dataclass of
    all keys, among which a key that is in the wrong section is looked for; `default`: an instance that has the values
    of keys which the tree lacks, where it is not `cls()`: a section may have defaults of its own. Raises ConfigError
    for anything unknown, of the wrong type or out of range."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{where.rstrip('.')} must be a section of keys, not {short_repr(tree)}")
    known = {item.name: item for item in dataclasses.fields(cls)}
    hints = field_types(cls)
    default = cls() if default is None else default
    values = {}
    for key, value in tree.items():
        if key not in known:
            raise ConfigError(_unknown_key_message(key, where, list(known), root))
        if dataclasses.is_dataclass(hints[key]):
            tree_of_it = {} if value is None else value
            values[key] = build_dataclass(hints[key], tree_of_it, f"{where}{key}.", root, getattr(default, key))
        else:
            values[key] = _convert(value, hints[key], f"{where}{key}")
    return dataclasses.replace(default, **values)


def _unknown_key_message(key: Any, where: str, known: list[str], root: type) -> str:
    everywhere = [name for name, _ in list_keys(root())]
    if (whole := f"{where}{key}") in everywhere:
        section, _, leaf = whole.rpartition(".")
        return f"unknown key {whole!r}: a dot is for the command line; in a file it is {leaf} in the section {section}"
    near = closest_match(str(key), known)
    elsewhere = [name for name in everywhere if name.split(".")[-1] == key]
    elsewhere += [name for name in [getattr(root, "synonyms", {}).get(str(key).lower())] if name]
    meant = f"{where}{near}" if near else elsewhere[0] if elsewhere else ""
    hint = f"; did you mean {meant}?" if meant else ""
    name = str(key) if str(key).isidentifier() and len(str(key)) < 80 else short_repr(key)
    return f"unknown key {where}{name}{hint} (known here: {', '.join(known)})"


def _convert(value: Any, kind: Any, name: str) -> Any:
    """A value as its field has it: numbers out of text and 1e3 to 1000, one text to a list of it, lists to tuples."""
    base, _, optional = _split_type(kind)
    if base is str and value is None and not optional:
        value = ""  # `data.eval=` on the command line
    if base in (int, float) and isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if base is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if get_origin(base) is tuple:
        value = [] if value in (None, "") else [value] if isinstance(value, str) else value
        if isinstance(value, list | tuple):
            for number, item in enumerate(value):
                check_value(item, get_args(base)[0], f"{name}[{number}]")
    check_value(value, kind, name)
    if base is float and value is not None:
        return float(value)
    if get_origin(base) is tuple:
        return tuple(value)
    return dict(value) if isinstance(value, dict) else value


def closest_match(word: str, known: typing.Iterable[str]) -> str:
    """Which of the known names is meant, whatever its case; empty where none is near."""
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[found[0]] if found else ""


def short_repr(value: Any) -> str:
    """A value in a message: in one line, and short whatever it is."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a number of {int(value.bit_length() * math.log10(2)) + 1} digits"
    return _REPR.repr(value)


def describe_lfs_pointer(file: Path) -> str:
    """What is wrong with a file in whose place Git LFS has left a note of it, and the remedy; else empty."""
    try:
        with file.open("rb") as begin:
            is_pointer = begin.read(len(LFS_HEADER)) == LFS_HEADER
    except OSError:
        return ""
    return f"{file} {LFS_REMEDY}" if is_pointer else ""


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises ConfigError, naming the file, for anything else, and for a key that is
    in an object twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{file} has {short_repr(twice)} twice; remove one")
        return found

    try:
        values = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=once)
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(describe_lfs_pointer(file) or f"{file} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds a {type(values).__name__}, not a mapping")
    return values


def _check_plain(value: Any, name: str, depth: int = 0) -> None:
    """Of mappings that pass through to others: what every file format can hold, and no NaN."""
    if isinstance(value, dict) and depth < 20:
        for key, item in value.items():
            if not isinstance(key, str) or not _is_text(key):
                raise ConfigError(f"{name}: {short_repr(key)} is no name of a key")
            _check_plain(item, f"{name}.{key}", depth + 1)
    elif isinstance(value, list | tuple) and depth < 20:
        for number, item in enumerate(value):
            _check_plain(item, f"{name}[{number}]", depth + 1)
    elif isinstance(value, float):
        check_value(value, float, name)
    elif isinstance(value, int):
        check_value(int(value), Annotated[int, Range(-(2**63), 2**63 - 1)], name)
    elif value is not None and not (isinstance(value, str) and _is_text(value, whole=False)):
        raise ConfigError(
            f"{name} must be a number, text, true, false, null, or a list or mapping, not {short_repr(value)}"
        )


def _is_text(value: str, whole: bool = True) -> bool:
    """Without control characters and halves of characters; whole: and no longer than a path may be."""
    names = [len(name.encode(errors="replace")) for name in value.split("/")]
    if whole and (sum(names) > _MAX_PATH_LENGTH or max(names) > _MAX_NAME_LENGTH):
        return False
    return not any(unicodedata.category(c) == "Cs" or c == "\0" or (whole and c < " ") for c in value)


def field_types(cls: type) -> dict[str, Any]:
    """The type of each field of a dataclass, with its notes."""
    return typing.get_type_hints(cls, include_extras=True)


def _split_type(kind: Any) -> tuple[Any, Range, bool]:
    """A type without its range and null, the range, and whether null is allowed."""
    optional = get_origin(kind) in (types.UnionType, typing.Union)
    if optional:
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    if get_origin(kind) is Annotated:
        base, *notes = get_args(kind)
        return base, next((note for note in notes if isinstance(note, Range)), UNBOUNDED), optional
    return kind, UNBOUNDED, optional


def _format_number(number: float) -> str:
    return str(int(number)) if abs(number) < 1e15 and number == int(number) else f"{number:g}"
