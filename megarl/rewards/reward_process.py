"""Call reward functions: in worker processes with a timeout, or in the rank for functions that cannot leave it.

A forked worker process runs `serve`. A request is the pickle of a function's index and the rollout; a response is
either {"number", "reward", "parts", "turns"} or {"number", "failed": why}.

`Deadline` limits a call in the main thread. Functions may use `signal.alarm`, which works only there, so they run
there, and a watchdog thread sends an otherwise unused signal whose handler raises. Where that has no effect, as in C
code or in a function that catches everything, the thread logs an error and exits the process.

`score` calls functions that a script passes as objects, such as closures, which no other process could import.
"""

from __future__ import annotations

import asyncio
import copy
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

from megarl.config import ConfigError, plugins
from megarl.config.plugins import is_async
from megarl.processes.messages import encode_frame, iter_orders, read_order
from megarl.rewards.composite import mark_unscored
from megarl.rewards.functions import RewardFunction, load_functions
from megarl.types import Rollout
from megarl.types.reward_values import Reward, RewardError, RewardFailure, RewardResult, parse_number, parse_reward

TIMEOUT_SIGNAL = signal.SIGRTMIN + 7
GRACE_S = 10.0
"""Seconds that a function has to return after the timeout signal."""
MAX_CONCURRENT = 64
"""Concurrent calls of coroutine functions per process."""
_AGAIN_S = 1.0
_LOOK_S = 0.1


class RewardTimeout(BaseException):
    """Raised in the main thread when a call exceeds its timeout. Not an Exception, because functions catch those."""


class Deadline:
    """Limit the time between `begin` and `end` within its `with` block.

    Raises RewardTimeout out of a call that takes longer. Works in the main thread only: other threads cannot be
    interrupted, so there only the last resort remains, exiting the process.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._call: tuple[str, float] | None = None  # description of the running call, and its deadline
        self._raised = False
        self._closed = threading.Event()
        self._main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Deadline:
        if self._main:
            self._previous_handler = signal.signal(TIMEOUT_SIGNAL, self._raise)
        self._watching = threading.Thread(target=self._watch, name="reward deadline", daemon=True)
        self._watching.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call = None
        self._closed.set()
        self._watching.join()
        if self._main:
            signal.signal(TIMEOUT_SIGNAL, self._previous_handler)

    def begin(self, description: str) -> None:
        """Start the clock for a call. description: names the call in the error line if the process has to exit."""
        self._raised = False
        self._call = description, time.monotonic() + self.seconds

    def end(self) -> None:
        """Stop the clock. Raises RewardTimeout if the function swallowed it."""
        self._call = None
        if self._raised:
            raise RewardTimeout

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._call is not None:
            self._raised = True
            raise RewardTimeout

    def _watch(self) -> None:
        last_signal = 0.0
        while not self._closed.wait(_LOOK_S):
            call, now = self._call, time.monotonic()
            if call is None or now < call[1]:
                last_signal = 0.0
            elif now > call[1] + GRACE_S:
                line = f"error: {call[0]} took longer than reward.timeout={self.seconds:g} s and does not stop\n"
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode(errors="replace"))
                os._exit(2)
            elif self._main and now - last_signal >= _AGAIN_S:
                last_signal = now
                signal.pthread_kill(threading.main_thread().ident or 0, TIMEOUT_SIGNAL)


Kind = Literal["sync", "async"]
"""Functions that a process calls one at a time, or coroutine functions that it awaits concurrently."""


def describe_timeout(limit: float) -> str:
    """Return the failure reason for a call that took longer than `limit` seconds."""
    return f"it took longer than reward.timeout={limit:g} s; make it faster or raise reward.timeout"


def call(function: RewardFunction, rollout: Rollout) -> RewardResult:
    """Call a function and return its reward or failure.

    Every exception becomes a failure, `SystemExit` included, except KeyboardInterrupt.
    """
    try:
        return parse_reward(function(rollout), count_actions(rollout))
    except BaseException as error:  # noqa: B036  whatever the user's function raises
        return to_failure(error)


async def call_async(function: RewardFunction, rollout: Rollout, limit: float) -> RewardResult:
    """As `call` for a coroutine function, which is cancelled after `limit` seconds."""
    deadline = asyncio.timeout(limit)
    try:
        async with deadline:
            value = await function(rollout)
        verdict: RewardResult = parse_reward(value, count_actions(rollout))
    except BaseException as error:  # noqa: B036
        verdict = to_failure(error)
    # A function may swallow its cancellation and still return a value.
    return RewardFailure(describe_timeout(limit)) if deadline.expired() else verdict


def count_actions(rollout: Rollout) -> int:
    """Return the number of the policy's turns."""
    return sum(turn.is_action for turn in rollout.turns)


