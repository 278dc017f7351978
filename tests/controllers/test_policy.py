"""Which rollouts count for losses and statistics: aborted ones never, truncated ones by `loss.truncated`."""

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import Config, from_dict
from megarl.config.recipes import RECIPES
from megarl.config.stages import change_config
from megarl.controllers.controller import StepResult, make_controller
from megarl.controllers.evaluation import pass_at_k_metrics
from megarl.controllers.grpo import GRPOController
from megarl.controllers.mini_batches import split_mini_batches
from megarl.controllers.policy_gradient import apply_loss_masks, select_trainable
from megarl.controllers.rollout_correction import logprob_diff_metrics
from megarl.types import ModelOutput, Prompt, Rollout, Rollouts, Status, TrainBatch, Turn
from megarl.workers.futures import UpdateMetrics

sys.path.insert(0, str(Path(__file__).parent))

from test_learning import TableFlow  # noqa: E402

pytestmark = pytest.mark.alone

FIRST = 0.5**0.5  # the advantage of reward 1 in a group of 1 and 0: (1 - 1/2) / sqrt(1/2)


def rollout(group: int, reward: float, status: Status, tokens: int = 2) -> Rollout:
    turns = (Turn((9,)), Turn((1, 4)[:tokens], (-1.8, -1.8)[:tokens], True, 0)) if tokens else (Turn((9,)),)
    return Rollout(Prompt(str(group), ()), turns, status, reward, group=group)


ROLLOUTS = [
    rollout(0, 1.0, "stop"),
    rollout(0, 7.0, "aborted", tokens=1),
    rollout(0, 0.0, "stop"),
    rollout(1, 1.0, "stop"),
    rollout(1, 0.0, "length"),
    rollout(1, 0.0, "max_turns"),
    rollout(2, 5.0, "aborted", tokens=0),
    rollout(2, 5.0, "aborted", tokens=0),
]


class FixedFlow(TableFlow):
    """A flow of fixed rollouts that records the batches of each role's updates."""

    def __init__(self, config: Config, rollouts: list[Rollout]) -> None:
        super().__init__(config)
        self.rollouts = rollouts
        self.actor_batches: list[TrainBatch] = []
        self.critic_batches: list[TrainBatch] = []
        update = self.policy.update
        self.policy.update = lambda batch, loss: (self.actor_batches.append(batch), update(batch, loss))[1]  # type: ignore

    def generate(self, items: Any, samples: int, greedy: bool = False, held_out: bool = False) -> Rollouts:
        return Rollouts.gather(self.rollouts)

    def score(self, rollouts: Rollouts) -> Rollouts:
        return rollouts

    def update(self, batch: TrainBatch, loss_fn: Any) -> UpdateMetrics:
        self.critic_batches.append(batch)
        return super().update(batch, loss_fn)


def step(
    algorithm: str, rollouts: list[Rollout], truncated: str = "train", updates: int = 1
) -> tuple[FixedFlow, StepResult]:
    tree = {"algorithm": algorithm, "loss": {"truncated": truncated}, "run": {"num_update": updates}}
    advantage = {"whiten": False, "gamma": 1.0, "lam": 1.0}
    config = from_dict(tree | {"kl": {"apply_to": "reward", "coef": 0.0, "target": None}, "advantage": advantage})
    flow: Any = FixedFlow(config, rollouts)
    controller = make_controller(config)
    return flow, controller.step(flow, [])


def trained_advantages(batches: list[TrainBatch]) -> list[float]:
    """Return the advantage of each token with a loss, by sequence."""
    advantages = []
    for batch in batches:
        assert batch.advantages is not None and batch.loss_weights is not None
        assert torch.equal(batch.loss_weights > 0, batch.loss_mask)
        advantages += batch.advantages[batch.loss_mask].tolist()
    return advantages


