"""Build dataclasses from nested plain values with strict validation.

Errors name the key that is unknown, of the wrong type or out of range, and the remedy. A range is part of a field's
type: `lr: Annotated[float, Range(0, 1)]`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
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
    """An error in the configuration: one line that names the key and the remedy."""


@dataclass(frozen=True)
class Range:
    """A range of numbers: `least` and `most` are inclusive bounds, `above` and `below` exclusive ones."""

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
        bounds = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        numbers = ((word, int(x) if abs(x) < 1e15 and x == int(x) else x) for word, x in bounds if x is not None)
        return " and ".join(f"{word} {x if isinstance(x, int) else f'{x:g}'}" for word, x in numbers)


UNBOUNDED = Range()
INT32_MAX = 2**31 - 1
"""Limit of values that other packages store in 32 bits: numpy's seeds, SGLang's token counts."""
PositiveInt = Annotated[int, Range(1, INT32_MAX)]
NonNegativeInt = Annotated[int, Range(0, INT32_MAX)]
"""0 means none, or off."""
Share = Annotated[float, Range(0, 1)]
PositiveFloat = Annotated[float, Range(above=0, most=1e12)]
NonNegativeFloat = Annotated[float, Range(0, 1e12)]
Seconds = Annotated[float, Range(above=0, most=2_000_000)]
"""A timeout; poll() supports no longer ones than these 23 days."""


@dataclass(frozen=True)
class PathMarker:
    """Marks a string type as a path, in which `~` and `$NAME` are expanded (`megarl/config/paths.py`)."""


PathStr = Annotated[str, PathMarker()]


@dataclass(frozen=True)
class Remedy:
    """A value to write in place of an invalid one, for the error."""

    text: str


@dataclass(frozen=True)
class ProseMarker:
    """Marks a string type as text of any length that may have line breaks; other strings fit into a file name."""


Prose = Annotated[str, ProseMarker()]

LFS_HEADER = b"version https://git-lfs"
"""First bytes of a Git LFS pointer file."""
LFS_REMEDY = "is a pointer of Git LFS, not the file itself: run git lfs pull in its folder, or copy the file into it"
_MAX_PATH_LENGTH, _MAX_NAME_LENGTH = 4000, 255  # of a path and of each component; any string may be used as a path
_NUMBER = re.compile(r"[-+]?((0|[1-9][0-9_]*)(\.[0-9_]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_REPR = reprlib.Repr()
_REPR.maxstring, _REPR.maxother, _REPR.maxlevel = 80, 80, 3


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a dataclass to nested plain values; `build_dataclass` is the inverse."""
    tree: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        value = to_dict(value) if dataclasses.is_dataclass(value) else value
        tree[item.name] = list(value) if isinstance(value, tuple) else value
    return tree


def list_keys(config: Any) -> list[tuple[str, Any]]:
    """Return every key of nested dataclasses as `section.key`, with its value, in order."""
    return [(key, functools.reduce(getattr, key.split("."), config)) for key in collect_key_types(type(config))]


def collect_key_types(cls: type, prefix: str = "") -> dict[str, Any]:
    """Return the type of every key, including its range; keys as in `list_keys`."""
    kinds: dict[str, Any] = {}
    for name, kind in field_types(cls).items():
        section = dataclasses.is_dataclass(kind)
        kinds |= collect_key_types(typing.cast(type, kind), f"{prefix}{name}.") if section else {prefix + name: kind}
    return kinds


def collect_key_docs(cls: type, prefix: str = "") -> dict[str, str]:
    """Return the first sentence of the docstring under each documented field; keys as in `list_keys`."""
    return {
        key: re.split(r"(?<=[a-z`)\]])\. (?=[A-Z`])", " ".join(text.split()))[0].rstrip(".")
        for key, text in collect_key_texts(cls, prefix).items()
    }


