"""Call reward functions: in worker processes with a timeout, or in the rank for functions that cannot leave it.

A forked worker process runs `serve`; a request is the pickle of a function's index and the rollout. `score` calls
functions that a script passes as objects, such as closures, which no other process could import.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from megarl.config import ConfigError, plugins
from megarl.config.plugins import is_async
from megarl.processes.messages import encode_frame, iter_orders, read_order
from megarl.rewards.composite import call_while, mark_unscored
from megarl.rewards.functions import RewardFunction, load_functions
from megarl.types import Rollout
from megarl.types.reward_values import RewardError, RewardFailure, RewardResult, parse_number, parse_reward

TIMEOUT_SIGNAL = signal.SIGRTMIN + 7
GRACE_S = 10.0
"""Seconds that a function has to return after the timeout signal."""
MAX_CONCURRENT = 64
"""Concurrent calls of coroutine functions per process."""
_SIGNAL_INTERVAL_S = 1.0
_PACKAGE_FOLDER = Path(__file__).parents[1]


class RewardTimeout(BaseException):
    """Raised in the main thread when a call exceeds its timeout. Not an Exception, because functions catch those."""


@contextmanager
def limit_call(seconds: float, description: str) -> Iterator[None]:
    """Raise RewardTimeout out of the block once it has taken longer than `seconds`.

    The block may use `signal.alarm`, so a watchdog thread interrupts it by an otherwise unused signal, which only the
    main thread can receive. Where that has no effect, as in another thread, in C code or in a function that catches
    everything, the watchdog logs an error with the description and exits the process.
    """
    if math.isinf(seconds):
        yield
        return
    finished, has_raised = threading.Event(), False
    is_main = threading.current_thread() is threading.main_thread()

    def raise_timeout(number: int, frame: FrameType | None) -> None:
        nonlocal has_raised
        if not finished.is_set():
            has_raised = True
            raise RewardTimeout

    def watch() -> None:
        if finished.wait(seconds):
            return
        deadline = time.monotonic() + GRACE_S
        while (remaining := deadline - time.monotonic()) > 0:
            if is_main:
                signal.pthread_kill(threading.main_thread().ident or 0, TIMEOUT_SIGNAL)
            if finished.wait(min(_SIGNAL_INTERVAL_S, remaining)):
                return
        line = f"error: {description} took longer than reward.timeout={seconds:g} s and does not stop\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode(errors="replace"))
        os._exit(2)

    previous_handler = signal.signal(TIMEOUT_SIGNAL, raise_timeout) if is_main else None
    watchdog = threading.Thread(target=watch, name="reward deadline", daemon=True)
    watchdog.start()
    try:
        try:
            yield
        finally:
            finished.set()
    finally:
        finished.set()  # the signal may arrive just before it is set
        watchdog.join()
        if is_main:
            signal.signal(TIMEOUT_SIGNAL, previous_handler)
        if has_raised:  # the function may have swallowed it
            raise RewardTimeout


def describe_timeout(limit: float) -> str:
    """Return the failure reason for a call that took longer than `limit` seconds."""
    return f"it took longer than reward.timeout={limit:g} s; make it faster or raise reward.timeout"


def call(function: RewardFunction, rollout: Rollout, limit: float = math.inf, name: str = "") -> RewardResult:
    """Call a function and return its reward or failure. limit: seconds. name: of the function, see `limit_call`."""
    try:
        with limit_call(limit, f"reward function {name} on the sample {rollout.prompt.id!r}"):
            return parse_reward(function(rollout), count_actions(rollout))
    except RewardTimeout:
        return RewardFailure(describe_timeout(limit))
    except BaseException as error:  # noqa: B036  whatever the user's function raises, sys.exit too
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
    """Convert an exception into a one-line failure. Re-raises KeyboardInterrupt and what our signal handlers raise."""
    frames = traceback.extract_tb(error.__traceback__)
    source_file = Path(frames[-1].filename)
    is_ours = source_file.is_relative_to(_PACKAGE_FOLDER) and source_file.parent != Path(__file__).parent
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and is_ours):
        raise error
    if isinstance(error, RewardError):
        return RewardFailure(str(error))
    user_frames = [frame for frame in frames if Path(frame.filename) != Path(__file__)]
    location = f" ({user_frames[-1].filename}:{user_frames[-1].lineno})" if user_frames else ""
    return RewardFailure(f"it raised {plugins.format_error(error)}{location}")


# --- in a worker process --------------------------------------------------------------------------------------


def serve(wire: socket.socket, shared_args: dict[str, Any], order: dict[str, Any]) -> None:
    """Load the functions and answer requests until the other end closes.

    shared_args: {"specs", "limit"}. order: {"kind"}: `sync` for functions that are called one at a time, or `async` for
    coroutine functions, which are awaited concurrently.
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
        wire.sendall(encode_frame({"number": number, **asdict(call(functions[function], rollout))}))


async def _serve_async(wire: socket.socket, functions: Sequence[RewardFunction], limit: float) -> None:
    wire.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=wire)
    tasks: set[asyncio.Task[None]] = set()

    async def answer_call(number: int, function: int, rollout: Rollout) -> None:
        verdict = await call_async(functions[function], rollout, limit)
        writer.write(encode_frame({"number": number, **asdict(verdict)}))

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


def decode_verdict(response: Mapping[str, Any], num_turns: int) -> RewardResult:
    """Decode a response. Raises RewardError or KeyError for a malformed one."""
    if "reason" in response:
        return RewardFailure(str(response["reason"]))
    parse_number(response["reward"], "it")
    return parse_reward({name: response[name] for name in ("reward", "parts", "turns")}, num_turns)


# --- in the rank ----------------------------------------------------------------------------------------------


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

    async def score_async(name: str, number: int) -> bool:
        verdict = await call_async(functions[name], _copy_rollout(rollouts[number]), timeout)
        return record(number, name, verdict)

    for name, function in functions.items():
        if is_async(function):
            asyncio.run(call_while(partial(score_async, name), len(rollouts), MAX_CONCURRENT))
        else:
            for number, rollout in enumerate(rollouts):
                if not record(number, name, call(function, _copy_rollout(rollout), timeout, name)):
                    break
        if len(failed) > max_failed:
            return [mark_unscored(verdict_by_name, list(functions)) for verdict_by_name in verdicts]
    return verdicts


def _copy_rollout(rollout: Rollout) -> Rollout:
    """Return the rollout with copies of everything that a function could mutate."""
    prompt, messages = copy.deepcopy((rollout.prompt, rollout.messages))
    turns = tuple(map(replace, rollout.turns))  # constructing a turn makes its arrays read-only; pickling undoes it
    return replace(
        rollout,
        prompt=prompt,
        turns=turns,
        messages=messages,
        reward_parts={},
        routing=None,
        sparse_indices=None,
        sampling_mask=None,
    )