@pytest.mark.parametrize(
    ("truncated", "groups", "advantages"),
    [
        # Group 1 has rewards 1, 0, 0: mean 1/3, sample standard deviation sqrt(1/3).
        ("train", [0, 0, 1, 1, 1], [FIRST, -FIRST, *(x * 3**0.5 for x in (2 / 3, -1 / 3, -1 / 3))]),
        ("mask", [0, 0, 1, 1, 1], [FIRST, -FIRST, 2 / 3 * 3**0.5]),
        ("drop", [0, 0, 1], [FIRST, -FIRST, 0.0]),
    ],
)
def test_grpo_advantages_by_hand(truncated: str, groups: list[int], advantages: list[float]) -> None:
    flow, result = step("grpo", ROLLOUTS, truncated)
    assert result.batch is not None and result.batch.group.tolist() == groups
    expected = [value for value in advantages for _ in range(2)]
    assert trained_advantages(flow.actor_batches) == pytest.approx(expected, abs=1e-5)
    assert (
        result.rollouts is not None and list(result.rollouts.local) == ROLLOUTS and result.trained_rollouts is not None
    )
    assert not result.trained_rollouts.has_status("aborted").any() and len(result.trained_rollouts) == len(groups)


@pytest.mark.parametrize(
    ("truncated", "rewards"), [("train", [1, 0, 1, 0, 0]), ("mask", [1, 0, 1]), ("drop", [1, 0, 1])]
)
def test_ppo_advantages_by_hand(truncated: str, rewards: list[float]) -> None:
    """With values 0 and gamma = lambda = 1, each action has its rollout's reward."""
    flow, result = step("ppo", ROLLOUTS, truncated)
    expected = [float(reward) for reward in rewards for _ in range(2)]
    assert trained_advantages(flow.actor_batches) == pytest.approx(expected)
    assert trained_advantages(flow.critic_batches) == pytest.approx(expected)
    assert all(math.isfinite(value) for value in result.metrics.values())


def without_reward(response: Rollout) -> Rollout:
    return dataclasses.replace(response, reward=0.0, unscored={"gsm8k": "it raised"})


def test_unscored_rollouts_are_dropped() -> None:
    """Group 0 keeps two rollouts, as if the unscored one did not exist; group 1 keeps none."""
    rollouts = [*ROLLOUTS[:3], without_reward(rollout(0, 0.0, "stop")), *map(without_reward, ROLLOUTS[3:6])]
    flow, result = step("grpo", rollouts)
    assert trained_advantages(flow.actor_batches) == pytest.approx([FIRST] * 2 + [-FIRST] * 2, abs=1e-5)
    assert result.trained_rollouts is not None and len(result.trained_rollouts) == 2
    flow, result = step("ppo", rollouts)
    assert (
        trained_advantages(flow.actor_batches) == trained_advantages(flow.critic_batches) == pytest.approx([1, 1, 0, 0])
    )


def rollout_of_turns(group: int, outcome: float, *rewards: float) -> Rollout:
    """Each turn has two action tokens, followed by a tool output; the rollout's reward is the total."""
    turns = [Turn((9,))]
    for reward in rewards:
        turns += [Turn((1, 4), (-1.8, -1.8), True, 0, reward=reward), Turn((3,))]
    return Rollout(Prompt(str(group), ()), tuple(turns), "stop", outcome + sum(rewards), group=group)


def test_ppo_places_turn_rewards_at_their_turn() -> None:
    """With values 0 and gamma = lambda = 1, an action has the sum of the rewards from there on."""
    flow, result = step("ppo", [rollout_of_turns(0, 1.0, 0.5, -0.25), rollout_of_turns(0, 2.0, 0.0)])
    assert result.batch is not None and result.batch.rewards is not None
    assert result.batch.rewards.tolist() == [0, 0, 0.5, 0, 0, 0.75, 0, 0, 0, 2.0, 0]
    expected = [1.25, 1.25, 0.75, 0.75, 2.0, 2.0]
    assert trained_advantages(flow.actor_batches) == trained_advantages(flow.critic_batches) == pytest.approx(expected)


