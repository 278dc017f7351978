"""Source code that runs in a box: embedded modules of this folder, and references to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_HERE = __name__.rpartition(".")[0]


@cache
def embed_modules(*names: str) -> str:
    """Return Python source that makes these modules of this folder importable under their full names."""
    parts = ["import json, sys, types"]
    for name in names:
        source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        full = f"{_HERE}.{name}"
        parts += [
            f"module = sys.modules[{full!r}] = types.ModuleType({full!r})",
            f"exec(compile({source!r}, {full!r}, 'exec'), module.__dict__)",
        ]
    return "\n".join(parts) + "\n"


def embed_module_ref(name: str) -> str:
    """Return an expression for the module that still works if the answer has rebound names."""
    return f"__import__('sys').modules[{f'{_HERE}.{name}'!r}]"


def embed_data(value: Mapping[str, Any]) -> str:
    """Return an expression for a value: JSON in a Python string literal, ASCII only."""
    return f"__import__('json').loads({json.dumps(value)!r})"
