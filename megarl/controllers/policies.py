"""Train several policies in one flow, each by an algorithm, optimizer, checkpoint, engines and export of its own.

    class TrunkAndHead(PoliciesController):
        algorithms = {"": PPOController, "b": ReMaxController}

The first policy has the roles `actor`, `rollout`, `reference` and `critic`, as far as its algorithm needs them; another
one, here b, has `actor_b`, `rollout_b`, `reference_b` and `critic_b`, with settings under `roles`
(`parallel/policy_configs.py`). All start from `model.path` unless `roles.actor_b.model` names another model, and share
the reward. `PolicyFlow` shows an algorithm its policy's roles under the names of the first's, so an algorithm does not
know which policy it trains.

Each policy is dealt the same prompts in the same order, in its own tokens and from a position of its own: an algorithm
that draws further prompts within a step (DAPO), and engines that generate ahead (`rollout.asynchronous`,
`rollout.oversample`), do not move the others. Prompts that a policy cannot answer are left out for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

from megarl.chat_format.chat_template import ChatTemplate
from megarl.checkpoint.manifest import Entry, Write
from megarl.config import Config
from megarl.config.stages import smallest_context
from megarl.controllers.controller import Evaluation, Flow, StepResult
from megarl.controllers.policy_gradient import PolicyController, PolicyUpdateController
from megarl.controllers.ppo import PPOController
from megarl.controllers.remax import ReMaxController
from megarl.data.loader import PromptLoader
from megarl.item_reader import PromptLimit
from megarl.observe.metrics import prefix_metrics, rollout_metrics
from megarl.observe.rollout_log import policy_folder
from megarl.parallel.placement import POLICY_ROLES, split_role
from megarl.parallel.policy_configs import engine_key, has_other_model, policy_config
from megarl.types import Comm, Prompt
from megarl.types.requirements import Requirements


def policy_role(role: str, policy: str) -> str:
    """Return the name of another policy's role; other roles are shared. policy: empty for the first."""
    return f"{role}_{policy}" if policy and role in POLICY_ROLES else role


class PolicyFlow:
    """A flow as the algorithm of another policy sees it: its roles under the names of the first policy's."""

    def __init__(self, flow: Flow, policy: str) -> None:
        self.flow, self.policy_name = flow, policy
        self.config = policy_config(flow.config, f"actor_{policy}")

    @property
    def loader(self) -> PromptLoader[Prompt]:
        """The loader that deals out prompts in the policy's tokens."""
        loader: PromptLoader[Prompt] = self.rollout.context.prompt_loader
        return loader

    def __getattr__(self, name: str) -> Any:
        """Return the policy's role of this name, or whatever else the flow has."""
        return getattr(self.flow, policy_role(name, self.policy_name))


def flow_of(flow: Flow, policy: str) -> Flow:
    """Return the flow for the algorithm of a policy."""
    return cast(Flow, PolicyFlow(flow, policy)) if policy else flow