def test_grpo_compares_total_rewards_of_all_turns() -> None:
    """1 + 0.5 - 0.25 against 0.25: a difference of 1, normalised."""
    flow, _ = step("grpo", [rollout_of_turns(0, 1.0, 0.5, -0.25), rollout_of_turns(0, 0.25, 0.0)])
    assert trained_advantages(flow.actor_batches) == pytest.approx([FIRST] * 4 + [-FIRST] * 2, abs=1e-5)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize(
    ("rollouts", "truncated", "updates"),
    [
        ([], "train", 0),
        (ROLLOUTS[-2:], "train", 0),
        (ROLLOUTS[4:], "drop", 0),
        (ROLLOUTS[4:6], "mask", 0),
        ([rollout(0, 1.0, "length", tokens=0)], "train", 0),  # no room for a response
        ([without_reward(rollout(0, 1.0, "stop"))] * 2, "train", 0),
        (ROLLOUTS[:3], "train", 2),  # fewer sequences than mini-batches
    ],
    ids=["nothing", "all aborted", "all dropped", "all masked", "no action", "none scored", "two for three updates"],
)
def test_few_or_no_trainable_rollouts(algorithm: str, rollouts: list[Rollout], truncated: str, updates: int) -> None:
    flow, result = step(algorithm, rollouts, truncated, updates=3)
    assert len(flow.actor_batches) == updates
    assert len(flow.critic_batches) == (updates if algorithm == "ppo" else 0)
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert flow.calls == ["sleep", "update_weights"]
    assert not flow.policy.table.detach().isnan().any()


def test_truncated_sequences_are_masked_in_mini_batches() -> None:
    config = from_dict({"loss": {"truncated": "mask"}, "run": {"num_update": 5}})
    selected = select_trainable(Rollouts.gather(ROLLOUTS), config)
    batch = apply_loss_masks(TrainBatch.from_rollouts(selected), selected, config)
    assert batch.loss_mask.view(5, 3).tolist() == [[False, True, True]] * 3 + [[False] * 3] * 2
    parts = list(split_mini_batches(batch, config, seed=1))
    assert len(parts) == 3
    assert all(float(part.loss_weights.sum()) == pytest.approx(1.0) for part in parts if part.loss_weights is not None)


def test_evaluation_ignores_aborted_rollouts() -> None:
    config = from_dict({"algorithm": "grpo"})
    flow: Any = FixedFlow(config, ROLLOUTS[:3])
    actual = make_controller(config).evaluate(flow, [])
    assert actual["eval/reward_greedy"] == actual["eval/reward_sampled"] == 0.5
    assert actual["eval/aborted_frac_greedy"] == pytest.approx(1 / 3)


def test_pass_at_k_by_hand() -> None:
    """Right responses: 2 of 4 for prompt 0, 1 of 2 scored ones for prompt 1, none for prompt 2 with data source b."""
    prompt_of_b = Prompt("p", (), data_source="b")
    answers = [rollout(0, float(number < 2), "stop") for number in range(4)]
    answers += [rollout(1, 1.0, "stop"), rollout(1, 0.0, "stop"), rollout(1, 1.0, "aborted")]
    answers += [without_reward(rollout(1, 1.0, "stop"))]
    answers += [replace(rollout(2, 0.0, "stop"), prompt=prompt_of_b) for _ in range(4)]
    actual = pass_at_k_metrics(Rollouts.gather(answers), 4)
    expected = {1: (1 / 2 + 1 / 2) / 2, 2: (5 / 6 + 1) / 2, 4: 1.0}  # prompt 1 has too few for 4
    assert {k: actual[f"eval/pass_at_{k}/other"] for k in (1, 2, 4)} == pytest.approx(expected)
    assert [actual[f"eval/pass_at_{k}/b"] for k in (1, 2, 4)] == [0.0] * 3
    assert [actual[f"eval/pass_at_{k}"] for k in (1, 2, 4)] == pytest.approx([1 / 3, (5 / 6 + 1) / 3, 1 / 2])


