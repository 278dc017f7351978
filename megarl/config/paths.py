"""Expand `~`, `~user`, `$NAME` and `${NAME}` in paths, once, when configurations and command lines are read.

Libraries that expand paths themselves then find nothing left to expand, so all of them use the same file. Names of
models on the Hugging Face Hub become their folders in this machine's cache.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from megarl.config.strict import ConfigError, check_value, field_types, is_path_type

_PLACEHOLDER = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([^}]*)\}|(?=\{))", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PATH_NAME = re.compile(r"(.*_)?(path|dir|folder|file)")
"""Keys that are paths in pass-through mappings: `rollout.sglang.download_dir`, `options.tasks_file`."""
_WORD = re.compile(r"""(?:[^\s'"\\]|'[^']*'|"(?:\\.|[^"\\])*"|\\.)+""")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_SPECS = ("mcp", "harbor")
"""Prefixes of `rollout.tools` and `rollout.environments` with a path after the colon."""


def expand(text: str, key: str) -> str:
    """Return a path with `~` and environment variables replaced. Idempotent.

    Raises ConfigError, naming the key and the variable, if a variable is unset or empty, since `$SCRATCH/runs` would
    become /runs.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[2] or ""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{key}: {text[match.start() :][:80]!r} is not a variable; write $NAME or ${{NAME}}")
        value = os.environ.get(name, "")
        if not value:
            fault = " (it is empty)" if name in os.environ else ""
            raise ConfigError(
                f"{key}: the environment variable {name} is not set{fault}; set it, or write the path without it"
            )
        if _VARIABLE.search(value):
            raise ConfigError(f"{key}: the environment variable {name} refers to another variable; write the path out")
        return value

    expanded = os.path.expanduser(_VARIABLE.sub(value_of, text))
    if str(Path(expanded)).startswith("~"):  # pathlib makes ~x of ./~x, which some libraries expand later
        fault = f"{expanded[:80]!r} begins with ~, but that is not a user's home"
        raise ConfigError(f"{key}: {fault}; write the path from / on")
    if expanded != text:
        check_value(expanded, str, key)
    return expanded


def expand_spec(spec: str, key: str) -> str:
    """Return an entry of `rollout.tools` or `rollout.environments` with the paths in it expanded.

    These are FILE of `mcp:FILE`, FOLDER of `harbor:FOLDER`, and in `program:COMMAND` the words without quotation marks
    and backslashes, as in a shell.
    """
    prefix, colon, rest = spec.partition(":")
    if prefix in _FILE_SPECS:
        return f"{prefix}{colon}{expand(rest, key)}"
    if prefix != "program":
        return spec
    try:
        has_words = bool(shlex.split(rest))
    except ValueError:  # unbalanced quotation marks, which the loader reports
        return spec

    def expand_word(match: re.Match[str]) -> str:
        word = match[0]
        is_path = not re.search(r"""['"\\]""", word) and (word.startswith("~") or "$" in word)
        return shlex.quote(expand(word, key)) if is_path else word

    return f"{prefix}{colon}{_WORD.sub(expand_word, rest)}" if has_words else spec


_Section = TypeVar("_Section")


def expand_config_paths(section: _Section, prefix: str = "") -> _Section:
    """Return the configuration, a dataclass of sections, with every path in it expanded. Raises ConfigError."""
    changes: dict[str, Any] = {}
    for name, kind in field_types(type(section)).items():
        key, value = prefix + name, getattr(section, name)
        if dataclasses.is_dataclass(value):
            changes[name] = expand_config_paths(value, f"{key}.")
        elif key in ("rollout.tools", "rollout.environments"):
            changes[name] = _map_strings(expand_spec, value, key)
        elif is_path_type(kind):
            changes[name] = _map_strings(expand, value, key)
        elif isinstance(value, dict):
            changes[name] = _expand_mapping(value, key)
    return dataclasses.replace(section, **changes)  # type: ignore[type-var]


def _expand_mapping(mapping: dict[str, Any], key: str) -> dict[str, Any]:
    """Expand paths in a pass-through mapping: keys named like paths, and `roles.<role>.model`."""

    expanded = {}
    for name, value in mapping.items():
        where = f"{key}.{name}"
        if isinstance(value, dict):
            value = _expand_mapping(value, where)
        elif _PATH_NAME.fullmatch(str(name)) or re.fullmatch(r"roles\.[^.]+\.model", where):
            value = _map_strings(expand, value, where)
        expanded[name] = value
    return expanded


def _map_strings(function: Callable[[str, str], str], value: Any, key: str) -> Any:
    """Apply the function to a string or to each item of a list; leave other types to validation."""
    if isinstance(value, str):
        return function(value, key)
    if isinstance(value, list | tuple):
        return type(value)(_map_strings(function, item, f"{key}[{index}]") for index, item in enumerate(value))
    return value


def is_hub_name(path: str) -> bool:
    """True if `path` looks like a name on the Hugging Face Hub, such as `Qwen/Qwen3-30B-A3B`, and does not exist."""
    return bool(_HUB_NAME.fullmatch(path)) and not Path(path).exists()


def find_model_folder(path: str) -> str:
    """Return the folder of a model in the Hub's cache (`HF_HOME`), or `path` itself if it is not there.

    Never downloads: every rank of a job would, and nodes may have no network.
    """
    if not is_hub_name(path):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return path


def substitute_env(text: str, where: str) -> str:
    """Return text of another program's file (MCP clients, Harbor) with each `${NAME}` and `${NAME:-default}` replaced.

    Raises ConfigError, prefixed with `where`, for an unset variable: processes of environments only see the variables
    listed in `rollout.pass_env`.
    """

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        if name not in os.environ and default is None:
            raise ConfigError(f"{where}: ${{{name}}} is not set; name it in rollout.pass_env and set it for the run")
        return os.environ.get(name, default or "")

    return _PLACEHOLDER.sub(value, text)