class PoliciesController(PolicyController):
    """Steps each policy by its own algorithm on the same prompts, one after the other.

    Metrics of other policies than the first have its name as prefix: `b/actor/pg_loss`. Their rollouts are recorded in
    `policies/b` of the run folder. A subclass sets `algorithms`.
    """

    algorithms: ClassVar[Mapping[str, type[PolicyUpdateController]]]
    """Algorithm of each policy by its name; the first policy has the empty name."""

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
        named = [policy_role(role, policy) for policy, declared in requirements.items() for role in declared.roles]
        # Engines start first: each needs its share of a device as it starts.
        return tuple(sorted(dict.fromkeys(named), key=lambda role: split_role(role)[0] != "rollout"))

    @classmethod
    def declare_requirements(cls, config: Config) -> Requirements:
        parts = cls._requirements(config)
        trained, tolerant, workers = list[str](), list[str](), dict[str, str]()
        for policy, part in parts.items():
            trained += [policy_role(role, policy) for role in part.trained_roles]
            tolerant += [policy_role(role, policy) for role in part.cross_tokenizer_roles]
            workers |= {policy_role(role, policy): worker for role, worker in part.workers.items()}
        declared = super().declare_requirements(config)
        return replace(
            declared,
            trained_roles=tuple(trained),
            is_group_relative=any(part.is_group_relative for part in parts.values()),
            is_off_policy=all(part.is_off_policy for part in parts.values()),
            has_dynamic_sampling=any(part.has_dynamic_sampling for part in parts.values()),
            needs_greedy=any(part.needs_greedy for part in parts.values()),
            workers={**workers, **declared.workers},
            cross_tokenizer_roles=tuple(dict.fromkeys(tolerant)),
            policies=parts,
        )

    def num_updates(self, role: str) -> int:
        base, policy = split_role(role)
        return self.controllers[policy].num_updates(base)

    def load_items(self, flow: Flow) -> Sequence[Prompt]:
        return flow.data.load_prompts(self.config.data.train, limits=self._prompt_limits(flow))

    def load_eval_items(self, flow: Flow) -> Sequence[Prompt]:
        if self.config.rollout.replay:
            return ()
        return flow.data.load_prompts(self.config.data.eval, limits=self._prompt_limits(flow))

    def _prompt_limits(self, flow: Flow) -> list[PromptLimit]:
        """Return the limits of the policies that may have less room for a prompt, and a response to it, than the
        first."""
        limits: list[PromptLimit] = []
        for policy, algorithm in self.controllers.items():
            config, chat = algorithm.config, flow.data.chat
            longest = smallest_context(config) - 1
            if has_other_model(self.config, policy):
                chat = ChatTemplate.load(config.model.path, chat.catalog.tools, chat.catalog.environments)
            elif longest >= smallest_context(self.config) - 1:
                continue
            key = engine_key(self.config, policy_role("rollout", policy), "max_context")
            limits.append(PromptLimit(chat.encode_prompt, longest, key))
        return limits

    def step(self, flow: Flow, items: Sequence[Prompt]) -> StepResult:
        results: dict[str, StepResult] = {}
        for policy, algorithm in self.controllers.items():
            view = flow_of(flow, policy)
            prompts = view.loader.next_items(len(items)) if policy else items
            results[policy] = algorithm.step(view, prompts)
        metrics: dict[str, float] = {}
        for policy, result in results.items():
            sampled: dict[str, float] = {}
            if policy and result.rollouts is not None:
                draft_length = flow_of(flow, policy).config.rollout.num_speculative_tokens
                sampled = rollout_metrics(result.rollouts, draft_length)
            metrics |= prefix_metrics({**result.metrics, **sampled}, policy)
        others = {policy: result for policy, result in results.items() if policy}
        return replace(results[""], metrics=metrics, policies=others)

    def evaluate(self, flow: Flow, items: Sequence[Prompt]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for policy, algorithm in self.controllers.items():
            view = flow_of(flow, policy)
            metrics |= _prefix_eval(algorithm.evaluate(view, self._render(view, policy, items)), policy)
        return metrics

    def begin_evaluation(self, flow: Flow, items: Sequence[Prompt]) -> Evaluation | None:
        """Start the evaluation of all policies if the engines of all have ranks of their own."""
        views = {policy: flow_of(flow, policy) for policy in self.controllers}
        if not all(view.rollout.generates_beside_training for view in views.values()):
            return None
        parts = {}
        for policy, view in views.items():
            evaluation = self.controllers[policy].begin_evaluation(view, self._render(view, policy, items))
            assert evaluation is not None
            parts[policy] = evaluation
        return PoliciesEvaluation(parts)

    def _render(self, view: Flow, policy: str, items: Sequence[Prompt]) -> Sequence[Prompt]:
        """Return the prompts with the tokens of a policy's model."""
        if not has_other_model(self.config, policy):
            return items
        return list(map(view.rollout.context.chat.render_prompt, items))

    def state_dict(self) -> dict[str, Any]:
        return {policy: algorithm.state_dict() for policy, algorithm in self.controllers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for policy, algorithm in self.controllers.items():
            algorithm.load_state_dict(state[policy])

    def save(self) -> Write:
        writes = {policy: algorithm.save() for policy, algorithm in self.controllers.items()}

        def write(folder: Path) -> dict[Path, Entry]:
            written: dict[Path, Entry] = {}
            for policy, write_part in writes.items():
                written |= write_part(policy_folder(folder, policy))
            return written

        return write

    def restore(self, folder: Path, comm: Comm) -> None:
        for policy, algorithm in self.controllers.items():
            algorithm.restore(policy_folder(folder, policy), comm)


class PoliciesEvaluation:
    """Evaluations of several policies during training, a `controller.Evaluation`. parts: by policy."""

    def __init__(self, parts: Mapping[str, Evaluation]) -> None:
        self._parts = parts

    def is_done(self) -> bool:
        return all(part.is_done() for part in self._parts.values())

    def result(self) -> dict[str, float]:
        results = {policy: part.result() for policy, part in self._parts.items()}
        return {name: value for policy, part in results.items() for name, value in _prefix_eval(part, policy).items()}


def _prefix_eval(metrics: Mapping[str, float], policy: str) -> dict[str, float]:
    """Return the metrics of an evaluation under `eval/b/`, for the policy b; those of the first as they are."""
    return {name.replace("eval/", f"eval/{policy}/" if policy else "eval/", 1): x for name, x in metrics.items()}


class PPOAndReMaxController(PoliciesController):
    """Two policies over one model: PPO with a critic trains the first, ReMax without one the second."""

    algorithms = {"": PPOController, "b": ReMaxController}