def test_evaluation_reports_the_weight_version() -> None:
    config = from_dict({"algorithm": "grpo", "run": {"eval_samples": 2}})

    class Answers(FixedFlow):
        def generate(self, prompts: Any, samples: int, greedy: bool = False, held_out: bool = False) -> Rollouts:
            assert samples == (1 if greedy else 2)
            return Rollouts.gather([rollout(0, 1.0, "stop"), rollout(0, 0.0, "stop")][:samples], version=7)

    actual = make_controller(config).evaluate(Answers(config, []), [])  # type: ignore[arg-type]
    assert actual["eval/weight_version"] == 7.0
    assert (actual["eval/reward_greedy"], actual["eval/reward_sampled"]) == (1.0, 0.5)
    assert (actual["eval/pass_at_1"], actual["eval/pass_at_2"]) == (0.5, 1.0)


def test_logprob_diff_metrics_split_stale_tokens_by_hand() -> None:
    """Version 3 sampled the first two tokens of one rollout, version 4 the rest; the trainer differs by tenths."""
    mixed = Turn((1, 2, 3), (-1.0,) * 3, True, 4, ((3, 2), (4, 1)))
    current = Turn((1, 2), (-1.0,) * 2, True, 4)
    prompt = Prompt("p", ())
    rollouts = Rollouts.gather([Rollout(prompt, (Turn((9,)), turn)) for turn in (mixed, current)], version=4)
    batch = TrainBatch.from_rollouts(rollouts)
    errors = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.0, 0.4, 0.5])
    policy = ModelOutput(logprobs=batch.rollout_logprobs + errors)
    actual = logprob_diff_metrics(batch, policy)
    # The third token of the first rollout is of version 4, which has read the two of version 3 again.
    assert actual["rollout/logprob_diff_mean"] == pytest.approx(0.4)
    assert actual["rollout/logprob_diff"] == pytest.approx(0.5)
    assert actual["rollout/logprob_diff_mean_stale"] == pytest.approx(0.15)
    replayed = dataclasses.replace(batch, routing=(torch.zeros(0, 0, 0),) * 2)
    assert logprob_diff_metrics(replayed, policy) == actual and len(actual) == 6
    current_only = TrainBatch.from_rollouts(rollouts.select(torch.tensor([False, True])))
    assert len(logprob_diff_metrics(current_only, ModelOutput(logprobs=current_only.rollout_logprobs))) == 3


def test_vapo_adds_the_nll_of_positive_responses() -> None:
    """The loss has a weighted NLL term over responses with positive reward, and reports it."""
    actual, tables = {}, {}
    for weight in (0.0, 0.1, 0.2):
        options = {"critic_lam": 1.0, "length_adaptive_alpha": 5.0, "positive_nll_coef": weight}
        tree = {"algorithm": "vapo", "options": options, "critic": {"warmup_steps": 0}, "loss": {"entropy_coef": 0.0}}
        config = from_dict(tree)
        flow: Any = FixedFlow(config, ROLLOUTS)
        result = make_controller(config).step(flow, [])
        actual[weight], tables[weight] = result.metrics, flow.policy.table.detach().clone()
        (mini,) = flow.actor_batches
        assert mini.counts is not None and mini.counts.positive_actions == 4  # two responses of two tokens
    assert "actor/nll_loss" not in actual[0.0]
    # Logits of the positive response.
    positive_logits = {weight: float(table[0, 1] + table[1, 4]) for weight, table in tables.items()}
    assert positive_logits[0.0] < positive_logits[0.1] < positive_logits[0.2]
    # All logits are 0 in the first update: each token costs log 6.
    assert actual[0.1]["actor/nll_loss"] == actual[0.2]["actor/nll_loss"] == pytest.approx(math.log(6))


