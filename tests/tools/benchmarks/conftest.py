"""Tests of tools/benchmarks import it as `bench.py` does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools"))
