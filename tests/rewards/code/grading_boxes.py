"""The boxes that tests of grading run in: plain processes, and the sandbox where this machine has one."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError, SandboxConfig
from megarl.rewards.code import GradeResult, Grading, grade, parse_problem
from megarl.sandbox.box import Sandbox

sys.path.insert(0, str(Path(__file__).parent))
from plain_boxes import PlainBoxes  # noqa: E402

KINDS = ("plain", "bubblewrap")
QUICK = Grading(seconds=3.0, total_seconds=12.0)


def graded(kind: str, code: str, truth: Any, how: Grading = QUICK) -> GradeResult:
    """In a box of this kind; the test is skipped where there can be none."""
    return run(kind, lambda box: grade(code, parse_problem(truth), box, how))


def run(kind: str, work: Any) -> Any:
    async def inside() -> Any:
        if kind == "plain":
            return await work(PlainBoxes())
        box = Sandbox(SandboxConfig())
        try:
            await box.probe()
        except ConfigError as error:
            pytest.skip(f"this machine has no sandbox: {error}")
        try:
            return await work(box)
        finally:
            await box.close()

    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("this machine has no bubblewrap")
    return asyncio.run(inside())