def test_critic_warmup_precedes_policy_updates_and_survives_resume() -> None:
    """VAPO's value pre-training: the critic trains in both warm-up steps, the policy in none."""
    assert from_dict({"algorithm": "vapo"}).critic.warmup_steps == 50  # as in its paper
    config = from_dict({"algorithm": "vapo", "critic": {"warmup_steps": 2}})
    flow: Any = FixedFlow(config, ROLLOUTS)
    controller = make_controller(config)
    tables = []
    for _ in range(4):
        resumed = make_controller(config)
        resumed.load_state_dict(controller.state_dict())
        controller = resumed
        controller.step(flow, [])
        tables.append(flow.policy.table.detach().clone())
    assert len(flow.critic_batches) == 4 and len(flow.actor_batches) == 2
    assert not tables[1].any() and tables[2].any()
    assert flow.calls == ["sleep", "update_weights"] * 4


def test_vapo_lambdas_by_hand() -> None:
    """Two actions, a final reward of 1, values 0, gamma 1: the policy's lambda is 1 - 1/2, from the response length.
    The critic's is 1, and `advantage.lam` is unused."""
    options = {"critic_lam": 1.0, "length_adaptive_alpha": 1.0, "positive_nll_coef": 0.0}
    advantage = {"whiten": False, "gamma": 1.0, "lam": 0.9}
    config = from_dict({"algorithm": "vapo", "options": options, "critic": {"warmup_steps": 0}, "advantage": advantage})
    flow: Any = FixedFlow(config, [rollout(0, 1.0, "stop")])
    batch = make_controller(config).step(flow, []).batch
    assert batch is not None and batch.advantages is not None and batch.returns is not None
    assert batch.advantages[batch.loss_mask].tolist() == pytest.approx([0.5, 1.0])
    assert batch.returns[batch.loss_mask].tolist() == pytest.approx([1.0, 1.0])


def batch_with_kl(tree: dict[str, Any], rewards: tuple[float, float]) -> TrainBatch:
    """Return the batch of a step with two responses to one prompt: (1, 4), which the policy prefers more than the
    reference does, and (2, 3), which it prefers less."""
    config = from_dict(tree)
    likely, unlikely = rollout(0, rewards[0], "stop"), rollout(0, rewards[1], "stop")
    unlikely = dataclasses.replace(unlikely, turns=(unlikely.turns[0], Turn((2, 3), (-1.8, -1.8), True, 0)))
    flow: Any = FixedFlow(config, [likely, unlikely])
    with torch.no_grad():
        flow.policy.table[0, 1] += 1.0
        flow.policy.table[1, 4] += 1.0
    batch = make_controller(config).step(flow, []).batch
    assert batch is not None and batch.advantages is not None
    return batch


KL_LIKELY = 1.0 - math.log((5 + math.e) / 6)
KL_UNLIKELY = -math.log((5 + math.e) / 6)
"""Per-token log-ratios of the two responses to the reference."""


def test_kl_penalty_is_subtracted_from_rewards() -> None:
    """Without std normalisation: half the difference of the rewards, each minus its two tokens' KL."""
    tree = {"algorithm": "dr_grpo", "kl": {"apply_to": "reward", "coef": 0.1, "target": None}}
    batch = batch_with_kl(tree, (1.0, 0.5))
    advantage = (1.0 - 0.2 * KL_LIKELY - (0.5 - 0.2 * KL_UNLIKELY)) / 2
    assert batch.advantages is not None
    assert batch.advantages[batch.loss_mask].tolist() == pytest.approx([advantage] * 2 + [-advantage] * 2, abs=1e-6)


