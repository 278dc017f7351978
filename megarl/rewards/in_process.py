"""Reward functions that a script hands over, such as a closure, which no other process could have: called here."""

from __future__ import annotations

import asyncio
import copy
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.forks import is_async
from megarl.rewards.calls import actions_of, call_async, late, raised
from megarl.rewards.deadline import Deadline, TookTooLong
from megarl.rewards.functions import RewardFunction
from megarl.rewards.unscored import given_up
from megarl.types import Rollout
from megarl.types.verdicts import Failed, Verdict, reward_of

AT_ONCE = 64
"""Calls of a coroutine function at the same time."""
_OURS = Path(__file__).parents[1]


def score(
    rollouts: Sequence[Rollout],
    functions: Mapping[str, RewardFunction],
    timeout: float = math.inf,
    most_failed: float = math.inf,
) -> list[dict[str, Verdict]]:
    """What each function says of each rollout, by name. timeout: seconds of one call. most_failed: when more rollouts
    than these have no reward, no function is called any more, and the others are `NOT_JUDGED`.

    A coroutine function is awaited for all of them, many at once; another is called for one after the other, in the
    main thread, so that it may use signals.
    """
    verdicts: list[dict[str, Verdict]] = [{} for _ in rollouts]
    failed: set[int] = set()

    def note(number: int, name: str, verdict: Verdict) -> bool:
        """Whether to go on."""
        if len(failed) <= most_failed:
            verdicts[number][name] = verdict
            failed.update([number] if isinstance(verdict, Failed) else [])
        return len(failed) <= most_failed

    deadline = Deadline(timeout) if functions and math.isfinite(timeout) else None
    with deadline or nullcontext():
        for name, function in functions.items():
            if is_async(function):
                asyncio.run(_all(name, function, rollouts, timeout, note))
                continue
            for number, rollout in enumerate(rollouts):
                if len(failed) > most_failed or not note(number, name, _call(name, function, rollout, deadline)):
                    break
    return [given_up(known, list(functions)) for known in verdicts] if len(failed) > most_failed else verdicts


async def _all(
    name: str,
    function: RewardFunction,
    rollouts: Sequence[Rollout],
    timeout: float,
    note: Callable[[int, str, Verdict], bool],
) -> None:
    at_once = asyncio.Semaphore(AT_ONCE)
    goes_on = True

    async def one(number: int, rollout: Rollout) -> None:
        nonlocal goes_on
        async with at_once:
            if goes_on and not note(number, name, await call_async(function, _unharmed(rollout), timeout)):
                goes_on = False
                for task in tasks:
                    task.cancel()

    tasks = [asyncio.ensure_future(one(number, rollout)) for number, rollout in enumerate(rollouts)]
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()


def _call(name: str, function: RewardFunction, rollout: Rollout, deadline: Deadline | None) -> Verdict:
    shown = _unharmed(rollout)
    try:
        try:
            if deadline is not None:
                deadline.begin(f"reward function {name} on the sample {rollout.prompt.id!r}")
            return reward_of(function(shown), actions_of(rollout))
        finally:
            if deadline is not None:
                deadline.end()
    except TookTooLong:
        return Failed(late(0.0 if deadline is None else deadline.seconds))
    except BaseException as error:  # noqa: B036  whatever the user's function raises, sys.exit too
        place = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if isinstance(error, SystemExit) and place.is_relative_to(_OURS) and place.parent != Path(__file__).parent:
            raise  # of a handler of signals, which came in the middle
        return raised(error)


def _unharmed(rollout: Rollout) -> Rollout:
    """The rollout with copies of all that a function could change in place."""
    prompt = rollout.prompt
    own = replace(
        prompt,
        messages=_copied(prompt.messages),
        ground_truth=_copied(prompt.ground_truth),
        extra=_copied(prompt.extra),
    )
    turns = tuple(map(replace, rollout.turns))  # a turn makes its arrays read-only, which pickling undoes
    return replace(
        rollout,
        prompt=own,
        turns=turns,
        messages=_copied(rollout.messages),
        reward_parts={},
        routing=None,
        support=None,
    )


def _copied(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_copied(item) for item in value])
    return copy.deepcopy(value)
