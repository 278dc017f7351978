"""Agents that say which process they are in, and how often they were asked there."""

import os
from typing import Any

asked = {"times": 0}


async def fresh(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    asked["times"] += 1
    assert row.get("how") != "raises"
    return {"reward": asked["times"], "parts": {"process": os.getpid()}}


async def kept(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    return await fresh(row, base_url, api_key)


kept.kept = True  # type: ignore[attr-defined]
