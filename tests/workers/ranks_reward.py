"""Reward functions that take their time, on two ranks whose collectives wait two seconds for a peer."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from megarl.config import Config, ConfigError, ParallelConfig, RewardConfig, RunConfig
from megarl.observe.clock import Clock
from megarl.parallel import everyone, ranks
from megarl.types import Prompt, Rollout, Rollouts, Turn
from megarl.workers.reward import RewardWorker

ROLLOUTS = [Rollout(Prompt(f"p{i}", ()), (Turn((1, 2)),)) for i in range(4)]
ROLLOUTS[2] = replace(ROLLOUTS[2], status="aborted")


def slow(rollout: Rollout) -> float:
    """Of one rank only."""
    time.sleep(2.0 if rollout.prompt.id in ("p1", "p3") else 0.0)
    return 1.0


def hangs(rollout: Rollout) -> float:
    time.sleep(600 if rollout.prompt.id == "p3" else 0.0)
    return 1.0


def leaves(rollout: Rollout) -> float:
    raise SystemExit(0)


def main() -> None:
    parallel = ParallelConfig(world_size=2)
    job = ranks.initialize(parallel, timeout_s=2.0).job
    run, found = RunConfig(timeout_s=2.0), {}
    own = range(job.rank, 4, 2)
    mine = Rollouts.of([ROLLOUTS[i] for i in own], own, everyone.AllRanks())
    for function, limit in ((slow, 30.0), (hangs, 0.3), (leaves, 30.0)):
        config = Config(run=run, parallel=parallel, reward=RewardConfig(timeout=limit))
        context: Any = SimpleNamespace(config=config, job=job, clock=Clock(), role="", layouts={})
        try:
            scored = RewardWorker(context, reward_fn=function).score(mine)
            found[function.__name__] = scored.reward.tolist()
        except ConfigError as error:
            found[function.__name__] = str(error)
    print("RESULT", json.dumps(found), flush=True)
    ranks.shutdown()


if __name__ == "__main__":
    main()
