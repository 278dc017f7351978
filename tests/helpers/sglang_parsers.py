"""SGLang's parsers of tool calls without an engine: a program, since a test should not import SGLang.

stdin: JSON list of [parser, text, schemas]; the last line of stdout: as many answers to the guarded texts, as
`Client.parse_tool_calls` returns them, and the marker of each parser that was asked for.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

from megarl.engine.engine_server import find_tool_call_marker
from megarl.engine.tool_calls import escape_text


def answer(parser: str, text: str, schemas: list[dict[str, Any]]) -> Any:
    guarded = escape_text(text, schemas, parser, markers[parser])
    try:
        result = FunctionCallParser([Tool(**schema) for schema in guarded.schemas], parser).parse_non_stream(
            guarded.text
        )
    except Exception:  # the engine answers with status 500 then
        return None
    return result[0], [call.model_dump() for call in result[1]]


if __name__ == "__main__":
    orders = json.load(sys.stdin)
    markers = {name: find_tool_call_marker(name) for name in {order[0] for order in orders}}
    print(json.dumps({"answers": [answer(*order) for order in orders], "markers": markers}))
