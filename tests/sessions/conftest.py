"""What tests of the rollout loop have is used here, too: scripted policies, tiny models, engines."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "rollout"))
