"""An agent that reports its process and the number of its calls there."""

import os
from typing import Any

calls = {"count": 0}


async def counting(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    calls["count"] += 1
    assert row.get("how") != "raises"
    return {"reward": calls["count"], "parts": {"process": os.getpid()}}
