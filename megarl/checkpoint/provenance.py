"""Provenance of a checkpoint: short hashes of the configuration and the program that wrote it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from megarl.config import Config, to_dict

SOURCES = Path(__file__).resolve().parents[1]
HASH_LENGTH = 16
"""Length of a hash in hexadecimal digits."""
GIT_TIMEOUT_S = 20.0
"""Timeout of git, generous for slow file systems."""
GIT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "HOME", "XDG_CONFIG_HOME")
"""Environment variables passed to git. Others may hold secrets, and GIT_DIR would redirect it."""


def describe_changes(written: Mapping[str, object], current: Mapping[str, str]) -> list[str]:
    """Describe what differs from the program that wrote a manifest; entries that it lacks are skipped."""
    names = {"code": "by other code", "config": "under another configuration"}
    return [
        f"{description} ({written[name]}, now {current[name]})"
        for name, description in names.items()
        if name in written and name in current and written[name] != current[name]
    ]


def config_hash(config: Config) -> str:
    """Hash all keys except run.dir, run.resume and the section track."""
    tree = to_dict(config)
    tree.pop("track", None)
    tree["run"] = {name: value for name, value in tree["run"].items() if name not in ("dir", "resume")}
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()[:HASH_LENGTH]


def code_revision(sources: Path = SOURCES) -> str:
    """Return git's commit, with `+` and a hash of the sources if they differ from it; without git that hash alone.

    Sources of a fork in another repository are not included. Call on one rank: it runs git, or reads all sources.
    """
    commit = _run_git(sources, "rev-parse", "HEAD")
    changed = _run_git(sources, "status", "--porcelain", "--", ".")
    tracked = _run_git(sources, "ls-files", "--error-unmatch", "__init__.py")
    if commit is None or changed is None or tracked is None:
        return f"sources-{_hash_sources(sources)}"
    return commit[:HASH_LENGTH] + (f"+{_hash_sources(sources)}" if changed else "")


def _run_git(folder: Path, *arguments: str) -> str | None:
    """Return git's output for a folder, or None if git fails."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    needed = {name: os.environ[name] for name in GIT_VARIABLES if name in os.environ}
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=GIT_TIMEOUT_S, env=needed
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return process.stdout.strip() if process.returncode == 0 else None


def _hash_sources(sources: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(sources.rglob("*.py")):
        digest.update(f"{file.relative_to(sources)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:HASH_LENGTH]
