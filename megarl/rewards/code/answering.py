"""In the box of the answer: runs it, or calls its functions, and says what came out. It knows no expected value.

What it says is only as good as the answer lets it be, which shares the interpreter with it: it is data, to be compared
by who knows the answers. Each test has a process of its own, forked behind the answer's imports, so that `sys.exit`,
`os._exit`, an endless loop or what one test has left behind is the matter of that test alone. Only the standard
library, and `plain.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from time import clock_gettime, monotonic
from types import ModuleType
from typing import Any

from megarl.rewards.code.plain import decode, encode

_NAME = "solution"
_CHUNK = 1 << 16
WALL_CLOCK_FACTOR = 4
"""Seconds on the clock for one of CPU, where others run beside it."""


def load(sources: list[str], before: str, behind: str) -> dict[str, Any]:
    """The names of an answer: of the first source that is Python, with what it is given. Raises whatever it does."""
    module = ModuleType(_NAME)
    sys.modules[_NAME] = module
    sys.setrecursionlimit(50_000)
    exec(compile(before, "<given>", "exec"), module.__dict__)
    exec(_compiled(sources), module.__dict__)
    exec(compile(behind, "<given>", "exec"), module.__dict__)
    return module.__dict__


def _compiled(sources: list[str]) -> Any:
    for number, source in enumerate(sources):
        try:
            return compile(source, "<answer>", "exec")
        except (SyntaxError, ValueError):
            if number == len(sources) - 1:
                raise
    raise ValueError("there is no source")


def call(names: Mapping[str, Any], request: Mapping[str, Any]) -> Any:
    """What a call gives, encoded. A method of `Solution` where there is such a class (as LeetCode has them)."""
    if "source" in request:
        value = eval(compile(request["source"], "<test>", "eval"), dict(names))
    else:
        name = request["name"]
        function = names[name] if name in names else getattr(names["Solution"](), name)
        value = function(*map(decode, request["args"]), **{key: decode(one) for key, one in request["kwargs"].items()})
    return encode(value)


def main(send: Callable[[int, Any], None], job: Mapping[str, Any]) -> None:
    """Run the tests one after the other, each for `seconds` of CPU, and send what came of each: {"value"}, {"raised"},
    {"out", "status"}, {"late"} or {"large"}. One that was late is the last."""
    out = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(out, number)
    try:
        names = load(job["sources"], job["before"], job["behind"]) if job["kind"] == "calls" else {}
        program = _compiled(job["sources"]) if job["kind"] == "programs" else None
    except BaseException:  # noqa: B036
        return
    for test in job["tests"]:
        work = partial(_call, names=names, test=test) if program is None else partial(_run, program, test["stdin"])
        found = _run_forked(work, job["seconds"], job["room"])
        if program is None and "out" in found:
            try:
                found = json.loads(found["out"])
            except ValueError:
                found = {"raised": "its process ended"}
        send(test["number"], found)
        if "late" in found:
            return


def reply(names: Mapping[str, Any], request: Mapping[str, Any]) -> str:
    """What came of a call, as a line."""
    try:
        return json.dumps({"value": call(names, request)})
    except BaseException as error:  # noqa: B036
        return json.dumps({"raised": type(error).__name__[:80]})


def _call(pipe: int, names: Mapping[str, Any], test: Mapping[str, Any]) -> int:
    data = reply(names, test).encode()
    while data:
        data = data[os.write(pipe, data) :]
    return 0


def _run(program: Any, stdin: str, pipe: int) -> int:
    with tempfile.TemporaryFile(dir=os.getcwd()) as file:
        file.write(stdin.encode(errors="replace"))
        file.flush()
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.dup2(pipe, 1)
    os.close(pipe)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.setrecursionlimit(50_000)
    status = 0
    try:
        exec(program, module.__dict__)
    except SystemExit as error:
        status = 0 if error.code in (None, 0) else 1
    except BaseException:  # noqa: B036
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return status


def _run_forked(work: Callable[[int], int], seconds: float, room: int) -> dict[str, Any]:
    """What work, in a process of its own, writes into the pipe that it is given."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            os.close(reading)
            status = work(writing)
        finally:
            os._exit(status)
    os.close(writing)
    found = bytearray()
    until, late = monotonic() + WALL_CLOCK_FACTOR * seconds, False
    while len(found) <= room:
        rest = min(until - monotonic(), seconds - _read_cpu_seconds(child))
        if rest <= 0:
            late = True
            break
        if select.select([reading], [], [], rest)[0]:
            data = os.read(reading, _CHUNK)
            if not data:
                break
            found += data
    large = len(found) > room
    ended = _reap(child, 0.0 if late or large else until - monotonic())
    os.close(reading)
    if large:
        return {"large": True}
    if ended is None:
        return {"late": True}
    return {"out": found.decode(errors="replace"), "status": ended}


def _read_cpu_seconds(process: int) -> float:
    """CPU seconds of all its threads."""
    try:
        return clock_gettime((~process << 3) | 2)  # the kernel's number for the clock of a process
    except OSError:
        return 0.0


def _reap(child: int, seconds: float) -> int | None:
    """Its status, -signal where one ended it; None where it had to be killed."""
    until = monotonic() + seconds
    pause, killed = 0.0005, False
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return None if killed else os.waitstatus_to_exitcode(status)
        if not killed and monotonic() >= until:
            killed = True
            for kill in (os.killpg, os.kill):  # it may have left its group, and others may be in it
                with contextlib.suppress(OSError):
                    kill(child, signal.SIGKILL)
        select.select([], [], [], pause)
        pause = min(2 * pause, 0.02)
