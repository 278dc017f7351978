"""Train several policies in one flow, each by an algorithm, optimizer, checkpoint, engines and export of its own.

    class TrunkAndHead(PoliciesController):
        algorithms = {"": PPOController, "b": ReMaxController}

The first policy has the roles `actor`, `rollout` and `reference`; another one, here b, has `actor_b`, `rollout_b` and
`reference_b`, with settings under `roles` (`parallel/policy_configs.py`). All start from `model.path` unless
`roles.actor_b.model` names another model, and share the reward and the prompts of a step. `PolicyFlow` shows an
algorithm its policy's roles under the names of the first's, so an algorithm does not know which policy it trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

from megarl.checkpoint.manifest import Write
from megarl.config import Config, ConfigError
from megarl.controllers.controller import Flow, StepResult
from megarl.controllers.policy_gradient import PolicyController, PolicyUpdateController
from megarl.controllers.ppo import PPOController
from megarl.controllers.remax import ReMaxController
from megarl.data.datasets import render_prompts
from megarl.observe.metrics import prefix_metrics, rollout_metrics
from megarl.parallel.placement import POLICY_ROLES, split_role
from megarl.parallel.policy_configs import policy_config
from megarl.types import Comm, Prompt
from megarl.types.requirements import Requirements


def policy_role(role: str, policy: str) -> str:
    """Return the name of another policy's role; other roles are shared. policy: empty for the first."""
    return f"{role}_{policy}" if policy and role in POLICY_ROLES else role


class PolicyFlow:
    """A flow as the algorithm of another policy sees it: its roles under the names of the first policy's."""

    def __init__(self, flow: Flow, policy: str) -> None:
        self.flow, self.policy = flow, policy
        self.config = policy_config(flow.config, f"actor_{policy}")

    def __getattr__(self, name: str) -> Any:
        """Return the policy's role of this name, or whatever else the flow has."""
        return getattr(self.flow, policy_role(name, self.policy))


def flow_of(flow: Flow, policy: str) -> Flow:
    """Return the flow for the algorithm of a policy."""
    return cast(Flow, PolicyFlow(flow, policy)) if policy else flow


class PoliciesController(PolicyController):
    """Steps each policy by its own algorithm on the same prompts, one after the other.

    Metrics of other policies than the first have its name as prefix: `b/actor/pg_loss`. Rollouts of the first are
    recorded. A subclass sets `algorithms`.
    """

    algorithms: ClassVar[Mapping[str, type[PolicyUpdateController]]]
    """Algorithm of each policy by its name; the first policy has the empty name, and alone may have a critic."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.controllers = {policy: cls(self.config_of(config, policy)) for policy, cls in self.algorithms.items()}

    def set_config(self, config: Config) -> None:
        super().set_config(config)
        for policy, algorithm in self.controllers.items():
            algorithm.set_config(self.config_of(config, policy))

    @classmethod
    def config_of(cls, config: Config, policy: str) -> Config:
        """Return the configuration of a policy's algorithm; override it for other losses than the first's."""
        return replace(policy_config(config, policy_role("actor", policy)), options={})

    @classmethod
    def _requirements(cls, config: Config) -> dict[str, Requirements]:
        return {
            policy: algorithm.declare_requirements(cls.config_of(config, policy))
            for policy, algorithm in cls.algorithms.items()
        }

    @classmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        requirements = cls._requirements(config)
        if critic := [policy for policy, declared in requirements.items() if policy and "critic" in declared.roles]:
            raise ConfigError(f"the policy {critic[0]} has a critic, which only the first policy may have")
        named = [policy_role(role, policy) for policy, declared in requirements.items() for role in declared.roles]
        # Engines start first: each needs its share of a device as it starts.
        return tuple(sorted(dict.fromkeys(named), key=lambda role: split_role(role)[0] != "rollout"))

    @classmethod
    def declare_requirements(cls, config: Config) -> Requirements:
        parts = cls._requirements(config)
        trained = [policy_role(role, policy) for policy, part in parts.items() for role in part.trained_roles]
        return replace(
            super().declare_requirements(config),
            trained_roles=tuple(trained),
            is_group_relative=any(part.is_group_relative for part in parts.values()),
            is_off_policy=all(part.is_off_policy for part in parts.values()),
            has_dynamic_sampling=any(part.has_dynamic_sampling for part in parts.values()),
            needs_greedy=any(part.needs_greedy for part in parts.values()),
        )

    def num_updates(self, role: str) -> int:
        base, policy = split_role(role)
        return self.controllers[policy].num_updates(base)

    def step(self, flow: Flow, items: Sequence[Prompt]) -> StepResult:
        results = {
            policy: algorithm.step(flow_of(flow, policy), self.render(flow, policy, items))
            for policy, algorithm in self.controllers.items()
        }
        metrics: dict[str, float] = {}
        for policy, result in results.items():
            sampled = rollout_metrics(result.rollouts) if policy and result.rollouts is not None else {}
            metrics |= prefix_metrics({**result.metrics, **sampled}, policy)
        return replace(results[""], metrics=metrics)

    def render(self, flow: Flow, policy: str, items: Sequence[Prompt]) -> Sequence[Prompt]:
        """Return the prompts with the tokens of a policy's model, without those that leave it no room for a response.

        Raises ConfigError if none does.
        """
        own, first = self.controllers[policy].config, self.config
        if own.model.path == first.model.path and own.rollout.max_context == first.rollout.max_context:
            return items
        chat = flow_of(flow, policy).rollout.context.chat
        return render_prompts(items, chat.encode_prompt, own.rollout.max_context - 1)[0]

    def evaluate(self, flow: Flow, items: Sequence[Prompt]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for policy, algorithm in self.controllers.items():
            result = algorithm.evaluate(flow_of(flow, policy), self.render(flow, policy, items))
            prefix = f"eval/{policy}/" if policy else "eval/"
            metrics |= {name.replace("eval/", prefix, 1): value for name, value in result.items()}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {policy: algorithm.state_dict() for policy, algorithm in self.controllers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for policy, algorithm in self.controllers.items():
            algorithm.load_state_dict(state[policy])

    def save(self) -> Write:
        writes = [algorithm.save() for algorithm in self.controllers.values()]
        return lambda folder: {path: entry for write in writes for path, entry in write(folder).items()}

    def restore(self, folder: Path, comm: Comm) -> None:
        for algorithm in self.controllers.values():
            algorithm.restore(folder, comm)


class PPOAndReMaxController(PoliciesController):
    """Two policies over one model: PPO with a critic trains the first, ReMax without one the second."""

    algorithms = {"": PPOController, "b": ReMaxController}
