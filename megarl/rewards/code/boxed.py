"""Source that is run in a box: modules of this folder that go with it, and what is done with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_HERE = __name__.rpartition(".")[0]


@cache
def embed_modules(*names: str) -> str:
    """Python that makes these modules of this folder importable, by the names that they have here."""
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
    """An expression that is the module, whatever has been done to names meanwhile."""
    return f"__import__('sys').modules[{f'{_HERE}.{name}'!r}]"


def embed_data(value: Mapping[str, Any]) -> str:
    """An expression that is the value: JSON in a text of Python, ASCII whatever characters are in it."""
    return f"__import__('json').loads({json.dumps(value)!r})"
