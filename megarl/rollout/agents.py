"""An episode by an agent: a client of the policy in a process of its own, and what a session has recorded of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl.environments.protocol import SessionLost
from megarl.rollout.partial import Partial
from megarl.rollout.policy import Policy
from megarl.types import Failed, Verdict
from megarl.types.verdicts import RewardError, reward_of

if TYPE_CHECKING:
    from megarl.rollout.multi_turn import Surroundings


async def run_agent(
    begun: Partial, policy: Policy, around: Surroundings, params: dict[str, Any], deadline: float | None = None
) -> Partial:
    """Let an agent work on a prompt, until it returns; `before` are all branches of the episode but the last.

    params, deadline: as of `run_conversation`. It is `aborted` where the agent raises, its process dies, it asks the
    policy for nothing, is not done by `deadline`, or a request of it has failed.
    """
    loop = asyncio.get_running_loop()
    server = await around.agents()
    recording = server.open(begun.prompt, policy, params, deadline, begun.seed)
    limit = around.config.step_timeout if deadline is None else max(0.0, deadline - loop.time())
    value = None
    try:
        value = await around.sessions.run_agent(begun.prompt, recording.base_url, recording.key, limit)
    except SessionLost as error:
        recording.fail(str(error))
    finally:
        await server.close(recording)
    *before, last = recording.branches()
    if last.status == "aborted":
        return replace(last, before=tuple(before))
    return replace(last, before=tuple(before), verdict=_verdict(value, last))


def _verdict(value: Any, last: Partial) -> Verdict | None:
    """None where it has returned none: then others say what it was worth."""
    if value is None:
        return None
    try:
        return reward_of(value, sum(turn.is_action for turn in last.turns))
    except (RewardError, TypeError) as error:
        return Failed(f"the agent: {error}")
