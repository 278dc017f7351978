"""Rollout workers of two policies with scripted engines: which are awake while a policy trains."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from megarl.config import Config, from_dict
from megarl.controllers.controller import load_requirements
from megarl.parallel.placement import engine_ranks
from megarl.parallel.policy_configs import find_shared_ranks, policy_config, takes_turns
from megarl.workers.engines import Engines
from megarl.workers.rollout import RolloutWorker

NAME = "megarl.controllers.policies:PPOAndReMaxController"


class ScriptedEngines(Engines):
    """`Engines` without processes. `calls` gets the role at each call to sleep."""

    def __init__(self, context: Any, role: str, full: Config, calls: list[str]) -> None:
        self.config, self._context, self._role, self._calls = policy_config(full, role), context, role, calls
        self.clock: Any = SimpleNamespace(span=lambda *names: nullcontext(), phase=lambda *names: nullcontext())
        self.engine_ranks, self.engine_index = engine_ranks(self.config), None
        roles = load_requirements(full).roles
        self._owner = self
        self.takes_turns, shared = takes_turns(full, roles, role), find_shared_ranks(full, roles, role)
        self.shared = [index for index, members in enumerate(self.engine_ranks) if shared & set(members)]
        self.recovery: Any = SimpleNamespace(restarting=())
        self.is_awake = not self.takes_turns  # as after `start`

    def run_on_leads(self, work: Any) -> None:
        return None

    def _sleep(self) -> None:
        self._calls.append(self._role)


class Policies:
    """The rollout workers of two policies, in the order in which their roles start."""

    def __init__(self, **sections: Any) -> None:
        full = from_dict({"algorithm": NAME, "parallel": {"world_size": 2}, **sections})
        context: Any = SimpleNamespace(engines={})
        self.calls: list[str] = []
        self.workers: dict[str, Any] = {}
        for role in ("rollout", "rollout_b"):
            worker: Any = RolloutWorker.__new__(RolloutWorker)
            worker.engines = context.engines[role] = engines = ScriptedEngines(context, role, full, self.calls)
            worker.context, worker.config, worker.clock = context, engines.config, engines.clock
            worker._stream = SimpleNamespace(is_running=False)
            engines.end_turn = worker._sleep_engines
            self.workers[role] = worker

    @property
    def awake(self) -> list[str]:
        return [role for role, worker in self.workers.items() if worker.engines.is_awake]


def on_shared_ranks() -> list[list[str]]:
    """Return the engines that are awake at the start, after both policies have generated, while the first trains, after
    its weight sync, and while the second trains right then, as in a dialogue; and who was called to sleep when the
    first trained."""
    policies = Policies()
    first, second = policies.workers.values()
    awake = [policies.awake]
    first.engines.wake()
    second.engines.wake()
    awake.append(policies.awake)
    policies.calls.clear()
    first.sleep()
    calls = list(policies.calls)
    awake.append(policies.awake)
    first.engines.wake()
    awake.append(policies.awake)
    second.sleep()
    return [*awake, policies.awake, calls]


def beside_another_actor() -> list[list[str]]:
    """Return the engines that are awake at the start, after the second policy has generated, while the first trains,
    and while the second trains.

    The second policy's engines share a rank with both actors; those of the first have one of their own.
    """
    placement = {"actor": 0, "critic": 0, "actor_b": 0, "rollout": 1, "rollout_b": 0}
    policies = Policies(placement=placement, rollout={"asynchronous": True, "max_staleness": 1})
    first, second = policies.workers.values()
    awake = [policies.awake]
    second.engines.wake()
    awake.append(policies.awake)
    first.sleep()
    awake.append(policies.awake)
    second.sleep()
    return [*awake, policies.awake]


def on_separate_ranks() -> list[str]:
    """Return the engines that are awake while the first policy trains, where the other has ranks of its own."""
    policies = Policies(placement={"actor": 0, "critic": 0, "rollout": 0, "actor_b": 1, "rollout_b": 1})
    policies.workers["rollout"].sleep()
    return policies.awake
