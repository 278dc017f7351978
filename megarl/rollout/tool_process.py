"""Runs tools for a rank, one call at a time: `python -m megarl.rollout.tool_process PARENT`.

stdin: a line of JSON {"spec", "arguments", "limit"} per call. Writes an empty line when it is up, and answers with a
line {"ok", "text"}, on what was stdout at the start; afterwards stdout leads nowhere, so that a tool that prints does
not garble the answers. Imports the tool's module and nothing heavy.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from megarl.rollout.engine_host import die_with_parent
from megarl.rollout.tools import Tool, load_tool


def run(tool: Tool, arguments: dict[str, Any], limit: int) -> dict[str, Any]:
    """{"ok", "text"} of one call, its text cut to `limit` characters."""
    try:
        value = tool.function(**arguments)
        ok, text = True, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except BaseException as error:  # noqa: B036  SystemExit and the like must not end the process in silence
        ok, text = False, f"Error: {error}" if str(error) else f"Error: {type(error).__name__}"
    if len(text) > limit:
        text = f"{text[:limit]} ... ({len(text) - limit} characters cut)"
    return {"ok": ok, "text": text}


def main(parent: int) -> None:
    die_with_parent(parent)
    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    orders = os.fdopen(os.dup(0))
    os.dup2(nowhere, 0)
    print(file=answers, flush=True)
    loaded: dict[str, Tool] = {}
    for line in orders:
        order = json.loads(line)
        if order["spec"] not in loaded:
            loaded[order["spec"]] = load_tool(order["spec"])
        answers.write(json.dumps(run(loaded[order["spec"]], order["arguments"], order["limit"])) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
