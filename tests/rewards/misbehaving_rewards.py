"""Misbehaving reward functions; the id of the prompt selects the behavior."""

from __future__ import annotations

import asyncio
import ctypes
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megarl.types import Prompt, Rollout
from megarl.types.reward_values import Reward


def constant(rollout: Rollout) -> float:
    return 1.0


def misbehave(rollout: Rollout) -> Any:
    """Do what the id of the prompt says: `behavior` or `behavior/argument`."""
    behavior, _, argument = rollout.prompt.id.partition("/")
    actions: dict[str, Any] = {
        "fine": lambda: 1.0,
        "pid": os.getpid,
        "nan": lambda: math.nan,
        "large": lambda: 1e7,
        "text": lambda: "1.0",
        "raise": lambda: 1 / 0,
        "exit": lambda: sys.exit(3),
        "die": lambda: os._exit(7),
        "fault": lambda: ctypes.string_at(0),
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "hang": lambda: time.sleep(600),
        "spin": spin,
        "print": lambda: print("said by a function") or 0.5,
        "close": lambda: os.closerange(3, 100) or 1.0,
        "hang_with_children": lambda: hang_with_children(argument),
        "semaphores": lambda: semaphores(*argument.split("/", 1)),
        "touch": lambda: Path(argument).touch() or 1.0,
        "alarm": alarm,
        "memory": lambda: len(bytearray(3 << 30)) * 0.0,
        "secret": lambda: float("HF_TOKEN" in os.environ),
        "turns": lambda: {"turns": [0.25, 0.5], "parts": {"style": 2}},
        "whole": lambda: Reward(1, {"style": 2.0}, [0.5, 0.25]),
        "too many": lambda: {"reward": 1.0, "turns": [0.1, 0.2, 0.3]},
        "routing": lambda: float(rollout.routing is None and rollout.group == 0 and rollout.reward == 0),
    }
    return actions[behavior]()


def spin() -> None:
    while True:
        pass


def hang_with_children(pid_file: str) -> None:
    """Hang with two children, one of them in its own session, whose pids are appended to `pid_file`."""
    for session in (False, True):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=session)
        with open(pid_file, "a") as file:
            file.write(f"{child.pid}\n")
    time.sleep(600)


_LOCKS: list[Any] = []


def semaphores(behavior: str, path: str) -> None:
    """Leave semaphores in shared memory, as multiprocessing does, then end as `behavior` says."""
    _LOCKS.extend(multiprocessing.get_context("spawn").Lock() for _ in range(3))
    Path(f"/{path}").write_text("\n".join(lock._semlock.name for lock in _LOCKS))
    misbehave(Rollout(Prompt(behavior, ()), ()))


def alarm() -> float:
    """Use SIGALRM as a timeout, as some libraries do; it works only in the main thread."""

    def ring(number: int, frame: object) -> None:
        raise InterruptedError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(60)
    except InterruptedError:
        return 0.75
    return 0.0


ARRIVED: list[asyncio.Event] = []


async def meet(rollout: Rollout) -> float:
    """Return once as many calls as the id says run in this process."""
    ARRIVED.append(asyncio.Event())
    if len(ARRIVED) == int(rollout.prompt.id.partition("/")[0]):
        for event in ARRIVED:
            event.set()
    await ARRIVED[-1].wait()
    return 1.0


async def misbehave_async(rollout: Rollout) -> Any:
    """As `misbehave`; or wait, or swallow the cancellation."""
    behavior = rollout.prompt.id.partition("/")[0]
    if behavior == "wait":
        await asyncio.sleep(600)
    if behavior == "swallow":
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            return 1.0
    await asyncio.sleep(0)
    return misbehave(rollout)


if os.environ.get("REWARDS_BREAK") and "megarl.processes.forkserver" in " ".join(sys.orig_argv):
    raise RuntimeError("no licence in another process")
