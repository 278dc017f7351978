"""Rewards on several ranks: slow ones are waited for, and what one rank finds wrong is said by all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_ranks_wait_for_the_slowest_and_fail_together(run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    first, second = run_ranks(2, "tests/workers/ranks_reward.py", timeout=120.0)
    assert first == second
    assert first["slow"] == [1.0, 1.0, 0.0, 1.0]  # the third was aborted
    assert "function hangs on the sample 'p3' took longer than reward.timeout=0.3 s" in first["hangs"]
    assert "function leaves on the sample 'p0' raised SystemExit: 0" in first["leaves"]
