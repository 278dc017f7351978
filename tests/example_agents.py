"""Agents as users write them: they use an OpenAI client, and nothing of MegaRL but one tool."""

from __future__ import annotations

import asyncio
import json
import math
import os
from typing import Any

from openai import AsyncOpenAI

from megarl.environments.ready.calculator import calculate

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


async def calculating(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Run the policy with a calculator; return 1 if its answer ends with the right result."""
    messages = list(row["prompt"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(4):
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return float((message.content or "").strip().rstrip(".").endswith(f" {row['ground_truth']}"))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": run_calculator(call.function.arguments)}
                for call in message.tool_calls
            ]
    return 0.0


def run_calculator(arguments: str) -> str:
    try:
        return str(calculate(**json.loads(arguments)))
    except Exception as error:
        return f"Error: {error}"


async def branching(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Send three requests, the last without the earlier messages: an episode of two branches."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def ask(*messages: dict[str, Any]) -> str:
            completion = await client.chat.completions.create(model="policy", messages=messages)
            return completion.choices[0].message.content or ""

        first = await ask(*row["prompt"])
        conversation = [{"role": "assistant", "content": first}, {"role": "user", "content": "Sure?"}]
        second = await ask(*row["prompt"], *conversation)
        third = await ask({"role": "user", "content": "Shortly, what was it?"})
    return {"reward": len({first, second, third}) / 4, "parts": {"said": 3.0}}


async def odd(row: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Misbehave as the row's ground truth says."""
    behavior = row["ground_truth"]
    if behavior == "asks nothing":
        return 1.0
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        await client.chat.completions.create(model="policy", messages=row["prompt"])
    if behavior == "raises":
        raise ValueError("it is odd")
    if behavior == "leaves":
        os._exit(3)
    if behavior == "hangs":
        await asyncio.sleep(3600)
    return {"nothing": None, "text": "well done", "nan": math.nan, "fine": 0.5}[behavior]
