from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_checkpoints_are_whole_or_not_there(tmp_path: Path, run_ranks: Callable[..., list[dict[str, Any]]]) -> None:
    results = run_ranks(2, "tests/checkpoint/ranks_store.py", str(tmp_path))
    for facts in results:
        assert facts["found_before"] is False
        assert facts["kept"] == ["step_000002", "step_000003"]
        assert facts["latest"] == "step_000003"
        assert facts["rng_equal"] is True
        assert facts["host"] == {"step": 4}
        assert "No space left on device" in facts["error"] and "earlier" in facts["error"]
        assert facts["after_flip"] == "step_000003"
        assert facts["after_loss"] is False
