"""One process for all checks that need Megatron but no second rank: `ranks_units.py`, run once for this folder.

Megatron is never imported into pytest's own process, because the CPU shim patches torch for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def units(run_ranks: Callable[..., list[dict[str, Any]]]) -> dict[str, Any]:
    return run_ranks(1, "tests/megatron/ranks_units.py")[0]
