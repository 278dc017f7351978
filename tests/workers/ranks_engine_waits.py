"""A rollout worker on two ranks, whose collectives may take two seconds, with engines that are only played.

Prints what `generate` returned or raised where an engine takes longer, fails, aborts too much, or a peer is gone.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "megatron"))
torch.set_num_threads(1)

import tiny  # noqa: E402

from megarl.config import ConfigError  # noqa: E402
from megarl.engine.engine_protocol import EngineLost  # noqa: E402
from megarl.environments.catalog import EnvironmentCatalog  # noqa: E402
from megarl.observe.clock import Clock  # noqa: E402
from megarl.parallel import ranks  # noqa: E402
from megarl.rollout.group_queue import GroupQueue  # noqa: E402
from megarl.rollout.scheduler import GenerationResult, ReturnedGroup  # noqa: E402
from megarl.types import Prompt, Rollout, Turn  # noqa: E402

PROMPT, TURNS = Prompt("p", ()), (Turn((1,)),)


def worker(engine_ranks: int, play: Callable[..., GenerationResult]) -> Any:
    from megarl.workers.context import Context
    from megarl.workers.rollout import RolloutWorker

    rollout = {"tp": engine_ranks, "max_aborted_frac": 0.5, "tool_call_parser": ""}
    config = tiny.config(tp=2, world=2, rollout=rollout, run={"distributed_timeout_s": TIMEOUT})
    chat: Any = SimpleNamespace(select_schemas=lambda prompt: [], catalog=EnvironmentCatalog())
    created = RolloutWorker(Context(config, RANKS.job, tiny.HF["qwen3_moe"], chat, Clock(), Path("."), {"actor": 1}))
    if created._runner is not None:
        engine: Any = created.engines.engine
        created._runner.generate = partial(play, created)  # type: ignore[method-assign]
        engine._call = lambda *_, **__: None
        server = SimpleNamespace(poll=lambda: None, close=lambda: None)
        engine._server, engine.wait_ready, engine.log = server, lambda: None, Path(tempfile.mkdtemp(), "engine.log")
        engine._launch = lambda: setattr(engine, "_server", server)
    return created


def outcome(created: Any) -> Any:
    try:
        actual = created.generate([PROMPT, PROMPT], 1)
        return [
            seed
            for seeds in actual.comm.all_gather_objects([rollout.seed for rollout in actual.local])
            for seed in seeds
        ]
    except ConfigError as error:
        return str(error)


def slow(created: Any, prompts: Any, **_: Any) -> GenerationResult:
    time.sleep(2.5 * TIMEOUT)
    return GenerationResult([Rollout(PROMPT, TURNS, seed=RANKS.job.rank)], [])


def one_fails(created: Any, prompts: Any, check: Callable[[], None], **_: Any) -> GenerationResult:
    """The tools of the second engine fail at once; the first would go on for an hour."""
    if RANKS.job.rank:
        raise RuntimeError("the processes of the tools are gone")
    for _ in range(36000):
        time.sleep(0.1)
        check()
    return GenerationResult([], [])


def aborted(share: list[str]) -> Callable[..., GenerationResult]:
    rollouts = [Rollout(PROMPT, TURNS, "aborted" if why else "stop", failure=why) for why in share]
    return lambda created, prompts, **_: GenerationResult(rollouts, [])


def one_is_lost(created: Any, prompts: Any, queue: GroupQueue, **_: Any) -> GenerationResult:
    """Of two engines each begins a group. The second is lost in it, or the only one in the second of its two."""
    calls = created.__dict__.setdefault("calls", [])
    calls.append(len(calls))
    back = queue.claim_returned()
    mine = [queue.claim()] if back is None else [back.number]
    if created.engines.engine_index == len(created.engines.engine_ranks) - 1 and len(calls) < 2:
        if len(created.engines.engine_ranks) == 1:
            mine.append(queue.claim())
        lost = EngineLost("died", "engine is not running; the last lines")
        created.engines.engine_restart.report_lost(lost)
        queue.return_group(ReturnedGroup(mine.pop(), (), 3))
        return GenerationResult(rollouts_of(mine), [], engine_loss=lost, num_interrupted=3)
    return GenerationResult(rollouts_of(mine), [], num_restarted=0 if back is None else back.num_interrupted)


def rollouts_of(groups: list[Any]) -> list[Rollout]:
    return [Rollout(PROMPT, TURNS, seed=group, group=group) for group in groups]


def lost(engine_ranks: int) -> dict[str, Any]:
    created = worker(engine_ranks, one_is_lost)
    created._num_generations = 100 * engine_ranks  # counters of a generation have its number, in all of a job
    created.begin_step(1)
    actual = {
        "seeds": outcome(created),
        "there": created.engines.recovery.has_available_engine,
        "figures": created.metrics(),
    }
    actual["figures"] = {name: value for name, value in actual["figures"].items() if name.startswith("rollout/")}
    actual["away"] = sorted(created.engines.recovery.restarting)
    created.close()
    return actual


def main() -> None:
    ranks._timeout_s = TIMEOUT
    ranks._set_timeouts(list(dist.distributed_c10d._world.pg_map), TIMEOUT)
    result = {
        "slow": outcome(worker(2, slow)),
        "fails": outcome(worker(1, one_fails)),
        "allowed": outcome(worker(1, aborted(["", "late"]))),
        "too many": outcome(worker(1, aborted(["odd", "late", "late", ""]))),
        "one of two": lost(1),
        "the only one": lost(2),
    }

    def gone(created: Any, prompts: Any, **_: Any) -> GenerationResult:
        print("RESULT " + json.dumps(result), flush=True)
        os._exit(0)  # as the kernel ends a process that is killed

    created = worker(1, gone if RANKS.job.rank else aborted([""]))
    try:
        created.generate([PROMPT, PROMPT], 1)
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
