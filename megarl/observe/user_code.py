"""The user's own modules of a run: copied into `<run>/code` and compared when the run is resumed.

They are the modules that the configuration names as `module:name`, what these import, and the script that builds the
flow. Nothing is imported to find them. Installed packages and MegaRL itself are left out: a checkpoint's manifest has
MegaRL's revision (`checkpoint/provenance.py`).
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megarl
from megarl.config import Config, ConfigError, to_dict

FOLDER = "code"
CHANGES = "changes.jsonl"
"""In FOLDER: {"step": 21, "file": "my_reward.py", "old": hash, "new": hash, "time": ...} for each file that changed."""
MAX_FILES = 500
MAX_COPY_BYTES = 1 << 20
"""Bytes of a file that is copied; larger ones are only compared."""
HASH_CHARS = 16
"""Of a SHA-256 in hexadecimal."""

_SPEC = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]")
_MEGARL = Path(megarl.__file__).resolve().parent
_INSTALLED = tuple(
    Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
)


def find(config: Config) -> dict[str, Path]:
    """Return the run's own source files by their names in FOLDER, such as `lab/sign.py` of the module `lab.sign`."""
    files: dict[str, Path] = {}
    waiting = [match[1] for text in _iter_strings(to_dict(config)) if (match := _SPEC.match(text))]
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script and _is_user_file(Path(script)):
        files[Path(script).name] = Path(script).resolve()
        waiting += _imported_names(Path(script), "")
    seen: set[str] = set()
    while waiting and len(files) < MAX_FILES:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        for name, file in _module_files(module):
            if file not in files.values():
                package = name if file.name == "__init__.py" else name.rpartition(".")[0]
                files[name.replace(".", "/") + ("/__init__.py" if name == package else ".py")] = file
                waiting += _imported_names(file, package)
    return files


def record(run_dir: Path, config: Config, step: int, resumes: bool) -> list[tuple[str, str | None, str | None]]:
    """Copy the files into FOLDER. Return (file, old hash, new hash) of each that changed, None where there was, or is,
    no such file, of a run that is resumed after step `step`; its old copy is then in FOLDER/until_step_N.

    Raises OSError where the folder cannot be written, ConfigError where it is somebody else's.
    """
    folder = run_dir / FOLDER
    files = find(config)
    new = {name: _hash(file) for name, file in files.items()}
    index = folder / "files.json"
    old = _read_index(index) if resumes else None
    changed = [] if old is None else sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if old is None and not files:
        return []
    if old is None:
        if folder.exists() and not index.is_file():
            raise ConfigError(f"run.dir={run_dir} has a {FOLDER} that is not of a run; set run.dir to a new folder")
        if not resumes:
            shutil.rmtree(folder, ignore_errors=True)  # left by a start that took no step
    elif not changed:
        return []
    for name in changed:
        if (folder / name).is_file():
            _move(folder / name, folder / f"until_step_{step:06d}" / name)
    for name, file in files.items():
        target = folder / name
        if file.stat().st_size <= MAX_COPY_BYTES:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    folder.mkdir(exist_ok=True)
    partial = index.with_suffix(".tmp")  # a start that is killed before the end leaves the index of before
    partial.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(index)
    if not changed:
        return []
    found = [(name, (old or {}).get(name), new.get(name)) for name in changed]
    with (folder / CHANGES).open("a", encoding="utf-8") as lines:
        for name, before, after in found:
            line = {"step": step + 1, "file": name, "old": before, "new": after, "time": time.time()}
            lines.write(json.dumps(line) + "\n")
    return found


def _iter_strings(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _iter_strings(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _iter_strings(value)


def _module_files(module: str) -> Iterator[tuple[str, Path]]:
    """The files of a module and of the packages that it is in, with their dotted names; none for what is not the
    user's, or cannot be found."""
    top, *below = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return
    if spec is None:
        return
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    file = Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    name = top
    while True:
        if file is not None:
            if not _is_user_file(file):
                return
            yield name, file.resolve()
        if not below:
            return
        part = below.pop(0)
        name = f"{name}.{part}"
        files = [path for folder in folders for path in (folder / part / "__init__.py", folder / f"{part}.py")]
        file = next(filter(Path.is_file, files), None)
        folders = [folder / part for folder in folders if (folder / part).is_dir()]


def _is_user_file(file: Path) -> bool:
    path = file.resolve()
    return path.is_file() and not any(place in path.parents for place in (_MEGARL, *_INSTALLED))


def _imported_names(file: Path, package: str) -> list[str]:
    """Dotted names of what a source file imports; `from a import b` names `a.b`, which may be a module."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if package else []
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names += [f"{base}.{alias.name}" if base else alias.name for alias in node.names if alias.name != "*"]
            names += [base] if base else []
    return names


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:HASH_CHARS]


def _read_index(index: Path) -> dict[str, str] | None:
    """The hashes of the last start by file; None where nothing of that form is there."""
    try:
        tree = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(tree, dict) and all(isinstance(text, str) for text in tree.values())
    return tree if is_ours and all(".." not in Path(name).parts for name in tree) else None


def _move(source: Path, target: Path) -> None:
    """A copy that is there already is of the steps that were taken: of a later start at the same step none was."""
    if target.exists():
        source.unlink()
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)
