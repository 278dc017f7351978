"""An agent that says which process it is in, and how often it was asked there."""

import os
from typing import Any

asked = {"times": 0}


async def counting(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    asked["times"] += 1
    assert row.get("how") != "raises"
    return {"reward": asked["times"], "parts": {"process": os.getpid()}}
