"""Nested plain values into dataclasses, strictly: what is unknown or of the wrong type is named, with the remedy."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from typing import Any, Literal, get_args, get_origin

import yaml


class ConfigError(ValueError):
    """A mistake in the configuration: one line that names the key and the remedy."""


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values, of which `build` makes the same again."""
    tree: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            value = to_dict(value)
        tree[item.name] = list(value) if isinstance(value, tuple) else value
    return tree


def keys_of(cls: type, prefix: str = "") -> list[tuple[str, Any]]:
    """Every key of a dataclass and of those in it, `section.key`, with its default, in order."""
    rows: list[tuple[str, Any]] = []
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        kind = hints[item.name]
        if dataclasses.is_dataclass(kind):
            rows += keys_of(typing.cast(type, kind), f"{prefix}{item.name}.")
        else:
            default = item.default if item.default is not dataclasses.MISSING else {}
            rows.append((prefix + item.name, default))
    return rows


def parse_scalar(text: str) -> Any:
    """The value that follows `key=`: YAML, with numbers such as 1e-6; text where it is no YAML."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return _number(value)


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-6 as a string; everybody means the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def build(cls: Any, tree: Any, where: str, root: type) -> Any:
    """A dataclass out of nested plain values. `where`: what comes before its keys in messages; `root`: the dataclass of
    all keys, among which a key that is in the wrong section is looked for. Raises ConfigError for anything unknown or
    of the wrong type."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{where.rstrip('.')} must be a section of keys, not {tree!r}")
    known = {item.name: item for item in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            everywhere = [name for name, _ in keys_of(root) if name.split(".")[-1] == key]
            nearest = f"{where}{near[0]}" if near else everywhere[0] if everywhere else ""
            hint = f"; did you mean {nearest}?" if nearest else ""
            raise ConfigError(f"unknown key {where}{key}{hint} (known here: {', '.join(known)})")
        values[key] = _convert(value, hints[key], f"{where}{key}", root)
    return cls(**values)


def _convert(value: Any, kind: Any, name: str, root: type) -> Any:
    if dataclasses.is_dataclass(kind):
        return build(kind, {} if value is None else value, f"{name}.", root)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        return _convert(value, next(arg for arg in args if arg is not type(None)), name, root)
    if origin is Literal:
        if value not in args:
            near = difflib.get_close_matches(str(value), [str(arg) for arg in args], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{name} must be one of {', '.join(map(str, args))}, not {value!r}{hint}")
        return value
    if origin is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{name} must be a list, not {value!r}")
        return tuple(_convert(item, args[0], f"{name}[{i}]", root) for i, item in enumerate(items))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{name} must be a mapping, not {value!r}")
        return dict(value)
    if kind is str and value is None:
        return ""  # `data.eval=` on the command line
    if kind is float:
        value = _number(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} must be a number, not {value!r}")
        return float(value)
    if kind is int:
        value = _number(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{name} must be of type {kind.__name__}, not {value!r}")
    return value