def collect_key_texts(cls: type, prefix: str = "") -> dict[str, str]:
    """Return the docstring under each documented field; keys as in `list_keys`."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, following in itertools.zip_longest(tree.body, tree.body[1:]):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name, kind = field.target.id, field_types(cls)[field.target.id]
        if dataclasses.is_dataclass(kind):
            docs |= collect_key_texts(typing.cast(type, kind), f"{prefix}{name}.")
        elif isinstance(following, ast.Expr):
            docs[prefix + name] = inspect.cleandoc(str(ast.literal_eval(following.value)))
    return docs


def is_path_type(kind: Any) -> bool:
    """True for the type of a path or of a list of paths."""
    if get_origin(kind) is Annotated:
        return any(isinstance(note, PathMarker) for note in get_args(kind)[1:])
    return get_origin(kind) in (tuple, list) and is_path_type(get_args(kind)[0])


def describe_type(kind: Any) -> str:
    """Describe a type in words, `a number, above 0 and at most 1, or null`; empty if YAML cannot express its values."""
    origin, args = get_origin(kind), get_args(kind)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a mapping"}
    if origin is Annotated:
        return ", ".join([describe_type(args[0]), *(str(note) for note in args[1:] if isinstance(note, Range))])
    if origin in (types.UnionType, typing.Union):
        options = " or ".join(filter(None, (describe_type(arg) for arg in args if arg is not types.NoneType)))
        return options + (", or null" if types.NoneType in args else "")
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if (origin or kind) not in (list, tuple, set):
        return "any value" if kind is Any else words.get(origin or kind, "")
    items = dict.fromkeys(filter(None, (describe_type(arg) for arg in args if arg is not ...)))
    if args and not items:
        return ""
    length = f" of {len(args)} items" if origin is tuple and ... not in args else ""
    if "text" in items:
        return f"a list{length} of text"
    return f"a list{length}" + (f", each {' or '.join(items)}" if items else "")


def is_valid(value: Any, kind: Any) -> bool:
    """True if a value has the type, without conversion, and is in its range; floats must be finite."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return is_valid(value, args[0]) and all(value in note for note in args[1:] if isinstance(note, Range))
    if origin in (types.UnionType, typing.Union):
        return any(is_valid(value, arg) for arg in args)
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if origin is dict:
        return isinstance(value, dict) and all(
            is_valid(key, args[0]) and is_valid(value[key], args[1]) for key in value
        )
    if (origin or kind) in (list, tuple, set):
        if not isinstance(value, list | tuple):
            return False
        kinds = args if origin is tuple and ... not in args else args[:1] * len(value)
        return not args or (len(kinds) == len(value) and all(map(is_valid, value, kinds)))
    if kind is float and isinstance(value, float):
        return math.isfinite(value)
    if kind in (int, float):
        return isinstance(value, int) and not isinstance(value, bool)
    return kind is Any or isinstance(value, origin or kind)


def check_value(value: Any, kind: Any, name: str) -> None:
    """Raise ConfigError unless `is_valid`, and for text that no file name or terminal can show."""
    if get_origin(_split_type(kind)[0]) is dict and isinstance(value, dict):
        _check_plain(value, name)
    if not is_valid(value, kind):
        base, hint = _split_type(kind)[0], ""
        if get_origin(base) is Literal:
            hint = did_you_mean(short_repr(value).strip("'"), get_args(base))
        if base is str and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15:
            hint = f"; in quotes it is text: {name}: '{value}' in a file, \"{name}='{value}'\" on a command line"
        remedies = [note.text for note in get_args(kind)[1:] if isinstance(note, Remedy)]
        hint += "".join(f"; {text}" for text in remedies)
        raise ConfigError(f"{name} must be {describe_type(kind)}, not {short_repr(value)}{hint}")
    is_prose = get_origin(kind) is Annotated and any(isinstance(note, ProseMarker) for note in get_args(kind))
    for text in value if isinstance(value, list | tuple) else [value]:
        if isinstance(text, str) and not _is_text(text, whole=not is_prose):
            has_bad_characters = any(c < " " for c in text) or not _is_text(text, whole=False)
            fault = "without control characters and lone surrogates" if has_bad_characters else "of a valid length"
            remedy = "" if has_bad_characters else ", which is too long; choose another"
            raise ConfigError(f"{name} must be text {fault}, not {short_repr(text)}{remedy}")


