"""A rollout worker on two ranks with fake engines and a collective timeout of two seconds.

Prints what `generate` returned or raised when an engine is slow, fails, aborts too many rollouts or is lost, or a peer
dies.
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


def make_worker(engine_ranks: int, generate: Callable[..., GenerationResult]) -> Any:
    from megarl.workers.context import Context
    from megarl.workers.rollout import RolloutWorker

    rollout = {"tp": engine_ranks, "max_aborted_frac": 0.5, "tool_call_parser": ""}
    config = tiny.config(tp=2, world=2, rollout=rollout, run={"distributed_timeout_s": TIMEOUT})
    chat: Any = SimpleNamespace(select_schemas=lambda prompt: [], catalog=EnvironmentCatalog())
    rollout_worker = RolloutWorker(
        Context(config, RANKS.job, tiny.HF["qwen3_moe"], chat, Clock(), Path("."), {"actor": 1})
    )
    if rollout_worker._runner is not None:
        engine: Any = rollout_worker.engines.engine
        rollout_worker._runner.generate = partial(generate, rollout_worker)  # type: ignore[method-assign]
        engine._call = lambda *_, **__: None
        server = SimpleNamespace(poll=lambda: None, close=lambda: None)
        engine._server, engine.wait_ready, engine.log = server, lambda: None, Path(tempfile.mkdtemp(), "engine.log")
        engine._launch = lambda: setattr(engine, "_server", server)
    return rollout_worker


def generate_seeds(rollout_worker: Any) -> Any:
    try:
        rollouts = rollout_worker.generate([PROMPT, PROMPT], 1)
        return [
            seed
            for seeds in rollouts.comm.all_gather_objects([rollout.seed for rollout in rollouts.local])
            for seed in seeds
        ]
    except ConfigError as error:
        return str(error)


def generate_slowly(rollout_worker: Any, prompts: Any, **_: Any) -> GenerationResult:
    time.sleep(2.5 * TIMEOUT)
    return GenerationResult([Rollout(PROMPT, TURNS, seed=RANKS.job.rank)])


def fail_on_one_engine(rollout_worker: Any, prompts: Any, check: Callable[[], None], **_: Any) -> GenerationResult:
    """The second engine's tools fail at once; the first engine would run for an hour."""
    if RANKS.job.rank:
        raise RuntimeError("the processes of the tools are gone")
    for _ in range(36000):
        time.sleep(0.1)
        check()
    return GenerationResult([])


def abort_some(failures: list[str]) -> Callable[..., GenerationResult]:
    rollouts = [Rollout(PROMPT, TURNS, "aborted" if failure else "stop", failure=failure) for failure in failures]
    return lambda rollout_worker, prompts, **_: GenerationResult(rollouts)


def lose_one_engine(rollout_worker: Any, prompts: Any, queue: GroupQueue, **_: Any) -> GenerationResult:
    """Each engine starts a group. The second of two engines is lost in its group, or the only one in its second."""
    calls = rollout_worker.__dict__.setdefault("calls", [])
    calls.append(len(calls))
    returned = queue.claim_returned()
    groups = [queue.claim()] if returned is None else [returned.number]
    if rollout_worker.engines.engine_index == len(rollout_worker.engines.engine_ranks) - 1 and len(calls) < 2:
        if len(rollout_worker.engines.engine_ranks) == 1:
            groups.append(queue.claim())
        loss = EngineLost("died", "engine is not running; the last lines")
        rollout_worker.engines.engine_restart.report_lost(loss)
        queue.return_group(ReturnedGroup(groups.pop(), (), 3))
        return GenerationResult(make_rollouts(groups), engine_loss=loss, num_interrupted=3)
    return GenerationResult(make_rollouts(groups), num_restarted=0 if returned is None else returned.num_interrupted)


def make_rollouts(groups: list[Any]) -> list[Rollout]:
    return [Rollout(PROMPT, TURNS, seed=group, group=group) for group in groups]


def run_with_lost_engine(engine_ranks: int) -> dict[str, Any]:
    rollout_worker = make_worker(engine_ranks, lose_one_engine)
    rollout_worker._num_generations = 100 * engine_ranks  # counter names include this number and are global to the job
    rollout_worker.begin_step(1)
    report = {
        "seeds": generate_seeds(rollout_worker),
        "available": rollout_worker.engines.recovery.has_available_engine,
        "metrics": rollout_worker.metrics(),
    }
    report["metrics"] = {name: value for name, value in report["metrics"].items() if name.startswith("rollout/")}
    report["restarting"] = sorted(rollout_worker.engines.recovery.restarting)
    rollout_worker.close()
    return report


def main() -> None:
    ranks._timeout_s = TIMEOUT
    ranks._set_timeouts(TIMEOUT)
    result = {
        "slow": generate_seeds(make_worker(2, generate_slowly)),
        "fails": generate_seeds(make_worker(1, fail_on_one_engine)),
        "allowed": generate_seeds(make_worker(1, abort_some(["", "late"]))),
        "too many": generate_seeds(make_worker(1, abort_some(["odd", "late", "late", ""]))),
        "lost one of two": run_with_lost_engine(1),
        "lost the only one": run_with_lost_engine(2),
    }

    def exit_abruptly(rollout_worker: Any, prompts: Any, **_: Any) -> GenerationResult:
        print("RESULT " + json.dumps(result), flush=True)
        os._exit(0)  # like a killed process

    rollout_worker = make_worker(1, exit_abruptly if RANKS.job.rank else abort_some([""]))
    try:
        rollout_worker.generate([PROMPT, PROMPT], 1)
    except ConfigError:
        raise
    except RuntimeError:
        result["peer died"] = True
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    TIMEOUT = 2.0
    RANKS = ranks.initialize(tiny.config(tp=2, world=2).parallel, timeout_s=60.0)
    main()
