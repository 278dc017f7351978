"""The configuration of all engines in tests. Separate because the import of transformers takes five seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config import Config, from_dict


def make_config(model: Path, run: Path, **rollout: Any) -> Config:
    return from_dict(
        {
            "run": {"dir": str(run)},
            "model": {"path": str(model), "dtype": "float32"},
            "rollout": {
                "max_context": 256,
                "max_new_tokens": 12,
                "concurrency": 16,
                "start_timeout": 600,
                "tools": ["megarl.environments.ready.calculator:calculator"],
                **rollout,
            },
        }
    )
