"""The tools that come with MegaRL, by their specs."""

from __future__ import annotations

from megarl.environments.tools import Tool
from megarl.rollout.calculator import calculate

calculator = Tool(
    schema={
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
    },
    function=calculate,
)
