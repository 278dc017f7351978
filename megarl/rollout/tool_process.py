"""Runs tools for a rank, one call at a time: `python -m megarl.rollout.tool_process PARENT SPEC ...`.

Two processes: this one watches over the one that it forks, in which the tools are. As subreaper it inherits whatever a
tool leaves behind, daemons with a session of their own included; when the worker ends, when SIGTERM comes, or when the
rank dies, which the kernel tells it by SIGTERM, all of that is killed before this process is gone.

The worker loads the tools {"loading": spec}, and says {"tools": [{"spec", "schema"}]} or {"error"}. stdin: a line of
JSON {"spec", "arguments", "limit"} per call; each is answered with a line {"ok", "text"}, and {"trace", "kind"} where
the tool raised, on what was stdout at the start. Afterwards stdout is stderr, so that a tool that prints does not
garble the answers. Imports the tools' modules and nothing heavy.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from typing import IO, Any

from megarl.config import ConfigError
from megarl.data.text import media
from megarl.rollout.engine_host import die_with_parent
from megarl.rollout.tools import Tool, load_tool, worded

_PR_SET_CHILD_SUBREAPER = 36
_TRACE = 6000
"""Characters of a traceback that go into the log."""


def as_text(value: Any) -> str:
    """What a tool returned, for the policy. Raises TypeError or ValueError for what JSON cannot hold."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("the tool returned bytes; it must return text, or what JSON can hold")
    if kind := media(value):
        raise TypeError(
            f"the tool returned a part of type {kind!r}; only text can be read here, it must say it in words"
        )
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def run(tool: Tool, arguments: dict[str, Any], limit: int) -> dict[str, Any]:
    """{"ok", "text"} of one call, its text cut to `limit` characters; of one that raised, "trace" and "kind", too."""
    answer: dict[str, Any] = {}
    try:
        ok, text = True, as_text(tool.function(**arguments))
    except BaseException as error:  # noqa: B036  SystemExit and the like must not end the process in silence
        ok, text = False, f"Error: {worded(error, named=False)}"
        place = traceback.extract_tb(error.__traceback__)[-1]
        answer["kind"] = f"{type(error).__name__} at {place.filename}:{place.lineno}"
        answer["trace"] = "".join(traceback.format_exception(error))[-_TRACE:]
    if len(text) > limit:
        text = f"{text[:limit]} ... ({len(text) - limit} characters cut)"
    return {**answer, "ok": ok, "text": text}


def serve(specs: list[str]) -> None:
    """Load the tools and run calls until nobody sends one any more."""
    answers, orders = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1, errors="backslashreplace")
    home = os.getcwd()
    try:
        tools = {spec: _loaded(spec, answers) for spec in specs}
    except ConfigError as error:
        _say(answers, {"error": str(error)})
        return
    _say(answers, {"tools": [{"spec": spec, "schema": tool.schema} for spec, tool in tools.items()]})
    for line in orders:
        order = json.loads(line)
        _say(answers, run(tools[order["spec"]], order["arguments"], order["limit"]))
        with contextlib.suppress(OSError):  # a tool may have gone elsewhere
            os.chdir(home)


def _loaded(spec: str, answers: IO[str]) -> Tool:
    _say(answers, {"loading": spec})
    return load_tool(spec)


def _say(answers: IO[str], what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def _end_all(seconds: float) -> None:
    """Kill the children, and theirs as they arrive here, until none is left or time is up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with open(f"/proc/self/task/{os.getpid()}/children") as listing:
            children = [int(pid) for pid in listing.read().split()]
        if not children:
            return
        for pid in children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def main(parent: int, specs: list[str]) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    die_with_parent(parent, signal.SIGTERM)
    own, code = os.getpid(), 143
    worker = os.fork()
    if worker == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent(own)
            serve(specs)
        except BaseException:  # noqa: B036  of our own making, or a tool has closed the files
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for file in range(3):  # so that the rank sees the worker's end in them
            os.dup2(nowhere, file)
        while True:
            pid, status = os.wait()
            if pid == worker:
                code = os.waitstatus_to_exitcode(status)
                break
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_all(5.0)
        os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
