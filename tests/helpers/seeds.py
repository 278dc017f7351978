"""Random cases, of which the default run takes a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def split_seeds(seeds: Sequence[int], default: int) -> list[Any]:
    """Return values for `parametrize`: the default run takes the first `default` seeds, the nightly one the rest."""
    return [*seeds[:default], *(pytest.param(seed, marks=pytest.mark.nightly) for seed in seeds[default:])]