def to_failure(error: BaseException) -> RewardFailure:
    """Convert an exception into a one-line failure. Re-raises KeyboardInterrupt."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, RewardError):
        return RewardFailure(str(error))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) != Path(__file__)]
    location = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return RewardFailure(f"it raised {plugins.format_error(error)}{location}")


# --- in a worker process --------------------------------------------------------------------------------------


def serve(wire: socket.socket, shared_args: dict[str, Any], order: dict[str, Any]) -> None:
    """Load the functions and answer requests until the other end closes.

    shared_args: {"specs", "limit"}; order: {"kind"}.
    """
    try:
        functions = list(load_functions(shared_args["specs"]).values())
    except ConfigError as error:
        wire.sendall(encode_frame({"error": str(error)}))
        return
    wire.sendall(encode_frame({"ready": True}))
    if order["kind"] == "async":
        asyncio.run(_serve_async(wire, functions, shared_args["limit"]))
        return
    for number, content in iter_orders(wire):
        function, rollout = _decode_call(content)
        wire.sendall(encode_frame({"number": number, **_encode_verdict(call(functions[function], rollout))}))


async def _serve_async(wire: socket.socket, functions: Sequence[RewardFunction], limit: float) -> None:
    wire.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=wire)
    tasks: set[asyncio.Task[None]] = set()

    async def answer_call(number: int, function: int, rollout: Rollout) -> None:
        verdict = await call_async(functions[function], rollout, limit)
        writer.write(encode_frame({"number": number, **_encode_verdict(verdict)}))

    while True:
        try:
            number, content = await read_order(reader)
        except asyncio.IncompleteReadError:
            return
        task = asyncio.create_task(answer_call(number, *_decode_call(content)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _decode_call(content: bytes) -> tuple[int, Rollout]:
    """Return the index of the function and its argument, as this process's rank has pickled them."""
    function, rollout = pickle.loads(content)
    return function, rollout


def _encode_verdict(verdict: RewardResult) -> dict[str, Any]:
    if isinstance(verdict, RewardFailure):
        return {"failed": verdict.reason}
    return {"reward": verdict.reward, "parts": dict(verdict.parts), "turns": list(verdict.turns)}


def decode_verdict(response: Mapping[str, Any], num_turns: int) -> RewardResult:
    """Decode a response. Raises RewardError or KeyError for a malformed one."""
    if "failed" in response:
        return RewardFailure(str(response["failed"]))
    parse_number(response["reward"], "it")
    reward = parse_reward({name: response[name] for name in ("reward", "parts", "turns")}, num_turns)
    assert isinstance(reward, Reward)
    return reward


_PACKAGE_FOLDER = Path(__file__).parents[1]


def score(
    rollouts: Sequence[Rollout],
    functions: Mapping[str, RewardFunction],
    timeout: float = math.inf,
    max_failed: float = math.inf,
) -> list[dict[str, RewardResult]]:
    """Return each function's verdict on each rollout, by function name.

    timeout: seconds per call. max_failed: once more rollouts than this have failed, no further function is called, and
    the remaining rollouts are `NOT_SCORED`.

    A coroutine function is awaited for many rollouts concurrently. Any other function is called for one rollout at a
    time, in the main thread, so that it may use signals.
    """
    verdicts: list[dict[str, RewardResult]] = [{} for _ in rollouts]
    failed: set[int] = set()

    def record(number: int, name: str, verdict: RewardResult) -> bool:
        """Record a verdict. Returns whether to continue."""
        if len(failed) <= max_failed:
            verdicts[number][name] = verdict
            if isinstance(verdict, RewardFailure):
                failed.add(number)
        return len(failed) <= max_failed

    deadline = Deadline(timeout) if functions and math.isfinite(timeout) else None
    with deadline or nullcontext():
        for name, function in functions.items():
            if is_async(function):
                asyncio.run(_score_async(name, function, rollouts, timeout, record))
                continue
            for number, rollout in enumerate(rollouts):
                if len(failed) > max_failed or not record(
                    number, name, _call_with_deadline(name, function, rollout, deadline)
                ):
                    break
    if len(failed) > max_failed:
        return [mark_unscored(verdict_by_name, list(functions)) for verdict_by_name in verdicts]
    return verdicts


async def _score_async(
    name: str,
    function: RewardFunction,
    rollouts: Sequence[Rollout],
    timeout: float,
    record: Callable[[int, str, RewardResult], bool],
) -> None:
    semaphore = asyncio.Semaphore(MAX_CONCURRENT)

    async def score_rollout(number: int, rollout: Rollout) -> None:
        async with semaphore:
            verdict = await call_async(function, _copy_rollout(rollout), timeout)
        if not record(number, name, verdict):
            for task in set(tasks) - {asyncio.current_task()}:
                task.cancel()

    tasks = [asyncio.create_task(score_rollout(number, rollout)) for number, rollout in enumerate(rollouts)]
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


def _call_with_deadline(
    name: str, function: RewardFunction, rollout: Rollout, deadline: Deadline | None
) -> RewardResult:
    copied_rollout = _copy_rollout(rollout)
    try:
        try:
            if deadline is not None:
                deadline.begin(f"reward function {name} on the sample {rollout.prompt.id!r}")
            return parse_reward(function(copied_rollout), count_actions(rollout))
        finally:
            if deadline is not None:
                deadline.end()
    except RewardTimeout:
        return RewardFailure(describe_timeout(0.0 if deadline is None else deadline.seconds))
    except BaseException as error:  # noqa: B036  whatever the user's function raises, sys.exit too
        source_file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if (
            isinstance(error, SystemExit)
            and source_file.is_relative_to(_PACKAGE_FOLDER)
            and source_file.parent != Path(__file__).parent
        ):
            raise  # raised by one of our signal handlers, which interrupted the function
        return to_failure(error)


def _copy_rollout(rollout: Rollout) -> Rollout:
    """Return the rollout with copies of everything that a function could mutate."""
    prompt = replace(
        rollout.prompt,
        messages=_copy_value(rollout.prompt.messages),
        ground_truth=_copy_value(rollout.prompt.ground_truth),
        extra=_copy_value(rollout.prompt.extra),
    )
    turns = tuple(map(replace, rollout.turns))  # constructing a turn makes its arrays read-only; pickling undoes it
    messages = _copy_value(rollout.messages)
    return replace(
        rollout, prompt=prompt, turns=turns, messages=messages, reward_parts={}, routing=None, sampling_mask=None
    )


def _copy_value(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if type(value) is dict:
        return {key: _copy_value(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_copy_value(item) for item in value])
    return copy.deepcopy(value)
