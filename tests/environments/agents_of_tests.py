"""Agents as users write them: they know an OpenAI client, and nothing of MegaRL but one tool."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from megarl.rollout.calculator import calculate

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
    """Lets the policy calculate; 1 for a statement of the right result."""
    messages = list(row["prompt"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(4):
            completion = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            said = completion.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return float((said.content or "").strip().rstrip(".").endswith(f" {row['ground_truth']}"))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": observed(call.function.arguments)}
                for call in said.tool_calls
            ]
    return 0.0


def observed(arguments: str) -> str:
    try:
        return str(calculate(**json.loads(arguments)))
    except Exception as error:
        return f"Error: {error}"
