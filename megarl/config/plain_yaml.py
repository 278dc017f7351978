"""A YAML subset without surprises.

YAML 1.1 reads 010 as 8, 12:30:45 as 45045, `no` as false and 1e-6 as text, and keeps the last of duplicate keys. Here
numbers are decimal, only true and false are booleans, and duplicate keys are errors. Anchors and merge keys (`<<`) work
as in YAML; tags are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megarl.config.strict import ConfigError, short_repr

MAX_BYTES, MAX_DEPTH, MAX_VALUES = 1 << 20, 40, 100_000
"""Limits far above any configuration: bytes of a file, nesting depth, and values with aliases expanded."""
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_KEY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class _Loader(yaml.SafeLoader):
    """Refuses tags, deep nesting, invalid keys and too many values while it composes nodes, before it makes objects."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def __init__(self, text: str, where: str = "") -> None:
        super().__init__(text)
        self.where, self.depth = where, 0
        self.sizes: dict[int, int] = {}  # by id of a node: its values, with aliases expanded

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        where = f"{self.where}, line {event.start_mark.line + 1}"
        if tag := getattr(event, "tag", None):
            raise ConfigError(f"{where}: the tag {tag} is not allowed in a configuration")
        if isinstance(event, yaml.CollectionStartEvent) and self.depth == MAX_DEPTH:
            raise ConfigError(f"{where}: nested more than {MAX_DEPTH} deep")
        self.depth += 1
        node: Any = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self.sizes:
                raise ConfigError(f"{self.where}, line {node.start_mark.line + 1}: the anchor is part of itself")
            return node
        items = node.value
        if isinstance(node, yaml.MappingNode):
            self._check_keys([key for key, _ in node.value if key.tag != _MERGE])
            items = [item for pair in node.value for item in pair]
        size = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(self.sizes[id(item)] for item in items))
        if size > MAX_VALUES:
            raise ConfigError(f"{where}: more than {MAX_VALUES:,} values, with aliases written out")
        self.sizes[id(node)] = size
        return node

    def _check_keys(self, keys: list[yaml.Node]) -> None:
        seen: dict[str, int] = {}
        for key in keys:
            line = key.start_mark.line + 1
            if key.tag == f"{_TAG}int" and key.value.isdecimal():
                key.tag = f"{_TAG}str"  # a step of `stages`
            if key.tag != f"{_TAG}str":
                shown = (key.value or "null") if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                raise ConfigError(f"{self.where}, line {line}: {shown} is not a key")
            if key.value in seen:
                lines = f"line {seen[key.value]} and line {line}"
                raise ConfigError(f"{self.where}: {key.value} is set twice, in {lines}; remove one")
            seen[key.value] = line


for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?((0|[1-9][0-9_]*)(\.[0-9_]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", list("-+0123456789.")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_pattern})$"), _first)


def _construct_int(loader: yaml.SafeLoader, node: Any) -> int:
    # Python refuses to parse numbers of more than 4,300 digits; every key's range is exceeded long before.
    return int(loader.construct_scalar(node).replace("_", "")[:1000])


def _construct_float(loader: yaml.SafeLoader, node: Any) -> float:
    return float(loader.construct_scalar(node).replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor(f"{_TAG}int", _construct_int)
_Loader.add_constructor(f"{_TAG}float", _construct_float)


def read(path: str | Path) -> Any:
    """Parse a file; None if it is empty. Raises ConfigError, naming file and line."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return parse_bytes(data, str(path))


def parse_bytes(data: bytes, path: str) -> Any:
    """Parse the content of the file `path`. Raises ConfigError, naming file and line."""
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_BYTES >> 20} MiB, too large for a configuration")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {data[error.start]:#04x} in line {line}): save it as UTF-8"
        ) from None
    return parse(text, path)


def parse(text: str, where: str) -> Any:
    """Parse YAML text. `where` is the prefix of a ConfigError."""
    if yaml.reader.Reader.NON_PRINTABLE.search(text):
        raise ConfigError(f"{where} has characters that are not text")
    loader = _Loader(text, where)
    try:
        node = loader.get_single_node()
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        problem = str(error)
        if isinstance(error, yaml.MarkedYAMLError):
            mark = error.problem_mark or error.context_mark
            position = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
            problem = ", ".join(part for part in (error.context, error.problem) if part) + position
        raise ConfigError(f"{where} is not valid YAML: {' '.join(problem.split())}") from None


def parse_scalar(text: str, where: str) -> Any:
    """Parse the value of `key=value` on a command line: YAML if it starts like a list, a mapping or a quoted string;
    otherwise a number, true, false, null or literal text."""
    if text.lstrip()[:1] in ("[", "{", '"', "'") and text.strip():
        return parse(text, where)
    node = yaml.ScalarNode(_Loader("").resolve(yaml.ScalarNode, text.strip(), (True, False)), text.strip())
    return _Loader("").construct_object(node) if node.tag != _MERGE else text


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str], sections: Mapping[str, str]) -> dict[str, Any]:
    """Apply `section.key=value` overrides to `tree` in place and return it. sections: every section, with one of its
    keys.

    Raises ConfigError for a malformed override, for a key that is set twice, and for a value in place of a section.
    """
    by_key: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        where = f"override {short_repr(override)}"
        if not equals or not _KEY.fullmatch(key):
            raise ConfigError(f"{where} is not of the form key=value, such as run.seed=2")
        for other in by_key:
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                overrides_text = f"{short_repr(by_key[other])} and {short_repr(override)}"
                raise ConfigError(f"{other} is given twice, in {overrides_text}; remove one")
        by_key[key] = override
        value = parse_scalar(text, where)
        if key in sections and not isinstance(value, dict):
            raise ConfigError(f"{where}: {key} is a section of keys; set one of them, such as {sections[key]}=...")
        node = tree
        *parents, leaf = key.split(".")
        for parent in parents:
            if node.get(parent) is None:
                node[parent] = {}
            node = node[parent]
            if not isinstance(node, dict):
                raise ConfigError(f"{where}: {parent} is a value, not a section")
        node[leaf] = {**(node.get(leaf) or {}), **value} if key in sections else value
    return tree
