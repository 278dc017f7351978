"""Sandboxes for tests of grading: plain processes, and bubblewrap where this machine has it."""

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
from plain_sandbox import PlainSandbox  # noqa: E402

KINDS = ("plain", "bubblewrap")
QUICK = Grading(seconds=3.0, total_seconds=12.0)


def grade_code(kind: str, code: str, ground_truth: Any, grading: Grading = QUICK) -> GradeResult:
    """Grade in a sandbox of this kind, or skip the test if this machine has none."""
    return run_in_sandbox(kind, lambda box: grade(code, parse_problem(ground_truth), box, grading))


def run_in_sandbox(kind: str, work: Any) -> Any:
    async def run_work() -> Any:
        if kind == "plain":
            return await work(PlainSandbox())
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
    return asyncio.run(run_work())