def check_dataclass(config: Any, where: str = "") -> None:
    """Raise ConfigError for the first invalid field of a dataclass that was constructed in Python, with the checks of
    `build_dataclass`."""
    for name, kind in field_types(type(config)).items():
        value = getattr(config, name)
        if not dataclasses.is_dataclass(kind):
            check_value(value, kind, where + name)
        elif isinstance(value, typing.cast(type, kind)):
            check_dataclass(value, f"{where}{name}.")
        else:
            raise ConfigError(f"{where}{name} must be a {getattr(kind, '__name__', kind)}, not {short_repr(value)}")


def build_dataclass(cls: Any, tree: Any, where: str, root: type, default: Any = None) -> Any:
    """Build a dataclass from nested plain values.

    where: prefix of its keys in messages. root: the dataclass of all keys, searched for keys in the wrong section.
    default: instance with the values of keys that `tree` lacks, if not `cls()`, since a section may have defaults of
    its own. `cls.synonyms`, if any, maps other names of keys to keys that errors suggest; `root.renamed_keys` and
    `root.renamed_values` map former keys and values to the present ones. Raises ConfigError for anything unknown, of
    the wrong type or out of range.
    """
    if not isinstance(tree, dict):
        raise ConfigError(f"{where.rstrip('.')} must be a section of keys, not {short_repr(tree)}")
    cls_fields = {item.name: item for item in dataclasses.fields(cls)}
    hints = field_types(cls)
    default = cls() if default is None else default
    values = {}
    for key, value in tree.items():
        if key not in cls_fields:
            raise ConfigError(_unknown_key_message(key, where, cls, root))
        if dataclasses.is_dataclass(hints[key]):
            section_tree = {} if value is None else value
            values[key] = build_dataclass(hints[key], section_tree, f"{where}{key}.", root, getattr(default, key))
        else:
            renamed = getattr(root, "renamed_values", {}).get(f"{where}{key}", {})
            if isinstance(value, str) and value in renamed:
                raise ConfigError(f"{where}{key}={value}: MegaRL 0.2 renamed this value to {renamed[value]}")
            values[key] = _convert(value, hints[key], f"{where}{key}")
    return dataclasses.replace(default, **values)


def _unknown_key_message(key: Any, where: str, cls: Any, root: type) -> str:
    known = [item.name for item in dataclasses.fields(cls)]
    everywhere = [name for name, _ in list_keys(root())]
    full_key = f"{where}{key}"
    if renamed := getattr(root, "renamed_keys", {}).get(full_key):
        return f"unknown key {full_key}: MegaRL 0.2 renamed it to {renamed}"
    if full_key in everywhere:
        section, _, leaf = full_key.rpartition(".")
        place = f"in a file it is {leaf} in the section {section}"
        return f"unknown key {full_key!r}: a dot is for the command line; {place}"
    synonyms = {} if cls is root else getattr(cls, "synonyms", {})
    if match := synonyms.get(str(key).lower()) or closest_match(str(key), known):
        suggestion = f"{where}{match}"
    else:
        elsewhere = [name for name in everywhere if name.split(".")[-1] == key]
        suggestion = elsewhere[0] if elsewhere else getattr(root, "synonyms", {}).get(str(key).lower(), "")
    name = str(key) if str(key).isidentifier() and len(str(key)) < 80 else short_repr(key)
    if not suggestion:
        return f"unknown key {where}{name} (known here: {', '.join(known)})"
    section = suggestion.rpartition(".")[0]
    listing = f" (megarl train --keys {section} lists more)" if suggestion in everywhere and section else ""
    return f"unknown key {where}{name}; did you mean {suggestion}?{listing}"


