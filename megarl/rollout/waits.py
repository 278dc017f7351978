"""Whether rollouts can be there in time, worked out before anything starts."""

from __future__ import annotations

from megarl.config import Config, ConfigError
from megarl.parallel.placement import engine_ranks

SLOW = 20.0
"""Tokens per second that each of an engine's conversations is taken to get at least, with as many others beside it as
there is room for: a pessimistic figure, by which waits are judged; the tiny models on a CPU get more."""
FAST = 1000.0
"""What no engine gives one conversation."""


def check_waits(config: Config, warnings: list[str]) -> None:
    """Whether the answers and the rollouts of a step can be there in time, should all of them become as long as they
    may. Where they cannot at a rate that no engine has, this raises; at a `SLOW` one it warns."""
    rollout = config.rollout
    if rollout.replay:
        return
    if rollout.request_timeout > rollout.step_timeout:
        raise ConfigError(
            f"rollout.request_timeout={rollout.request_timeout:g} is beyond rollout.step_timeout="
            f"{rollout.step_timeout:g}: one answer cannot take longer than all; lower the first or raise the second"
        )
    room = rollout.sglang.get("max_total_tokens")
    room = room if isinstance(room, int) and room > 0 else 0
    most = rollout.sglang.get("max_running_requests")
    at_once = min(rollout.concurrency, most if isinstance(most, int) and most > 0 else rollout.concurrency)
    if room:
        at_once = max(1, min(at_once, room // rollout.max_context))
    engines = len(engine_ranks(config))
    steps = 1 + rollout.max_lag if rollout.asynchronous else 1  # whose conversations an engine has at the same time
    conversations = -(-config.data.prompts_per_step * steps // engines) * rollout.samples_per_prompt
    waves, of = -(-conversations // at_once), "under way" if steps > 1 else "of a step"
    written = min(rollout.max_context, rollout.max_turns * rollout.max_new_tokens)
    for key, limit, tokens, of_what, remedy in (
        (
            "request_timeout",
            rollout.request_timeout,
            rollout.max_new_tokens,
            f"an answer of rollout.max_new_tokens={rollout.max_new_tokens}",
            "raise it or lower the other",
        ),
        (
            "step_timeout",
            rollout.step_timeout,
            waves * written,
            f"an engine's {conversations} rollouts {of}, of up to {written} tokens and {at_once} at once, so in "
            f"{waves} waves,",
            "raise it, or give the engines more room (rollout.sglang.max_total_tokens, rollout.concurrency)",
        ),
    ):
        if tokens / FAST > limit:
            raise ConfigError(
                f"rollout.{key}={limit:g} s is too short: {of_what} would take {tokens / FAST:.0f} s at {FAST:g} "
                f"tokens per second each, which no engine reaches; {remedy}"
            )
        if tokens / SLOW > limit:
            warnings.append(
                f"rollout.{key}={limit:g} s may be too short: {of_what} would take {tokens / SLOW:.0f} s at {SLOW:g} "
                f"tokens per second each; what is late is aborted; {remedy}"
            )