@pytest.mark.parametrize("apply_to", ["reward", "loss", "none"])
@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline", "gspo"])
def test_equal_rewards_give_zero_advantages_for_any_kl_placement(algorithm: str, apply_to: str) -> None:
    """The samples' KL differs; divided by the std, it alone would give advantages of 0.7."""
    kl = {"apply_to": apply_to, "estimator": None, "coef": 0.001, "target": None}
    batch = batch_with_kl({"algorithm": algorithm, "kl": kl}, (1.0, 1.0))
    assert batch.advantages is not None and batch.advantages.tolist() == [0.0] * 6


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_reinforce_pp_subtracts_the_kl_to_go(gamma: float) -> None:
    """arXiv:2501.03262, eq. 9: A_t = r - coef sum_{i >= t} KL_i, then whitened over the action tokens."""
    tree = {"algorithm": "reinforce_pp", "kl": {"coef": 0.5, "target": None}, "advantage": {"gamma": gamma}}
    batch = batch_with_kl(tree, (1.0, 0.0))
    final_rewards = [1.0 - 0.5 * KL_LIKELY, -0.5 * KL_UNLIKELY]
    returns = torch.tensor(
        [[-0.5 * kl + gamma * end, end] for kl, end in zip((KL_LIKELY, KL_UNLIKELY), final_rewards, strict=True)]
    ).view(4)
    expected = (returns - returns.mean()) / returns.std(correction=0)
    assert batch.advantages is not None
    assert batch.advantages[batch.loss_mask].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("name", [name for name, item in RECIPES.items() if "advantage.norm_by_std" in item.defaults])
def test_no_recipe_divides_the_kl_by_the_group_std(name: str) -> None:
    config = from_dict({"algorithm": name})
    assert not (config.advantage.norm_by_std and config.kl.apply_to == "reward"), name


def test_grpo_applies_the_kl_in_the_loss() -> None:
    """arXiv:2402.03300, eq. 3."""
    config = from_dict({"algorithm": "grpo"})
    assert (config.kl.apply_to, config.advantage.estimator, config.advantage.norm_by_std) == ("loss", "grpo", True)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "remax", "reinforce_pp"])
def test_no_kl_metrics_without_a_reference(algorithm: str) -> None:
    """The metrics are absent, not 0, also for stale rollouts, with and without old log-probs."""
    stale = dataclasses.replace(rollout(0, 1.0, "stop"), turns=(Turn((9,)), Turn((1, 4), (-1.8, -1.8), True, -1)))
    for updates in (1, 2):
        config = from_dict({"algorithm": algorithm, "kl": {"apply_to": "none"}, "run": {"num_update": updates}})
        flow: Any = FixedFlow(config, [stale, rollout(0, 0.0, "stop")])
        metrics = make_controller(config).step(flow, [Prompt("0", ())]).metrics
        assert "actor/grad_norm" in metrics or "actor/ppo_kl" in metrics
        assert not {"actor/kl_to_reference", "actor/kl_coef", "actor/kl_loss"} & metrics.keys()


def test_a_new_kl_coefficient_replaces_the_adapted_one() -> None:
    """Also in controllers inside others, and on resuming within a stage. Other changes leave the adapted one."""
    config = from_dict({"algorithm": "grpo", "kl": {"coef": 0.1, "target": 0.01, "horizon": 10}})

    class Nested(GRPOController):
        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.inner = GRPOController(config)

    controller = Nested(config)
    for part in (controller, controller.inner):
        part.kl = part.kl.updated(1.0, rollouts=10)  # the most allowed: 0.2 more
        assert part.kl.coef == pytest.approx(0.12)
    clipped = change_config(config, {"loss": {"clip": 0.1}, "kl": {"target": 0.02}}, "")
    controller.set_config(clipped)
    assert (controller.kl.coef, controller.kl.target) == (pytest.approx(0.12), 0.02)
    assert controller.config.loss.clip == controller.inner.config.loss.clip == 0.1
    staged = change_config(clipped, {"kl": {"coef": 0.15}}, "")
    controller.set_config(staged)
    assert (controller.kl.coef, controller.inner.kl.coef) == (0.15, 0.15)
    controller.kl = controller.kl.updated(1.0, rollouts=10)
    resumed = Nested(config)
    resumed.set_config(staged)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.kl == controller.kl and resumed.kl.coef == pytest.approx(0.18)
