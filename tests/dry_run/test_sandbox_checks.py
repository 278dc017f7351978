"""The sandbox of a run, before anything starts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sandbox"))

from real_boxes import needs_boxes  # noqa: E402

from megarl.config import ConfigError, from_dict  # noqa: E402
from megarl.controllers.controller import load_requirements  # noqa: E402
from megarl.dry_run.validation import check_sandbox  # noqa: E402
from megarl.sandbox import runner_client  # noqa: E402
from megarl.sandbox.box import probe  # noqa: E402

CODE = {"reward": {"functions": ["megarl.rewards.code:hidden_tests"]}}
PYTHON = {"rollout": {"environments": ["megarl.environments.ready.python:Python"]}}


def looked(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("MEGARL_SANDBOX", "{}")  # so that it is as before afterwards
    probe.cache_clear()
    config = from_dict(tree)
    warnings: list[str] = []
    check_sandbox(config, load_requirements(config), warnings)
    assert json.loads(os.environ["MEGARL_SANDBOX"])["backend"] == config.sandbox.backend
    return warnings


@needs_boxes
@pytest.mark.parametrize("tree", [CODE, PYTHON], ids=["a reward", "an environment"])
def test_it_is_looked_at_where_it_will_be_needed(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked(tree, monkeypatch) == []


@pytest.mark.parametrize("tree", [CODE, PYTHON], ids=["a reward", "an environment"])
def test_where_there_can_be_none_it_is_said_at_once(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_client.shutil, "which", lambda name, path="": None)
    with pytest.raises(ConfigError, match="runs code that the policy writes: .*bubblewrap"):
        looked(tree, monkeypatch)


def test_nobody_asks_for_one_that_nobody_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_client.shutil, "which", lambda name, path="": None)
    assert looked({"reward": {"functions": ["megarl.rewards.gsm8k:gsm8k"]}}, monkeypatch) == []


def test_one_that_protects_nothing_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "protect" in looked({**CODE, "sandbox": {"backend": "none"}}, monkeypatch)[0]
