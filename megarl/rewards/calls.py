"""One call of a reward function, whatever it does; and what is served to a process that has them.

A `Nursery` forks processes that run `serve`. An order is the number of a function, and the rollout, pickled; its answer
is {"number", "reward", "parts", "turns"} or {"number", "failed": why}.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megarl import forks
from megarl.config import ConfigError
from megarl.processes.frames import frame, orders, read_order
from megarl.rewards.functions import RewardFunction, load_functions
from megarl.types import Rollout
from megarl.types.verdicts import Failed, Reward, RewardError, Verdict, number_of, reward_of

Kind = Literal["sync", "async"]
"""Of functions: those that a process calls one after the other, and those that it awaits, many at once."""

_FUNCTION = struct.Struct(">i")


def late(limit: float) -> str:
    """Why there is no reward where a call takes longer than `limit` seconds."""
    return f"it took longer than reward.timeout={limit:g} s; make it faster or raise that"


def call(function: RewardFunction, rollout: Rollout) -> Verdict:
    """What comes of it, `SystemExit` and the like included, but for Ctrl-C."""
    try:
        return reward_of(function(rollout), actions_of(rollout))
    except BaseException as error:  # noqa: B036  whatever the user's function raises
        return raised(error)


async def call_async(function: RewardFunction, rollout: Rollout, limit: float) -> Verdict:
    """The same of a coroutine function, which is cancelled where it takes longer than `limit` seconds."""
    until = asyncio.timeout(limit)
    try:
        async with until:
            value = await function(rollout)
        verdict: Verdict = reward_of(value, actions_of(rollout))
    except BaseException as error:  # noqa: B036
        verdict = raised(error)
    return Failed(late(limit)) if until.expired() else verdict  # whatever it has made of being cancelled


def actions_of(rollout: Rollout) -> int:
    """Turns of the policy's."""
    return sum(turn.is_action for turn in rollout.turns)


def raised(error: BaseException) -> Failed:
    """What an error says, in one line; raises it on where it is Ctrl-C."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, RewardError):
        return Failed(str(error))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) != Path(__file__)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return Failed(f"it raised {forks.worded(error)}{place}")


# --- in a process of its own ----------------------------------------------------------------------------------


def serve(wire: socket.socket, given: dict[str, Any], order: dict[str, Any]) -> None:
    """Load the functions, and call them until nobody asks. given: {"specs", "limit"}, order: {"kind"}."""
    try:
        functions = list(load_functions(given["specs"]).values())
    except ConfigError as error:
        wire.sendall(frame({"error": str(error)}))
        return
    wire.sendall(frame({"ready": True}))
    if order["kind"] == "async":
        asyncio.run(_serve_async(wire, functions, given["limit"]))
        return
    for number, content in orders(wire):
        function, rollout = _order(content)
        wire.sendall(frame({"number": number, **_said(call(functions[function], rollout))}))


async def _serve_async(wire: socket.socket, functions: Sequence[RewardFunction], limit: float) -> None:
    wire.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=wire)
    tasks: set[asyncio.Task[None]] = set()

    async def one(number: int, function: int, rollout: Rollout) -> None:
        verdict = await call_async(functions[function], rollout, limit)
        writer.write(frame({"number": number, **_said(verdict)}))

    while True:
        try:
            number, content = await read_order(reader)
        except asyncio.IncompleteReadError:
            return
        task = asyncio.create_task(one(number, *_order(content)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def order_of(function: int, rollout: Rollout) -> bytes:
    """Raises whatever pickling does."""
    return _FUNCTION.pack(function) + pickle.dumps(rollout, 5)


def _order(content: memoryview) -> tuple[int, Rollout]:
    return _FUNCTION.unpack_from(content)[0], pickle.loads(content[_FUNCTION.size :])


def _said(verdict: Verdict) -> dict[str, Any]:
    if isinstance(verdict, Failed):
        return {"failed": verdict.why}
    return {"reward": verdict.reward, "parts": dict(verdict.parts), "turns": list(verdict.turns)}


def verdict_of(said: Mapping[str, Any], turns: int) -> Verdict:
    """Of an answer. Raises RewardError or KeyError where it is none."""
    if "failed" in said:
        return Failed(str(said["failed"]))
    number_of(said["reward"], "it")
    found = reward_of({name: said[name] for name in ("reward", "parts", "turns")}, turns)
    assert isinstance(found, Reward)
    return found
