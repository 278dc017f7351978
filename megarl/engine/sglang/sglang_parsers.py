"""SGLang's tool-call parsers without an engine: a process that imports nothing else of SGLang.

Each line of its stdin is JSON: [parser, text, schemas] is answered on stdout by a line with the result of
`EngineClient.parse_tool_calls`, [parser] by the parser's marker.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

_MAX_ANSWER_BYTES = 1 << 26


def find_tool_call_marker(parser: str) -> str:
    """Return the text by which SGLang's parser recognizes tool calls, or a section of them; empty if there is none."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    detector = FunctionCallParser(tools=[], tool_call_parser=parser).detector
    markers = (getattr(detector, name, "") for name in ("tool_call_start_token", "bot_token"))
    marker = next((str(candidate).strip() for candidate in markers if candidate), "")
    unmarked_texts = ("", '{"name": "f", "arguments": {}}', "[f(a=1)]")
    return "" if any(detector.has_tool_call(text) for text in unmarked_texts) else marker


class ParserProcess:
    """Stand-in for an `EngineClient`, as far as `check_parser` needs one. Raises RuntimeError if SGLang cannot be
    imported. python: an interpreter that can."""

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python

    async def __aenter__(self) -> ParserProcess:
        self._process = await asyncio.create_subprocess_exec(
            *(self._python, "-W", "ignore", "-m", "megarl.engine.sglang.sglang_parsers"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_ANSWER_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.communicate()

    async def find_marker(self, parser: str) -> str:
        return str(await self._call([parser]))

    async def parse_tool_calls(
        self, text: str, tools: Sequence[dict[str, Any]], parser: str
    ) -> tuple[str, list[Any]] | None:
        result = await self._call([parser, text, list(tools)])
        return None if result is None else (result[0], result[1])

    async def _call(self, request: list[Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            await self._process.stdin.drain()
        if not (line := await self._process.stdout.readline()):
            _, stderr = await self._process.communicate()
            raise RuntimeError(" ".join(stderr.decode(errors="replace").split())[-300:] or "its process ended")
        return json.loads(line)


def _run_parsers() -> None:
    """Answer the requests of a `ParserProcess`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang prints while it is imported
    # SGLang's top-level package imports the engine, which takes ten seconds and which the parsers do not need.
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("SGLang is not installed")
    package = types.ModuleType("sglang")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["sglang"] = package
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    def answer(parser: str, text: str | None = None, schemas: Sequence[dict[str, Any]] = ()) -> Any:
        if text is None:
            return find_tool_call_marker(parser)
        try:
            sglang_parser = FunctionCallParser([Tool(**schema) for schema in schemas], parser)
            normal_text, calls = sglang_parser.parse_non_stream(text)
        except Exception:  # the engine would answer with status 500
            return None
        return normal_text, [call.model_dump() for call in calls]

    for line in sys.stdin:
        answers.write(json.dumps(answer(*json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    _run_parsers()
