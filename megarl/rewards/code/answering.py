"""Runs in the answer's box: execute the answer or call its functions, and report the outcome. Knows no expected value.

The answer can forge any report, so a report is data to be compared outside the box. Each test runs in its own process,
forked after the answer's imports, so an exit, an endless loop, or leftovers of one test affect that test alone. Uses
only the standard library and `plain.py`.
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

_CHUNK = 1 << 16
WALL_CLOCK_FACTOR = 4
"""Wall-clock seconds allowed per CPU second, because other processes run concurrently."""


def load(sources: list[str], setup: str, post_setup: str) -> dict[str, Any]:
    """Execute the first source that compiles and return its namespace. Raises whatever the source raises."""
    module = sys.modules["solution"] = ModuleType("solution")
    sys.setrecursionlimit(50_000)
    exec(compile(setup, "<given>", "exec"), module.__dict__)
    exec(_compiled(sources), module.__dict__)
    exec(compile(post_setup, "<given>", "exec"), module.__dict__)
    return module.__dict__


def _compiled(sources: list[str]) -> Any:
    for number, source in enumerate(sources):
        try:
            return compile(source, "<answer>", "exec")
        except (SyntaxError, ValueError):
            if number == len(sources) - 1:
                raise
    raise ValueError("no source")


def call(names: Mapping[str, Any], request: Mapping[str, Any]) -> Any:
    """Run one call, maybe of a method of class `Solution` (LeetCode's form), and return its encoded value."""
    if "source" in request:
        value = eval(compile(request["source"], "<test>", "eval"), dict(names))
    else:
        name = request["name"]
        function = names[name] if name in names else getattr(names["Solution"](), name)
        keywords = {key: decode(argument) for key, argument in request["kwargs"].items()}
        value = function(*map(decode, request["args"]), **keywords)
    return encode(value)


def main(send: Callable[[int, Any], None], job: Mapping[str, Any]) -> None:
    """Run the tests in order, each for at most `seconds` of CPU, and send each outcome.

    An outcome is {"value"}, {"raised"}, {"out", "status"}, {"large"}, or {"late"}, after which no further test runs.
    """
    devnull = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(devnull, number)
    try:
        names = load(job["sources"], job["setup"], job["post_setup"]) if job["kind"] == "calls" else {}
        program = _compiled(job["sources"]) if job["kind"] == "programs" else None
    except BaseException:  # noqa: B036
        return
    for test in job["tests"]:
        work = partial(_call, names=names, test=test) if program is None else partial(_run, program, test["stdin"])
        outcome = _run_forked(work, job["seconds"], job["max_bytes"])
        if program is None and "out" in outcome:
            try:
                outcome = json.loads(outcome["out"])
            except ValueError:
                outcome = {"raised": "its process ended"}
        send(test["number"], outcome)
        if "late" in outcome:
            return


def reply(names: Mapping[str, Any], request: Mapping[str, Any]) -> str:
    """Return the outcome of a call as a line of JSON."""
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
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.dup2(pipe, 1)
    os.close(pipe)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
    module = sys.modules["__main__"] = ModuleType("__main__")
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


def _run_forked(work: Callable[[int], int], seconds: float, max_bytes: int) -> dict[str, Any]:
    """Run `work` in a forked process and return what it writes into its pipe."""
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
    output = bytearray()
    deadline, is_late = monotonic() + WALL_CLOCK_FACTOR * seconds, False
    while len(output) <= max_bytes:
        cpu_seconds = 0.0
        with contextlib.suppress(OSError):
            cpu_seconds = clock_gettime((~child << 3) | 2)  # the kernel's clock id of a process, with all its threads
        remaining = min(deadline - monotonic(), seconds - cpu_seconds)
        if remaining <= 0:
            is_late = True
            break
        if select.select([reading], [], [], remaining)[0]:
            data = os.read(reading, _CHUNK)
            if not data:
                break
            output += data
    is_large = len(output) > max_bytes
    exit_status = _reap(child, 0.0 if is_late or is_large else deadline - monotonic())
    os.close(reading)
    if is_large:
        return {"large": True}
    if exit_status is None:
        return {"late": True}
    return {"out": output.decode(errors="replace"), "status": exit_status}


def _reap(child: int, seconds: float) -> int | None:
    """Return the exit status, -signal if a signal ended the process, or None if it had to be killed."""
    deadline = monotonic() + seconds
    pause, is_killed = 0.0005, False
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return None if is_killed else os.waitstatus_to_exitcode(status)
        if not is_killed and monotonic() >= deadline:
            is_killed = True
            for kill in (os.killpg, os.kill):  # it may have left its group, which others may have joined
                with contextlib.suppress(OSError):
                    kill(child, signal.SIGKILL)
        select.select([], [], [], pause)
        pause = min(2 * pause, 0.02)
