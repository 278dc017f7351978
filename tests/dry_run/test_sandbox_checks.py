"""The dry run's check of the sandbox."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sandbox"))

from sync_sandbox import needs_bubblewrap  # noqa: E402

from megarl.config import ConfigError, from_dict  # noqa: E402
from megarl.controllers.controller import load_requirements  # noqa: E402
from megarl.dry_run.validation import check_sandbox  # noqa: E402
from megarl.sandbox import runner_client  # noqa: E402
from megarl.sandbox.box import probe  # noqa: E402

CODE = {"reward": {"functions": ["megarl.rewards.code:hidden_tests"]}}
PYTHON = {"rollout": {"environments": ["megarl.environments.ready.python:Python"]}}


def sandbox_warnings(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, dry_run: bool = False) -> list[str]:
    monkeypatch.setenv("MEGARL_SANDBOX", "{}")  # restored after the test
    probe.cache_clear()
    config = from_dict(tree)
    warnings: list[str] = []
    check_sandbox(config, load_requirements(config), warnings, dry_run)
    assert json.loads(os.environ["MEGARL_SANDBOX"])["backend"] == config.sandbox.backend
    return warnings


@needs_bubblewrap
@pytest.mark.parametrize("tree", [CODE, PYTHON], ids=["reward", "environment"])
def test_sandbox_is_probed_when_needed(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandbox_warnings(tree, monkeypatch) == []


@pytest.mark.parametrize("tree", [CODE, PYTHON], ids=["reward", "environment"])
def test_missing_sandbox_raises(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_client.shutil, "which", lambda name, path="": None)
    with pytest.raises(ConfigError, match="runs code that the policy writes: .*bubblewrap"):
        sandbox_warnings(tree, monkeypatch)


def test_dry_run_warns_of_a_missing_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are also made on other machines."""
    monkeypatch.setattr(runner_client.shutil, "which", lambda name, path="": None)
    (line,) = sandbox_warnings(PYTHON, monkeypatch, dry_run=True)
    assert "the run would be rejected here: megarl.environments.ready.python:Python runs code" in line


def test_sandbox_is_not_probed_when_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_client.shutil, "which", lambda name, path="": None)
    assert sandbox_warnings({"reward": {"functions": ["megarl.rewards.gsm8k:gsm8k"]}}, monkeypatch) == []


def test_warns_of_disabled_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "protect" in sandbox_warnings({**CODE, "sandbox": {"backend": "none"}}, monkeypatch)[0]
