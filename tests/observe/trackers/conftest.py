"""Tracker packages may be installed in the folder that MEGARL_TRACKERS names, as in .ci/run."""

from __future__ import annotations

import os
import sys

import pytest


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    if folder := os.environ.get("MEGARL_TRACKERS"):
        monkeypatch.setattr(sys, "path", [*sys.path, folder])  # last: the pinned packages come first
