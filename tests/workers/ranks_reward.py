"""Rewards on two ranks with a collective timeout of four seconds, by slow or failing functions of a script and by
functions in the pool's processes.

Argument: a folder. Prints each rank's results.
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
    """Slow on one rank only."""
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
    context_fields = {
        "run_dir": Path(sys.argv[1]),
        "on_rollout_finished": RolloutListeners(),
        "role": "",
        "layouts": {},
        "num_updates": {},
        "engines": {},
    }
    return SimpleNamespace(config=config, job=JOB, clock=Clock(), **context_fields)


def summarize(scored: Rollouts) -> dict[str, Any]:
    parts = {name: values.tolist() for name, values in scored.reward_parts.items()}
    turn_rewards = [
        [int(i), [turn.reward for turn in item.turns]]
        for i, item in zip(scored.local_indices, scored.local, strict=True)
    ]
    all_turn_rewards = sorted(
        item for local_rollouts in ranks.all_gather_objects(turn_rewards) for item in local_rollouts
    )
    reasons = list(scored.unscored_reasons)
    return {
        "reward": scored.reward.tolist(),
        "parts": parts,
        "unscored": scored.unscored.tolist(),
        "reasons": reasons,
    } | {"turns": [rewards for _, rewards in all_turn_rewards]}


def try_scoring(
    reward: RewardConfig,
    function: Any = None,
    prefetched: int = 0,
    weights: Any = None,
    rollouts: Rollouts | None = None,
) -> Any:
    """prefetched: how many local rollouts the worker gets before scoring."""
    rollouts = LOCAL_ROLLOUTS if rollouts is None else rollouts
    worker_context = context(reward)
    worker = RewardWorker(worker_context, reward_fn=function)
    try:
        with ranks.with_timeout(60.0):  # on a busy machine, one rank's processes start seconds after the other's
            worker.wait_ready()
        for rollout in rollouts.local[:prefetched]:
            worker_context.on_rollout_finished(rollout)
        if prefetched and worker._pool is not None:  # wait for all prefetched rewards
            list(map(lambda entry: entry[1].result(), worker._prefetch._pending.values()))
        if weights is not None:
            config = replace(worker.config, reward=replace(worker.config.reward, weights=weights))
            worker.check_config(config)
            worker.set_config(config)
        result = summarize(worker.score(rollouts))
        return result | {"metrics": worker.metrics()}
    except ConfigError as error:
        return str(error)
    finally:
        worker.close()


def main() -> None:
    settings = {"max_failed_frac": 0.5}
    functions, dying_functions = ("toy_rewards:length", "toy_rewards:later"), ("toy_rewards:dies",)
    result = {
        "slow": try_scoring(RewardConfig(timeout=30.0), slow),
        "hangs": try_scoring(RewardConfig(timeout=0.3), hangs),
        "one hangs": try_scoring(RewardConfig(timeout=0.3, **settings), hangs),
        "leaves": try_scoring(RewardConfig(timeout=30.0, max_failed_frac=0.99), leaves),
        "pool": try_scoring(RewardConfig(functions, weights={"length": 0.5}), prefetched=1),
        "changed": try_scoring(RewardConfig(functions, processes=4), weights={"later": 2}),
        "branches": try_scoring(RewardConfig(functions), rollouts=make_branches()),
        "branches here": try_scoring(
            RewardConfig(timeout=30.0), lambda rollout: rollout.num_tokens, rollouts=make_branches()
        ),
        "dies": try_scoring(RewardConfig(dying_functions)),
        "one dies": try_scoring(RewardConfig(dying_functions, **settings)),
        "all too slow": all_too_slow(),
        "no such part": try_weights({"lenght": 1.0}),
        "environment": score_environment(
            RewardConfig(weights={"environment": 2.0}), [Reward(0.5, {"tries": 3.0}, (0.25,))] * 4
        ),
        "environment and function": score_environment(
            RewardConfig(("toy_rewards:length",)), [Reward(1.0), None, None, Reward(-1.0)]
        ),
        "failed": score_environment(
            RewardConfig(max_failed_frac=0.5), [Reward(1.0)] * 3 + [RewardFailure("Guess: reward raised")]
        ),
        "recorded": score_environment(RewardConfig(), None),
        "no reward": score_environment(RewardConfig(), [None] * 4, "toy_environments:Plain"),
        "nothing": score_environment(RewardConfig(), [None] * 4, ""),
    }
    print("RESULT", json.dumps(result), flush=True)
    row_exchange.close_row_exchange()
    ranks.shutdown()


def all_too_slow() -> Any:
    """Score 20 slow rollouts on each rank; return the error."""
    many_rollouts = [
        replace(ROLLOUTS[0], turns=tuple(map(replace, ROLLOUTS[0].turns)), group=number) for number in range(40)
    ]
    local = list(range(JOB.rank, 40, 2))
    rollouts = Rollouts.gather([many_rollouts[number] for number in local], local, row_exchange.WorldComm())
    slow = RewardConfig(("toy_rewards:sleeps", "toy_rewards:length"), timeout=1.5, processes=2)
    return try_scoring(slow, rollouts=rollouts)


def score_environment(reward: RewardConfig, env_rewards: Any, spec: str = "toy_environments:Guess") -> Any:
    """env_rewards: None for replayed rollouts that have the environment's part."""
    try:
        worker = RewardWorker(context(reward, (spec,) if spec else (), "" if env_rewards else "somewhere"))
    except ConfigError as error:
        return str(error)
    local_rollouts = [
        replace(item, env_reward=env_rewards[i]) if env_rewards else replace(item, reward_parts={"environment": 3.0})
        for i, item in zip(LOCAL_INDICES, LOCAL_ROLLOUTS.local, strict=True)
    ]
    result = summarize(worker.score(LOCAL_ROLLOUTS.replace_local(local_rollouts)))
    worker.close()
    return result


def make_branches() -> Rollouts:
    """Return, on each rank, an episode of two branches with three and four tokens, and a single rollout."""
    single = replace(ROLLOUTS[JOB.rank], group=JOB.rank)
    longer_rollout = replace(single, turns=(Turn((1, 2, 4)), *single.turns[1:]))
    local_rollouts = [*as_branches([single, longer_rollout], 0), single]
    return Rollouts.gather(local_rollouts, [item.group for item in local_rollouts], row_exchange.WorldComm())


def try_weights(weights: dict[str, float]) -> str:
    try:
        RewardWorker(context(RewardConfig(("toy_rewards:length",), weights=weights)))
    except ConfigError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    JOB = ranks.initialize(ParallelConfig(world_size=2), timeout_s=2.0).job
    LOCAL_INDICES = range(JOB.rank, 4, 2)
    LOCAL_ROLLOUTS = Rollouts.gather([ROLLOUTS[i] for i in LOCAL_INDICES], LOCAL_INDICES, row_exchange.WorldComm())
    main()
