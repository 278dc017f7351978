"""Rewards on two ranks whose collectives wait four seconds for a peer: by functions of a script, that take their time
or fail, and by functions in the pool's processes.

Argument: a folder. Prints what each rank has of it.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from megarl.config import Config, ConfigError, ParallelConfig, RewardConfig, RolloutConfig, RunConfig  # noqa: E402
from megarl.observe.clock import Clock  # noqa: E402
from megarl.parallel import ranks, row_exchange  # noqa: E402
from megarl.types import Prompt, Reward, RewardFailure, Rollout, Rollouts, Turn, as_branches  # noqa: E402
from megarl.workers.context import RolloutListeners  # noqa: E402
from megarl.workers.reward import RewardWorker  # noqa: E402

ROLLOUTS = [Rollout(Prompt(f"p{i}", ()), (Turn((1, 2)), Turn((3,), (0.0,), True)), group=i // 2) for i in range(4)]
ROLLOUTS[2] = replace(ROLLOUTS[2], status="aborted", reward=7.0, reward_parts={"old": 7.0}, unscored={"old": "x"})


def slow(rollout: Rollout) -> float:
    """Of one rank only."""
    time.sleep(3.0 if rollout.prompt.id in ("p1", "p3") else 0.0)
    return 1.0


def hangs(rollout: Rollout) -> float:
    time.sleep(600 if rollout.prompt.id == "p3" else 0.0)
    return 1.0


def leaves(rollout: Rollout) -> float:
    raise SystemExit(0)


def context(reward: RewardConfig, environments: tuple[str, ...] = (), replay: str = "") -> Any:
    config = Config(
        run=RunConfig(distributed_timeout_s=4.0),
        parallel=ParallelConfig(world_size=2),
        reward=reward,
        rollout=RolloutConfig(environments=environments, replay=replay),
    )
    known = {"run_dir": Path(sys.argv[1]), "on_rollout_finished": RolloutListeners(), "role": "", "layouts": {}}
    return SimpleNamespace(config=config, job=JOB, clock=Clock(), **known)


def facts(scored: Rollouts) -> dict[str, Any]:
    parts = {name: values.tolist() for name, values in scored.reward_parts.items()}
    of_turns = [
        [int(i), [turn.reward for turn in item.turns]]
        for i, item in zip(scored.local_indices, scored.local, strict=True)
    ]
    every = sorted(item for local_items in ranks.all_gather_objects(of_turns) for item in local_items)
    why = list(scored.unscored_reasons)
    return {"reward": scored.reward.tolist(), "parts": parts, "unscored": scored.unscored.tolist(), "why": why} | {
        "turns": [rewards for _, rewards in every]
    }


def tried(
    reward: RewardConfig, function: Any = None, told: int = 0, weights: Any = None, given: Rollouts | None = None
) -> Any:
    """told: of how many of those that are here the worker has been told before."""
    given = MINE if given is None else given
    about = context(reward)
    worker = RewardWorker(about, reward_fn=function)
    try:
        worker.wait_ready()
        for rollout in given.local[:told]:
            about.on_rollout_finished(rollout)
        if told and worker._pool is not None:  # all that was begun is done
            list(map(lambda known: known[1].result(), worker._prefetch._pending.values()))
        if weights is not None:
            worker.set_control("reward.weights", worker.controls()["reward.weights"](weights))
        result = facts(worker.score(given))
        return result | {"figures": worker.metrics()}
    except ConfigError as error:
        return str(error)
    finally:
        worker.close()


def main() -> None:
    half = {"max_failed_frac": 0.5}
    lab, dies = ("lab_rewards:length", "lab_rewards:later"), ("lab_rewards:dies",)
    result = {
        "slow": tried(RewardConfig(timeout=30.0), slow),
        "hangs": tried(RewardConfig(timeout=0.3), hangs),
        "one hangs": tried(RewardConfig(timeout=0.3, **half), hangs),
        "leaves": tried(RewardConfig(timeout=30.0, max_failed_frac=0.99), leaves),
        "pool": tried(RewardConfig(lab, weights={"length": 0.5}), told=1),
        "changed": tried(RewardConfig(lab, processes=4), weights={"later": 2}),
        "branches": tried(RewardConfig(lab), given=branched()),
        "branches here": tried(RewardConfig(timeout=30.0), lambda rollout: rollout.num_tokens, given=branched()),
        "dies": tried(RewardConfig(dies)),
        "one dies": tried(RewardConfig(dies, **half)),
        "all too slow": all_too_slow(),
        "no such part": tried_weights({"lenght": 1.0}),
        "environment": of_environment(
            RewardConfig(weights={"environment": 2.0}), [Reward(0.5, {"tries": 3.0}, (0.25,))] * 4
        ),
        "beside": of_environment(RewardConfig(("lab_rewards:length",)), [Reward(1.0), None, None, Reward(-1.0)]),
        "failed": of_environment(
            RewardConfig(max_failed_frac=0.5), [Reward(1.0)] * 3 + [RewardFailure("Guess: reward raised")]
        ),
        "recorded": of_environment(RewardConfig(), None),
        "nobody": of_environment(RewardConfig(), [None] * 4, "odd_worlds:Plain"),
        "nothing": of_environment(RewardConfig(), [None] * 4, ""),
    }
    print("RESULT", json.dumps(result), flush=True)
    row_exchange.close_row_exchange()
    ranks.shutdown()


def all_too_slow() -> tuple[Any, bool]:
    """What is said of 20 rollouts on each rank, one call after the other, and whether that was soon."""
    many = [replace(ROLLOUTS[0], turns=tuple(map(replace, ROLLOUTS[0].turns)), group=number) for number in range(40)]
    local = list(range(JOB.rank, 40, 2))
    given = Rollouts.gather([many[number] for number in local], local, row_exchange.WorldComm())
    began = time.monotonic()
    slow = RewardConfig(("lab_rewards:sleeps", "lab_rewards:length"), timeout=1.5, processes=2)
    return tried(slow, given=given), time.monotonic() - began < 20


def of_environment(reward: RewardConfig, verdicts: Any, spec: str = "odd_worlds:Guess") -> Any:
    """verdicts: None for rollouts that were recorded with a part of it."""
    try:
        worker = RewardWorker(context(reward, (spec,) if spec else (), "" if verdicts else "somewhere"))
    except ConfigError as error:
        return str(error)
    local_items = [
        replace(item, env_reward=verdicts[i]) if verdicts else replace(item, reward_parts={"environment": 3.0})
        for i, item in zip(OWN, MINE.local, strict=True)
    ]
    result = facts(worker.score(MINE.replace_local(local_items)))
    worker.close()
    return result


def branched() -> Rollouts:
    """Of each rank an episode in two branches, of three tokens and of four, and one alone."""
    alone = replace(ROLLOUTS[JOB.rank], group=JOB.rank)
    longer = replace(alone, turns=(Turn((1, 2, 4)), *alone.turns[1:]))
    local_items = [*as_branches([alone, longer], 0), alone]
    return Rollouts.gather(local_items, [item.group for item in local_items], row_exchange.WorldComm())


def tried_weights(weights: dict[str, float]) -> str:
    try:
        RewardWorker(context(RewardConfig(("lab_rewards:length",), weights=weights)))
    except ConfigError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    JOB = ranks.initialize(ParallelConfig(world_size=2), timeout_s=2.0).job
    OWN = range(JOB.rank, 4, 2)
    MINE = Rollouts.gather([ROLLOUTS[i] for i in OWN], OWN, row_exchange.WorldComm())
    main()
