"""A rollout worker on two ranks, whose collectives may take two seconds, with engines that are only played.

Prints what `generate` returned or raised where an engine takes longer, fails, aborts too much, or a peer is gone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "megatron"))
torch.set_num_threads(1)

import tiny  # noqa: E402

from megarl.config import ConfigError  # noqa: E402
from megarl.environments.describing import Known  # noqa: E402
from megarl.observe.clock import Clock  # noqa: E402
from megarl.parallel import ranks  # noqa: E402
from megarl.rollout.gathering import Gathered  # noqa: E402
from megarl.types import Prompt, Rollout, Turn  # noqa: E402

PROMPT, TURNS = Prompt("p", ()), (Turn((1,)),)


def worker(engine_ranks: int, play: Callable[..., Gathered]) -> Any:
    from megarl.workers.context import Context
    from megarl.workers.rollout import RolloutWorker

    rollout = {"tp": engine_ranks, "max_aborted": 0.5, "tool_call_parser": ""}
    config = tiny.config(tp=2, world=2, rollout=rollout, run={"timeout_s": TIMEOUT})
    chat: Any = SimpleNamespace(schemas=lambda prompt: [], known=Known())
    made = RolloutWorker(Context(config, RANKS.job, tiny.HF["qwen3_moe"], chat, Clock(), Path("."), {"actor": 1}))
    if made._talks is not None:
        assert made.engine is not None
        made._talks.generate = play  # type: ignore[method-assign]
        made.engine._call = lambda *_, **__: None  # type: ignore[method-assign]
    return made


def outcome(made: Any) -> Any:
    try:
        found = made.generate([PROMPT, PROMPT], 1)
        return [seed for seeds in found.everyone.objects([rollout.seed for rollout in found.here]) for seed in seeds]
    except ConfigError as error:
        return str(error)


def slow(prompts: Any, **_: Any) -> Gathered:
    time.sleep(2.5 * TIMEOUT)
    return Gathered([Rollout(PROMPT, TURNS, seed=RANKS.job.rank)], [])


def one_fails(prompts: Any, look: Callable[[], None], **_: Any) -> Gathered:
    """The second engine dies at once; the first would go on for an hour."""
    if RANKS.job.rank:
        raise RuntimeError("engine 1 is not running; the last lines of its log")
    for _ in range(36000):
        time.sleep(0.1)
        look()
    return Gathered([], [])


def aborted(share: list[str]) -> Callable[..., Gathered]:
    rollouts = [Rollout(PROMPT, TURNS, "aborted" if why else "stop", failure=why) for why in share]
    return lambda prompts, **_: Gathered(rollouts, [])


def main() -> None:
    ranks._timeout_s = TIMEOUT
    ranks._set_timeouts(list(dist.distributed_c10d._world.pg_map), TIMEOUT)
    result = {
        "slow": outcome(worker(2, slow)),
        "fails": outcome(worker(1, one_fails)),
        "allowed": outcome(worker(1, aborted(["", "late"]))),
        "too many": outcome(worker(1, aborted(["odd", "late", "late", ""]))),
    }

    def gone(prompts: Any, **_: Any) -> Gathered:
        print("RESULT " + json.dumps(result), flush=True)
        os._exit(0)  # as the kernel ends a process that is killed

    made = worker(1, gone if RANKS.job.rank else aborted([""]))
    try:
        made.generate([PROMPT, PROMPT], 1)
    except ConfigError:
        raise
    except RuntimeError:
        result["gone"] = True
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    TIMEOUT = 2.0
    RANKS = ranks.initialize(tiny.config(tp=2, world=2).parallel, timeout_s=60.0)
    main()