def _convert(value: Any, kind: Any, name: str) -> Any:
    """Convert a value to its field's type: strings to numbers, 1e3 to 1000, a string to a list of one, lists to
    tuples."""
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
            for index, item in enumerate(value):
                check_value(item, get_args(base)[0], f"{name}[{index}]")
    check_value(value, kind, name)
    if base is float and value is not None:
        return float(value)
    if get_origin(base) is tuple:
        return tuple(value)
    return dict(value) if isinstance(value, dict) else value


def closest_match(word: str, known: typing.Iterable[str]) -> str:
    """Return the closest known name, ignoring case; empty if none is close."""
    by_lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[matches[0]] if matches else ""


def did_you_mean(word: Any, known: typing.Iterable[Any]) -> str:
    """Return a hint with the closest known name, or an empty string."""
    match = closest_match(str(word), map(str, known))
    return f"; did you mean {match}?" if match else ""


def short_repr(value: Any) -> str:
    """Format any value for a message: one short line."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a number of {int(value.bit_length() * math.log10(2)) + 1} digits"
    return _REPR.repr(value)


def describe_lfs_pointer(file: Path) -> str:
    """Return an error with remedy if a file is a Git LFS pointer; otherwise an empty string."""
    try:
        with file.open("rb") as begin:
            is_pointer = begin.read(len(LFS_HEADER)) == LFS_HEADER
    except OSError:
        return ""
    return f"{file} {LFS_REMEDY}" if is_pointer else ""


def unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its pairs, as json's `object_pairs_hook`. Raises ValueError for a duplicate key."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has {next(name for name in names if names.count(name) > 1)!r} twice")
    return mapping


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object. Raises ConfigError, naming the file, for anything else, and for
    duplicate keys."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique_object)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(describe_lfs_pointer(file) or f"{file} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds a {type(values).__name__}, not a mapping")
    return values


def _check_plain(value: Any, name: str, depth: int = 0) -> None:
    """Check pass-through mappings for values that every file format can represent, without NaN."""
    if isinstance(value, dict) and depth < 20:
        for key, item in value.items():
            if not isinstance(key, str) or not _is_text(key):
                raise ConfigError(f"{name}: {short_repr(key)} is not a key")
            _check_plain(item, f"{name}.{key}", depth + 1)
    elif isinstance(value, list | tuple) and depth < 20:
        for index, item in enumerate(value):
            _check_plain(item, f"{name}[{index}]", depth + 1)
    elif isinstance(value, float):
        check_value(value, float, name)
    elif isinstance(value, int):
        check_value(int(value), Annotated[int, Range(-(2**63), 2**63 - 1)], name)
    elif value is not None and not (isinstance(value, str) and _is_text(value, whole=False)):
        raise ConfigError(
            f"{name} must be a number, text, true, false, null, or a list or mapping, not {short_repr(value)}"
        )


def _is_text(value: str, whole: bool = True) -> bool:
    """True without surrogates and NUL; `whole` also rejects control characters, and text longer than a path may be."""
    names = [len(name.encode(errors="replace")) for name in value.split("/")]
    if whole and (sum(names) > _MAX_PATH_LENGTH or max(names) > _MAX_NAME_LENGTH):
        return False
    return not any(unicodedata.category(c) == "Cs" or c == "\0" or (whole and c < " ") for c in value)


def field_types(cls: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, with its annotations."""
    return typing.get_type_hints(cls, include_extras=True)


def _split_type(kind: Any) -> tuple[Any, Range, bool]:
    """Return a type without range and null, its range, and whether null is allowed."""
    optional = get_origin(kind) in (types.UnionType, typing.Union)
    if optional:
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    if get_origin(kind) is Annotated:
        base, *notes = get_args(kind)
        return base, next((note for note in notes if isinstance(note, Range)), UNBOUNDED), optional
    return kind, UNBOUNDED, optional
