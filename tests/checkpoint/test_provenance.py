"""Checkpoints record which configuration and code wrote them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megarl.checkpoint.provenance import code_revision, config_hash, describe_changes
from megarl.config import from_dict

pytestmark = pytest.mark.alone


def test_config_hash_ignores_run_folder_and_logging() -> None:
    first = config_hash(from_dict({"run": {"dir": "a"}}))
    assert first == config_hash(from_dict({"run": {"dir": "b", "resume": "auto"}, "track": {"save_rollouts": False}}))
    changes = [{"run": {"seed": 2}}, {"parallel": {"tp": 2}}, {"data": {"train": ["a.jsonl"]}}]
    assert len({first, *(config_hash(from_dict(tree)) for tree in changes)}) == 4
    assert len(first) == 16 and int(first, 16) >= 0


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git on this machine")


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ("git", *identity, "-C", str(folder), *arguments), check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "tree/program"
    (folder / "part").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "part/work.py").write_text("1")
    return folder


def test_code_revision_hashes_sources_without_git(sources: Path) -> None:
    first = code_revision(sources)
    assert first.startswith("sources-") and first == code_revision(sources)
    (sources / "notes.txt").write_text("no code")
    assert code_revision(sources) == first
    (sources / "part/work.py").write_text("2")
    second = code_revision(sources)
    (sources / "part/work.py").rename(sources / "part/other.py")
    assert len({first, second, code_revision(sources)}) == 3


@needs_git
def test_code_revision_is_commit_and_hash_of_changes(sources: Path) -> None:
    git(sources.parent, "init")
    assert code_revision(sources).startswith("sources-")  # no commit yet
    git(sources.parent, "add", ".")
    git(sources.parent, "commit", "-m", "first")
    commit = git(sources.parent, "rev-parse", "HEAD")[:16]
    assert code_revision(sources) == commit
    (sources.parent / "results.txt").write_text("not source code")
    assert code_revision(sources) == commit
    (sources / "part/work.py").write_text("2")
    changed = code_revision(sources)
    assert changed.startswith(f"{commit}+") and len(changed) == 33
    (sources / "part/work.py").write_text("3")
    assert code_revision(sources).startswith(f"{commit}+") and code_revision(sources) != changed


@needs_git
def test_git_runs_without_secrets_and_git_dir(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(sources.parent, "init")
    git(sources.parent, "add", ".")
    git(sources.parent, "commit", "-m", "first")
    revision = code_revision(sources)
    (tmp_path / "git").write_text(
        f'#!/bin/sh\nenv >> {tmp_path}/environment\nPATH={os.environ["PATH"]} exec git "$@"\n'
    )
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("HF_TOKEN", "hf_MARKED")
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert code_revision(sources) == revision and not revision.startswith("sources-")
    environment = (tmp_path / "environment").read_text()
    assert "PATH=" in environment and "MARKED" not in environment and "GIT_DIR" not in environment


@needs_git
def test_code_revision_hashes_sources_that_git_does_not_track(sources: Path) -> None:
    """As with a package installed in an environment inside another project's repository."""
    (sources.parent / "readme").write_text("")
    git(sources.parent, "init")
    git(sources.parent, "add", "readme")
    git(sources.parent, "commit", "-m", "first")
    assert code_revision(sources).startswith("sources-")


def test_describe_changes_ignores_fields_an_old_manifest_lacks() -> None:
    current = {"config": "c1", "code": "r1"}
    assert describe_changes({"step": 1, **current}, current) == [] == describe_changes({"step": 1}, current)
    assert describe_changes({"config": "c0", "code": "r1"}, current) == ["under another configuration (c0, now c1)"]
    assert describe_changes({"config": "c0", "code": "r0"}, current) == [
        "by other code (r0, now r1)",
        "under another configuration (c0, now c1)",
    ]
