"""Run SGLang's tool-call parsers without an engine, as a program because a test should not import SGLang.

stdin: JSON list of [parser, text, schemas]. Last line of stdout: the answers to the escaped texts, as
`Client.parse_tool_calls` returns them, and the marker of each parser.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

from megarl.engine.sglang.sglang_parsers import find_tool_call_marker
from megarl.engine.tool_calls import escape_text


def parse(parser: str, text: str, schemas: list[dict[str, Any]]) -> Any:
    guarded = escape_text(text, schemas, parser, markers[parser])
    try:
        result = FunctionCallParser([Tool(**schema) for schema in guarded.schemas], parser).parse_non_stream(
            guarded.text
        )
    except Exception:  # an engine answers with status 500 here
        return None
    return result[0], [call.model_dump() for call in result[1]]


if __name__ == "__main__":
    requests = json.load(sys.stdin)
    markers = {name: find_tool_call_marker(name) for name in {request[0] for request in requests}}
    print(json.dumps({"answers": [parse(*request) for request in requests], "markers": markers}))
