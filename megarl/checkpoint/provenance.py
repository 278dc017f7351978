"""What a checkpoint was written by: the configuration and the program, as short hashes that tell others apart."""

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
"""Of a hash in hexadecimal."""
GIT_TIMEOUT_S = 20.0
"""For git, on however slow a file system."""
GIT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "HOME", "XDG_CONFIG_HOME")
"""Of the environment, which may have keys: what git has a use for. With GIT_DIR it would look elsewhere."""


def collect_provenance(config: Config) -> dict[str, str]:
    """What goes into a manifest. For one rank: it starts git, or reads all sources."""
    return {"config": config_hash(config), "code": code_revision()}


def describe_changes(written: Mapping[str, object], now: Mapping[str, str]) -> list[str]:
    """In words, what is another now than when a manifest was written; of one that does not say nothing is said."""
    names = {"code": "by other code", "config": "under another configuration"}
    return [
        f"{words} ({written[name]}, now {now[name]})"
        for name, words in names.items()
        if name in written and name in now and written[name] != now[name]
    ]


def config_hash(config: Config) -> str:
    """Of all keys but those that say where and whether to go on, and what is recorded besides."""
    tree = to_dict(config)
    tree.pop("track", None)
    tree["run"] = {name: value for name, value in tree["run"].items() if name not in ("dir", "resume")}
    return hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()[:HASH_LENGTH]


def code_revision(sources: Path = SOURCES) -> str:
    """git's commit, and behind a plus the hash of the sources where they are not those of the commit; without git, that
    hash alone. What a fork keeps in another repository is not in it."""
    commit = _run_git(sources, "rev-parse", "HEAD")
    changed = _run_git(sources, "status", "--porcelain", "--", ".")
    tracked = _run_git(sources, "ls-files", "--error-unmatch", "__init__.py")
    if commit is None or changed is None or tracked is None:
        return f"sources-{_hash_sources(sources)}"
    return commit[:HASH_LENGTH] + (f"+{_hash_sources(sources)}" if changed else "")


def _run_git(folder: Path, *arguments: str) -> str | None:
    """What git says of a folder, None where there is none that does."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    needed = {name: os.environ[name] for name in GIT_VARIABLES if name in os.environ}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=GIT_TIMEOUT_S, env=needed
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _hash_sources(sources: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(sources.rglob("*.py")):
        digest.update(f"{file.relative_to(sources)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:HASH_LENGTH]
