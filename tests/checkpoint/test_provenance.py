"""What tells configurations and programs apart in a manifest."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megarl.checkpoint.provenance import code_revision, config_hash, describe_changes
from megarl.config import from_dict

pytestmark = pytest.mark.alone


def test_a_configuration_is_known_by_the_keys_that_matter() -> None:
    first = config_hash(from_dict({"run": {"dir": "a"}}))
    assert first == config_hash(from_dict({"run": {"dir": "b", "resume": "auto"}, "track": {"save_rollouts": False}}))
    others = [{"run": {"seed": 2}}, {"parallel": {"tp": 2}}, {"data": {"train": ["a.jsonl"]}}]
    assert len({first, *(config_hash(from_dict(tree)) for tree in others)}) == 4
    assert len(first) == 16 and int(first, 16) >= 0


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git on this machine")


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ("git", *who, "-C", str(folder), *arguments), check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "tree/program"
    (folder / "part").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "part/work.py").write_text("1")
    return folder


def test_without_git_code_is_known_by_its_sources(sources: Path) -> None:
    first = code_revision(sources)
    assert first.startswith("sources-") and first == code_revision(sources)
    (sources / "notes.txt").write_text("no code")
    assert code_revision(sources) == first
    (sources / "part/work.py").write_text("2")
    second = code_revision(sources)
    (sources / "part/work.py").rename(sources / "part/other.py")
    assert len({first, second, code_revision(sources)}) == 3


@needs_git
def test_with_git_by_the_commit_and_what_differs_from_it(sources: Path) -> None:
    git(sources.parent, "init")
    assert code_revision(sources).startswith("sources-")  # no commit yet
    git(sources.parent, "add", ".")
    git(sources.parent, "commit", "-m", "first")
    commit = git(sources.parent, "rev-parse", "HEAD")[:16]
    assert code_revision(sources) == commit
    (sources.parent / "results.txt").write_text("not the program's")
    assert code_revision(sources) == commit
    (sources / "part/work.py").write_text("2")
    changed = code_revision(sources)
    assert changed.startswith(f"{commit}+") and len(changed) == 33
    (sources / "part/work.py").write_text("3")
    assert code_revision(sources).startswith(f"{commit}+") and code_revision(sources) != changed


@needs_git
def test_git_is_given_no_keys_and_looks_nowhere_else(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(sources.parent, "init")
    git(sources.parent, "add", ".")
    git(sources.parent, "commit", "-m", "first")
    known = code_revision(sources)
    (tmp_path / "git").write_text(f'#!/bin/sh\nenv >> {tmp_path}/said\nPATH={os.environ["PATH"]} exec git "$@"\n')
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("HF_TOKEN", "hf_MARKED")
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert code_revision(sources) == known and not known.startswith("sources-")
    said = (tmp_path / "said").read_text()
    assert "PATH=" in said and "MARKED" not in said and "GIT_DIR" not in said


@needs_git
def test_sources_that_lie_in_a_repository_which_does_not_have_them_are_known_by_themselves(sources: Path) -> None:
    """An installation in an environment that lies in somebody's project."""
    (sources.parent / "readme").write_text("")
    git(sources.parent, "init")
    git(sources.parent, "add", "readme")
    git(sources.parent, "commit", "-m", "first")
    assert code_revision(sources).startswith("sources-")


def test_what_differs_is_said_and_what_an_older_manifest_lacks_is_not() -> None:
    now = {"config": "c1", "code": "r1"}
    assert describe_changes({"step": 1, **now}, now) == [] == describe_changes({"step": 1}, now)
    assert describe_changes({"config": "c0", "code": "r1"}, now) == ["under another configuration (c0, now c1)"]
    assert describe_changes({"config": "c0", "code": "r0"}, now) == [
        "by other code (r0, now r1)",
        "under another configuration (c0, now c1)",
    ]
