"""Runs in the test's box, without the answer: execute tests that cannot be decomposed into calls.

Stubs stand in for the answer's functions. A test runs in a thread, and `step` advances it from one stub call to the
next: it takes the result of the last call and returns the next request or the test's outcome. Uses only the standard
library and `plain.py`.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import queue
import threading
from collections.abc import Mapping
from typing import Any

from megarl.rewards.code.plain import DecodeError, decode, encode

_BLOCKED_EXCEPTIONS = (
    *("StopIteration", "StopAsyncIteration", "GeneratorExit"),
    *("NameError", "UnboundLocalError", "ImportError"),
)
"""An answer could use these to end a test's loop early, or to look like a mistake of the test."""


class AnswerLost(BaseException):
    """The answer's process has exited or returned a non-plain value, so the test cannot continue."""


class AnswerError(Exception):
    """Stands for an exception of the answer that tests cannot expect."""


class AssertionRun:
    """Execution of one test in a thread."""

    def __init__(self, setup: str, source: str, names: list[str], allow_nan: bool) -> None:
        self.calls, self.lost, self.allow_nan = 0, False, allow_nan
        self.requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self.namespace: dict[str, Any] = {"__name__": "tests"}
        threading.Thread(target=self._run, args=(setup, source, names), daemon=True).start()

    def _run(self, setup: str, source: str, names: list[str]) -> None:
        stage = "its setup"
        try:
            exec(compile(setup, "<setup>", "exec"), self.namespace)
            self.namespace |= {name: self._make_stub(name) for name in names}
            stage = "a test"
            exec(compile(source, "<test>", "exec"), self.namespace)
        except Exception as error:
            is_test_error = stage == "its setup" or (isinstance(error, NameError | ImportError) and not self.calls)
            self._send_result(False, f"{stage} raised {type(error).__name__}: {error}"[:300] if is_test_error else "")
        except BaseException:  # noqa: B036  a lost answer; sys.exit in a test
            self._send_result(False)
        else:
            self._send_result(not self.lost, "" if self.calls else "a test called no function of the answer")

    def _send_result(self, passed: bool, wrong: str = "") -> None:
        self.requests.put({"passed": passed, "wrong": wrong} if wrong else {"passed": passed})

    def _make_stub(self, name: str) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            if self.lost:
                raise AnswerLost
            self.calls += 1
            keywords = {key: encode(value) for key, value in kwargs.items()}
            self.requests.put({"name": name, "args": list(map(encode, args)), "kwargs": keywords})
            return self._decode_reply(self.replies.get())

        function.__name__ = name
        return function

    def _decode_reply(self, reply: Mapping[str, Any]) -> Any:
        if "value" in reply:
            with contextlib.suppress(DecodeError):
                value = decode(reply["value"])
                if self.allow_nan or not _has_nan(reply["value"]):
                    return value
        elif "raised" in reply:
            raise _exception(reply["raised"])
        self.lost = True
        raise AnswerLost


def _exception(name: Any) -> BaseException:
    kind = getattr(builtins, name, None) if isinstance(name, str) and name not in _BLOCKED_EXCEPTIONS else None
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError | ExceptionGroup):
        return kind("raised by the answer")
    return AnswerError("raised by the answer")


def _has_nan(data: Any) -> bool:
    """Return whether an encoded value contains NaN, with which `not value > limit` would pass."""
    if not isinstance(data, list):
        return False
    if data[0] in ("float", "complex"):
        return any(number != number for number in map(float.fromhex, data[1:]))
    return any(map(_has_nan, data))


_running: list[AssertionRun] = []


def begin(setup: str, source: str, names: list[str], allow_nan: bool) -> str:
    """Start a test and return its first message as a line of JSON."""
    _running[:] = [AssertionRun(setup, source, names, allow_nan)]
    return json.dumps(_running[0].requests.get())


def step(reply: Mapping[str, Any]) -> str:
    """Pass a reply to the test and return its next message as a line of JSON."""
    _running[0].replies.put(reply)
    return json.dumps(_running[0].requests.get())
