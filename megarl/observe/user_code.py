"""Copy the user's own modules into `<run>/code` and compare them when the run is resumed.

These are the modules that the configuration names as `module:name`, what they import, and the script that builds the
flow. They are found without importing anything. Installed packages and MegaRL itself are excluded: a checkpoint's
manifest has MegaRL's revision (`checkpoint/provenance.py`).
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

import megarl
from megarl.config import Config, ConfigError, to_dict
from megarl.utils.text import write_atomically

FOLDER = "code"
CHANGES = "changes.jsonl"
"""In FOLDER; one line {"step": 21, "file": "my_reward.py", "old": hash, "new": hash, "time": ...} per changed file."""
MAX_FILES = 500
MAX_COPY_BYTES = 1 << 20
"""Larger files are compared but not copied."""
HASH_CHARS = 16
"""Length of the hexadecimal SHA-256 prefix."""

_SPEC = re.compile(r'(?<!\\)"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]')
"""A string `module:name` in JSON."""
_MEGARL = Path(megarl.__file__).resolve().parent
_INSTALLED = tuple(
    Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
)


def find(config: Config) -> dict[str, Path]:
    """Return the user's source files by their names in FOLDER, such as `lab/sign.py` for the module `lab.sign`."""
    files: dict[str, Path] = {}
    pending = _SPEC.findall(json.dumps(to_dict(config)))
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script and _is_user_file(Path(script)):
        files[Path(script).name] = Path(script).resolve()
        pending += _imported_names(Path(script), "")
    seen: set[str] = set()
    while pending and len(files) < MAX_FILES:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        for name, file in _module_files(module):
            if file not in files.values():
                package = name if file.name == "__init__.py" else name.rpartition(".")[0]
                files[name.replace(".", "/") + ("/__init__.py" if name == package else ".py")] = file
                pending += _imported_names(file, package)
    return files


def record(run_dir: Path, config: Config, step: int, is_resumed: bool) -> list[tuple[str, str | None, str | None]]:
    """Copy the user's files into FOLDER and return what changed since the last start.

    For a run resumed after step `step`, return (file, old hash, new hash) for each changed file, with None for a file
    that did not or no longer exists. Old copies are moved to FOLDER/until_step_N.

    Raises OSError if the folder cannot be written, and ConfigError if it was not created by a run.
    """
    folder, files = run_dir / FOLDER, find(config)
    index = folder / "files.json"
    new = {name: hashlib.sha256(file.read_bytes()).hexdigest()[:HASH_CHARS] for name, file in files.items()}
    old = _read_index(index) if is_resumed else None
    known = new if old is None else old  # a first start changes nothing
    changes = [
        (name, known.get(name), new.get(name))
        for name in sorted(known.keys() | new.keys())
        if known.get(name) != new.get(name)
    ]
    if not changes and (old is not None or not files):
        return []
    if old is None:
        if folder.exists() and not index.is_file():
            raise ConfigError(f"run.dir={run_dir} has a {FOLDER} that no run wrote; set run.dir to a new folder")
        if not is_resumed:
            shutil.rmtree(folder, ignore_errors=True)  # left by a start that completed no step
    for name, _, _ in changes:
        source, target = folder / name, folder / f"until_step_{step:06d}" / name
        # An existing target is the code of the steps taken so far; a later start at the same step has taken none.
        if target.exists():
            source.unlink(missing_ok=True)
        elif source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            source.replace(target)
    for name, file in files.items():
        target = folder / name
        if file.stat().st_size <= MAX_COPY_BYTES:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    folder.mkdir(exist_ok=True)
    write_atomically(index, json.dumps(new, indent=1, sort_keys=True) + "\n")
    for name, before, after in changes:
        line = {"step": step + 1, "file": name, "old": before, "new": after, "time": time.time()}
        with (folder / CHANGES).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
    return changes


def _module_files(module: str) -> Iterator[tuple[str, Path]]:
    """Yield (dotted name, file) of a module and its parent packages; nothing if not found or not the user's."""
    top, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return
    if spec is None:
        return
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    name, file = top, Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for part in (*parts, None):
        if file is not None:
            if not _is_user_file(file):
                return
            yield name, file.resolve()
        if part is not None:
            files = [path for folder in folders for path in (folder / part / "__init__.py", folder / f"{part}.py")]
            name, file = f"{name}.{part}", next(filter(Path.is_file, files), None)
            folders = [folder / part for folder in folders if (folder / part).is_dir()]


def _is_user_file(file: Path) -> bool:
    path = file.resolve()
    return path.is_file() and not any(folder in path.parents for folder in (_MEGARL, *_INSTALLED))


def _imported_names(file: Path, package: str) -> list[str]:
    """Return the dotted names that a source file imports; `from a import b` yields `a.b`, which may be a module."""
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
            parents = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            names += [f"{base}.{alias.name}" if base else alias.name for alias in node.names if alias.name != "*"]
            names += [base] if base else []
    return names


def _read_index(index: Path) -> dict[str, str] | None:
    """Return the file hashes of the last start; None if the index is missing or invalid."""
    try:
        tree = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(tree, dict) and all(isinstance(text, str) for text in tree.values())
    return tree if is_ours and all(".." not in Path(name).parts for name in tree) else None
