"""Controllers with a table of logits as every role: they learn, and their steps do not depend on the world size."""

from __future__ import annotations

import dataclasses
import math
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from thread_ranks import as_ranks

from megarl.config import Config, from_dict
from megarl.config.recipes import RECIPES
from megarl.controllers.controller import Controller, load_requirements, make_controller
from megarl.controllers.mini_batches import MetricMeans, split_mini_batches
from megarl.types import LOCAL, Comm, ModelOutput, Prompt, Rollout, Rollouts, Status, TokenLoss, TrainBatch, Turn
from megarl.workers.futures import Future, UpdateMetrics

pytestmark = [pytest.mark.alone, pytest.mark.slow]

ACTIONS = 6


class TablePolicy:
    """A policy of two-token responses: token k is sampled from softmax(table[k]). The best response is (1, 4)."""

    def __init__(self) -> None:
        self.table = torch.zeros(2, ACTIONS, requires_grad=True)
        self.values_table = torch.zeros(2, requires_grad=True)
        # With the usual eps, gradients that are 0 up to rounding would make full-size steps.
        self.optimizer = torch.optim.Adam([self.table], lr=0.1, eps=1e-3)
        self.value_optimizer = torch.optim.Adam([self.values_table], lr=0.1, eps=1e-3)

    def output(self, batch: TrainBatch) -> ModelOutput:
        position = (batch.positions - 1).clamp(0, 1)
        logprobs = self.table.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        chosen = logprobs[position, batch.tokens.long().clamp(max=ACTIONS - 1)]
        return ModelOutput(logprobs=chosen, entropy=entropy[position], values=self.values_table[position])

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        output = self.output(batch)
        assert output.logprobs is not None and output.entropy is not None
        return Future.completed(ModelOutput(logprobs=output.logprobs.detach(), entropy=output.entropy.detach()))

    def update(self, batch: TrainBatch, loss_fn: Any) -> UpdateMetrics:
        return UpdateMetrics(self._descend(batch, loss_fn, self.optimizer))

    def _descend(self, batch: TrainBatch, loss_fn: Any, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        result: TokenLoss = loss_fn(self.output(batch), batch)
        assert batch.loss_weights is not None
        optimizer.zero_grad()
        (result.loss * batch.loss_weights).sum().backward()
        (table,) = optimizer.param_groups[0]["params"]
        table.grad = batch.all_reduce(table.grad)
        optimizer.step()
        return {name: float(batch.all_reduce(value)) for name, value in result.reduce_metrics(batch).items()}


class TableFlow:
    """Just enough of HybridFlow for a controller: every role is the table. Each of `world` ranks has a copy and samples
    its own groups."""

    def __init__(self, config: Config, comm: Comm = LOCAL, world: int = 1) -> None:
        self.config, self.comm, self.world = config, comm, world
        self.policy = TablePolicy()
        self.first_table = self.policy.table.detach().clone()
        self.calls: list[str] = []
        self.actor = self.policy
        self.rollout = self.reward = self.reference = self
        self.critic = self
        self.clock = self
        self.loader = self
        self.phase = lambda name: nullcontext()
        self.groups = 0
        self.weights = {"second": 2.0}
        self.step, self.policy_name = 0, ""
        self.log: Any = self
        self.evaluations: list[tuple[int, list[bool], str]] = []
        """Step, whether each generation was greedy, and policy of each recorded evaluation."""

    def record_evaluation(self, step: int, calls: Any, policy: str = "") -> None:
        self.evaluations.append((step, [call.is_greedy for call in calls], policy))

    def next_items(self, count: int) -> list[Prompt]:
        self.calls.append("next_items")
        return [Prompt(id=f"further {i}", messages=()) for i in range(count)]

    def generate(self, items: Any, samples: int, greedy: bool = False, held_out: bool = False) -> Rollouts:
        self.calls.append("greedy" if greedy else "generate")
        logprobs = self.policy.table.detach().log_softmax(-1)
        first, local = 0 if greedy else self.groups, []
        self.groups += 0 if greedy else len(items)
        for number in range(self.comm.rank, len(items), self.world):
            group, draw = first + number, random.Random(f"{len(self.calls)}/{number}")
            for _ in range(samples):
                answer = [draw.choices(range(ACTIONS), logprobs[k].exp().tolist())[0] for k in range(2)]
                if greedy:
                    answer = logprobs.argmax(-1).tolist()
                chosen = tuple(float(logprobs[k, token]) for k, token in enumerate(answer))
                turns = (Turn((9,)), Turn(tuple(answer), chosen, True, 0))
                status: Status = {(5, 5): "aborted", (5, 4): "length"}.get(tuple(answer), "stop")
                local.append(Rollout(items[number], turns, status, group=group))
        return Rollouts.gather(local, [rollout.group for rollout in local], self.comm)

    def generate_again(self, rollouts: Rollouts, samples: int = 1, greedy: bool = True) -> Rollouts:
        groups = rollouts.group.unique().tolist()
        prompts = [Prompt(id=str(group), messages=()) for group in groups]
        return self.generate(prompts, samples, greedy).with_groups(dict(enumerate(groups)))

    def score(self, rollouts: Rollouts) -> Rollouts:
        self.calls.append("score")
        local = []
        for rollout in rollouts.local:
            first, second = (rollout.token_ids[1:] == [1, 4]).tolist()
            parts = {"first": first / 2, "second": second / 4}
            local.append(dataclasses.replace(rollout, reward=(first + second) / 2, reward_parts=parts))
        return rollouts.replace_local(local)

    def sleep(self) -> None:
        self.calls.append("sleep")

    def update_weights(self, actor: Any) -> None:
        self.calls.append("update_weights")
        self.groups = 0  # the next step numbers from 0

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        """Return the reference's log-probs and the critic's values."""
        position = (batch.positions - 1).clamp(0, 1)
        logprobs = self.first_table.log_softmax(-1)[position, batch.tokens.long().clamp(max=ACTIONS - 1)]
        values = self.policy.output(batch).values
        assert values is not None
        return Future.completed(ModelOutput(logprobs=logprobs, values=values.detach()))

    def update(self, batch: TrainBatch, loss_fn: Any) -> UpdateMetrics:
        return UpdateMetrics(self.policy._descend(batch, loss_fn, self.policy.value_optimizer))


@pytest.mark.parametrize(("algorithm", "mean"), [("ppo", "token-mean"), ("grpo", "seq-mean-token-mean")])
@pytest.mark.parametrize("kl", [{"apply_to": "reward"}, {"apply_to": "loss"}, {"apply_to": "none"}])
def test_ppo_and_grpo_learn_a_table(algorithm: str, kl: dict[str, Any], mean: str) -> None:
    tree = {"algorithm": algorithm, "kl": kl, "run": {"num_update": 2, "ppo_epochs": 2}}
    config = from_dict(tree | {"rollout": {"samples_per_prompt": 8}, "loss": {"agg_mode": mean}})
    controller: Controller = make_controller(config)
    flow: Any = TableFlow(config)
    prompts = [Prompt(id=str(i), messages=()) for i in range(4)]
    means = []
    for _ in range(25):
        result = controller.step(flow, prompts)
        assert result.batch is not None
        means.append(float(result.batch.sequence_reward.mean()))
    assert means[0] < 0.4 and sum(means[-5:]) / 5 > 0.85, means
    assert flow.calls[:4] == ["generate", "score", "sleep", "update_weights"]
    assert result.metrics["rollout/logprob_diff"] < 1e-6
    if kl["apply_to"] != "none":
        assert result.metrics["actor/kl_to_reference"] > 0.05  # the policy has moved
    restored = make_controller(config)
    restored.load_state_dict(controller.state_dict())
    assert restored.state_dict() == controller.state_dict()


DECLARED = {name: load_requirements(from_dict({"algorithm": name})) for name in RECIPES}
TRAINED = [
    name for name, item in DECLARED.items() if item.item == "prompts" and item.trained_roles and "reward" in item.roles
]


@pytest.mark.parametrize("updates", [pytest.param(1, marks=pytest.mark.nightly), 4])
@pytest.mark.parametrize("name", TRAINED)
def test_every_recipe_learns_a_table(name: str, updates: int) -> None:
    """Each recipe keeps its settings, with three exceptions. Critic warm-up is shorter. VAPO's lambda would be 0 for
    two-token responses, where this critic, which sees positions only, cannot help. Dr. GRPO's constant is made for
    long responses and would shrink gradients to this optimizer's eps."""
    tree = {"algorithm": name, "run": {"num_update": updates}, "rollout": {"samples_per_prompt": 8}}
    options = {"length_adaptive_alpha": 5.0} if name == "vapo" else {}
    config = from_dict(tree | {"critic": {"warmup_steps": 2}, "options": options, "loss": {"scale_factor": 2}})
    controller, flow, means = make_controller(config), TableFlow(config), []
    for _ in range(40):
        result = controller.step(flow, [Prompt(id=str(i), messages=()) for i in range(8)])  # type: ignore[arg-type]
        assert result.rollouts is not None
        means.append(float(result.rollouts.reward.mean()))
        assert all(math.isfinite(value) for value in result.metrics.values())
    assert means[0] < 0.4 and sum(means[-5:]) / 5 > 0.8, means
    restored = make_controller(config)
    restored.load_state_dict(controller.state_dict())
    assert restored.state_dict() == controller.state_dict()


def run_steps(config: Config, prompts: int, comm: Comm, world: int) -> list[dict[str, Any]]:
    """Run three steps; return each one's metrics, global batch, tables and controller state."""
    controller: Controller = make_controller(config)
    flow: Any = TableFlow(config, comm, world)
    steps = []
    for _ in range(3):
        result = controller.step(flow, [Prompt(id=str(i), messages=()) for i in range(prompts)])
        batch = result.batch
        assert batch is not None and batch.comm is comm
        order = comm.all_gather_rows(batch.sequence_ids).sort(stable=True).indices
        columns = {name: comm.all_gather_rows(getattr(batch, name))[order] for name in batch.columns()}
        columns |= {name: getattr(batch, name) for name in ("lengths", "group", "sequence_reward")}
        tables = {"policy": flow.policy.table.detach().clone(), "values": flow.policy.values_table.detach().clone()}
        steps.append({"metrics": result.metrics, "state": controller.state_dict(), **columns, **tables})
    return steps


# With 2 prompts, a third rank gets none.
@pytest.mark.parametrize("prompts", [7, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("truncated", ["train", "mask", "drop"])
@pytest.mark.parametrize(
    ("algorithm", "mean", "kl"),
    [
        ("ppo", "token-mean", "reward"),
        ("grpo", "seq-mean-token-mean", "reward"),
        ("grpo", "token-mean", "loss"),
        ("vapo", "token-mean", "none"),
        ("pf_ppo", "token-mean", "reward"),
        ("remax", "token-mean", "reward"),
        ("dapo", "token-mean", "none"),
        ("gdpo", "token-mean", "loss"),
        ("dr_grpo", "seq-mean-token-sum-norm", "none"),
        ("reinforce_pp", "seq-mean-token-mean", "reward"),
        ("clip_cov", "token-mean", "loss"),
    ],
)
def test_step_does_not_depend_on_world_size(algorithm: str, mean: str, kl: str, truncated: str, prompts: int) -> None:
    tree = {"algorithm": algorithm, "kl": {"apply_to": kl, "target": 0.01}, "run": {"num_update": 4, "ppo_epochs": 2}}
    tree |= {"rollout": {"samples_per_prompt": 8}, "loss": {"agg_mode": mean, "truncated": truncated}}
    config = from_dict(tree | {"critic": {"warmup_steps": 0}})
    single_rank = run_steps(config, prompts, LOCAL, 1)
    for world in (1, 2, 3):
        first, *other_ranks = as_ranks(world, lambda comm, world=world: run_steps(config, prompts, comm, world))
        for steps in other_ranks:
            torch.testing.assert_close(steps, first, rtol=0, atol=0)
        within = 1e-6 if world > 1 else 0.0
        torch.testing.assert_close(first, single_rank, rtol=within, atol=within)


@pytest.mark.parametrize("mean", ["token-mean", "seq-mean-token-mean"])
def test_mini_batches_cover_each_epoch_once(mean: str) -> None:
    config = from_dict({"run": {"num_update": 4, "ppo_epochs": 2}, "loss": {"agg_mode": mean}})
    rollouts = [Rollout(Prompt(str(i), ()), (Turn((i,)), Turn((i, i), (0.0, 0.0), True)), group=i) for i in range(7)]
    batch = TrainBatch.from_rollouts(rollouts)
    parts = list(split_mini_batches(batch, config, seed=3))
    assert [part.num_sequences for part in parts] == [4, 3, 4, 3]
    for epoch in (parts[:2], parts[2:]):
        trained_groups = sorted(int(group) for part in epoch for group in part.group)
        assert trained_groups == list(range(7))
    for part in parts:
        assert part.loss_weights is not None
        assert float(part.loss_weights.sum()) == pytest.approx(1.0)
        assert bool((part.loss_weights[~part.loss_mask] == 0).all())
    assert [part.group.tolist() for part in parts] == [
        p.group.tolist() for p in split_mini_batches(batch, config, seed=3)
    ]
    assert parts[0].group.tolist() != parts[2].group.tolist()


def test_metric_means_average_each_metric_over_its_updates() -> None:
    means = MetricMeans()
    means.add(UpdateMetrics({"a": 1.0, "b": 4.0}))
    means.add(UpdateMetrics({"a": 3.0}))
    assert means.sync() == {"a": 2.0, "b": 4.0}


def test_num_updates_excludes_critic_warmup_for_the_actor() -> None:
    tree = {"run": {"num_rollout": 100, "num_update": 4}, "critic": {"warmup_steps": 20}}
    ppo, grpo = (make_controller(from_dict(tree | {"algorithm": name})) for name in ("ppo", "grpo"))
    assert (ppo.num_updates("actor"), ppo.num_updates("critic")) == (80 * 4, 100 * 4)
    assert grpo.num_updates("actor") == 100 * 4  # no critic, no warm-up
