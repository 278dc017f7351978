"""Which rollouts losses and statistics are about: aborted ones never, cut-off ones as `loss.truncated` says."""

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
from megarl.controllers.controller import StepResult, make_controller
from megarl.controllers.evaluation import pass_at_k_metrics
from megarl.controllers.mini_batches import split_mini_batches
from megarl.controllers.policy_gradient import apply_loss_masks, select_trainable
from megarl.controllers.rollout_correction import logprob_diff_metrics
from megarl.types import ModelOutput, Prompt, Rollout, Rollouts, Status, TrainBatch, Turn
from megarl.workers.futures import UpdateMetrics

sys.path.insert(0, str(Path(__file__).parent))

from test_learning import TableFlow  # noqa: E402

pytestmark = pytest.mark.alone

FIRST = 0.5**0.5  # of rewards 1 and 0: (1 - 1/2) / sqrt(1/2)


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


class Given(TableFlow):
    """These rollouts, and what each role was asked to learn from."""

    def __init__(self, config: Config, rollouts: list[Rollout]) -> None:
        super().__init__(config)
        self.rollouts = rollouts
        self.actor_saw: list[TrainBatch] = []
        self.critic_saw: list[TrainBatch] = []
        update = self.policy.update
        self.policy.update = lambda batch, loss: (self.actor_saw.append(batch), update(batch, loss))[1]  # type: ignore

    def generate(self, items: Any, samples: int, greedy: bool = False, held_out: bool = False) -> Rollouts:
        return Rollouts.gather(self.rollouts)

    def score(self, rollouts: Rollouts) -> Rollouts:
        return rollouts

    def update(self, batch: TrainBatch, loss_fn: Any) -> UpdateMetrics:
        self.critic_saw.append(batch)
        return super().update(batch, loss_fn)


def step(
    algorithm: str, rollouts: list[Rollout], truncated: str = "train", updates: int = 1
) -> tuple[Given, StepResult]:
    tree = {"algorithm": algorithm, "loss": {"truncated": truncated}, "run": {"num_update": updates}}
    advantage = {"whiten": False, "gamma": 1.0, "lam": 1.0}
    config = from_dict(tree | {"kl": {"apply_to": "reward", "coef": 0.0, "target": None}, "advantage": advantage})
    flow: Any = Given(config, rollouts)
    controller = make_controller(config)
    return flow, controller.step(flow, [])


def learned(batches: list[TrainBatch]) -> list[float]:
    """The advantage of each token that was in a loss, by sequence."""
    actual = []
    for batch in batches:
        assert batch.advantages is not None and batch.loss_weights is not None
        assert torch.equal(batch.loss_weights > 0, batch.loss_mask)
        actual += batch.advantages[batch.loss_mask].tolist()
    return actual


@pytest.mark.parametrize(
    ("truncated", "groups", "advantages"),
    [
        # Group 1 of rewards 1, 0, 0: mean 1/3, sample standard deviation sqrt(1/3).
        ("train", [0, 0, 1, 1, 1], [FIRST, -FIRST, *(x * 3**0.5 for x in (2 / 3, -1 / 3, -1 / 3))]),
        ("mask", [0, 0, 1, 1, 1], [FIRST, -FIRST, 2 / 3 * 3**0.5]),
        ("drop", [0, 0, 1], [FIRST, -FIRST, 0.0]),
    ],
)
def test_groups_by_hand(truncated: str, groups: list[int], advantages: list[float]) -> None:
    flow, result = step("grpo", ROLLOUTS, truncated)
    assert result.batch is not None and result.batch.group.tolist() == groups
    expected = [value for value in advantages for _ in range(2)]
    assert learned(flow.actor_saw) == pytest.approx(expected, abs=1e-5)
    assert (
        result.rollouts is not None and list(result.rollouts.local) == ROLLOUTS and result.trained_rollouts is not None
    )
    assert not result.trained_rollouts.has_status("aborted").any() and len(result.trained_rollouts) == len(groups)


@pytest.mark.parametrize(
    ("truncated", "rewards"), [("train", [1, 0, 1, 0, 0]), ("mask", [1, 0, 1]), ("drop", [1, 0, 1])]
)
def test_ppo_by_hand(truncated: str, rewards: list[float]) -> None:
    """The critic says 0 everywhere, gamma and lambda are 1: each action has its rollout's reward."""
    flow, result = step("ppo", ROLLOUTS, truncated)
    expected = [float(reward) for reward in rewards for _ in range(2)]
    assert learned(flow.actor_saw) == pytest.approx(expected)
    assert learned(flow.critic_saw) == pytest.approx(expected)
    assert all(math.isfinite(value) for value in result.metrics.values())


def unscored(item: Rollout) -> Rollout:
    return dataclasses.replace(item, reward=0.0, unscored={"gsm8k": "it raised"})


def test_a_reward_that_failed_is_no_reward_of_0() -> None:
    """Of group 0 the third is left out, so the others are as if they were alone; of group 1 nothing is left."""
    argument = [*ROLLOUTS[:3], unscored(rollout(0, 0.0, "stop")), *map(unscored, ROLLOUTS[3:6])]
    flow, result = step("grpo", argument)
    assert learned(flow.actor_saw) == pytest.approx([FIRST] * 2 + [-FIRST] * 2, abs=1e-5)
    assert result.trained_rollouts is not None and len(result.trained_rollouts) == 2
    flow, result = step("ppo", argument)
    assert learned(flow.actor_saw) == learned(flow.critic_saw) == pytest.approx([1, 1, 0, 0])


def of_turns(group: int, outcome: float, *rewards: float) -> Rollout:
    """Each turn of the policy's is two tokens, a tool's answer follows it; `reward` is of all."""
    turns = [Turn((9,))]
    for reward in rewards:
        turns += [Turn((1, 4), (-1.8, -1.8), True, 0, reward=reward), Turn((3,))]
    return Rollout(Prompt(str(group), ()), tuple(turns), "stop", outcome + sum(rewards), group=group)


def test_ppo_is_given_each_turns_reward_where_it_is() -> None:
    """The critic says 0 everywhere, gamma and lambda are 1: an action has what comes from there on."""
    flow, result = step("ppo", [of_turns(0, 1.0, 0.5, -0.25), of_turns(0, 2.0, 0.0)])
    assert result.batch is not None and result.batch.rewards is not None
    assert result.batch.rewards.tolist() == [0, 0, 0.5, 0, 0, 0.75, 0, 0, 0, 2.0, 0]
    expected = [1.25, 1.25, 0.75, 0.75, 2.0, 2.0]
    assert learned(flow.actor_saw) == learned(flow.critic_saw) == pytest.approx(expected)


def test_groups_compare_outcomes_with_turns() -> None:
    """1 + 0.5 - 0.25 against 0.25: half of the difference of 1 to each side, over its deviation."""
    flow, _ = step("grpo", [of_turns(0, 1.0, 0.5, -0.25), of_turns(0, 0.25, 0.0)])
    assert learned(flow.actor_saw) == pytest.approx([FIRST] * 4 + [-FIRST] * 2, abs=1e-5)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize(
    ("rollouts", "truncated", "updates"),
    [
        ([], "train", 0),
        (ROLLOUTS[-2:], "train", 0),
        (ROLLOUTS[4:], "drop", 0),
        (ROLLOUTS[4:6], "mask", 0),
        ([rollout(0, 1.0, "length", tokens=0)], "train", 0),  # no room for an answer
        ([unscored(rollout(0, 1.0, "stop"))] * 2, "train", 0),
        (ROLLOUTS[:3], "train", 2),  # fewer sequences than mini-batches
    ],
    ids=["nothing", "all aborted", "all dropped", "all masked", "no action", "none scored", "two for three updates"],
)
def test_what_is_left_is_little(algorithm: str, rollouts: list[Rollout], truncated: str, updates: int) -> None:
    flow, result = step(algorithm, rollouts, truncated, updates=3)
    assert len(flow.actor_saw) == updates
    assert len(flow.critic_saw) == (updates if algorithm == "ppo" else 0)
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert flow.calls == ["sleep", "push"]
    assert not flow.policy.table.detach().isnan().any()


def test_the_mask_is_of_its_own_sequences() -> None:
    config = from_dict({"loss": {"truncated": "mask"}, "run": {"num_update": 5}})
    selected = select_trainable(Rollouts.gather(ROLLOUTS), config)
    batch = apply_loss_masks(TrainBatch.from_rollouts(selected), selected, config)
    assert batch.loss_mask.view(5, 3).tolist() == [[False, True, True]] * 3 + [[False] * 3] * 2
    parts = list(split_mini_batches(batch, config, seed=1))
    assert len(parts) == 3
    assert all(float(part.loss_weights.sum()) == pytest.approx(1.0) for part in parts if part.loss_weights is not None)


def test_evaluation_is_of_what_was_not_aborted() -> None:
    config = from_dict({"algorithm": "grpo"})
    flow: Any = Given(config, ROLLOUTS[:3])
    actual = make_controller(config).evaluate(flow, [])
    assert actual["eval/reward_greedy"] == actual["eval/reward_sampled"] == 0.5
    assert actual["eval/aborted_frac_greedy"] == pytest.approx(1 / 3)


def test_pass_at_k_of_several_samples_by_hand() -> None:
    """Two of four are right of prompt 0, one of two scored ones of prompt 1, none of prompt 2, which is of a source."""
    named = Prompt("p", (), data_source="b")
    answers = [rollout(0, float(number < 2), "stop") for number in range(4)]
    answers += [rollout(1, 1.0, "stop"), rollout(1, 0.0, "stop"), rollout(1, 1.0, "aborted")]
    answers += [unscored(rollout(1, 1.0, "stop"))]
    answers += [replace(rollout(2, 0.0, "stop"), prompt=named) for _ in range(4)]
    actual = pass_at_k_metrics(Rollouts.gather(answers), 4)
    of_a = {1: (1 / 2 + 1 / 2) / 2, 2: (5 / 6 + 1) / 2, 4: 1.0}  # prompt 1 has too few for 4
    assert {k: actual[f"eval/pass_at_{k}/other"] for k in (1, 2, 4)} == pytest.approx(of_a)
    assert [actual[f"eval/pass_at_{k}/b"] for k in (1, 2, 4)] == [0.0] * 3
    assert [actual[f"eval/pass_at_{k}"] for k in (1, 2, 4)] == pytest.approx([1 / 3, (5 / 6 + 1) / 3, 1 / 2])


def test_an_evaluation_is_stamped_with_the_weights_that_answered() -> None:
    config = from_dict({"algorithm": "grpo", "run": {"eval_samples": 2}})

    class Answers(Given):
        def generate(self, prompts: Any, samples: int, greedy: bool = False, held_out: bool = False) -> Rollouts:
            assert samples == (1 if greedy else 2)
            return Rollouts.gather([rollout(0, 1.0, "stop"), rollout(0, 0.0, "stop")][:samples], version=7)

    actual = make_controller(config).evaluate(Answers(config, []), [])  # type: ignore[arg-type]
    assert actual["eval/weight_version"] == 7.0
    assert (actual["eval/reward_greedy"], actual["eval/reward_sampled"]) == (1.0, 0.5)
    assert (actual["eval/pass_at_1"], actual["eval/pass_at_2"]) == (0.5, 1.0)


def test_log_probs_of_older_weights_are_apart_by_hand() -> None:
    """Version 3 wrote the first two tokens of one rollout, version 4 the rest; the trainer is tenths off."""
    aged = Turn((1, 2, 3), (-1.0,) * 3, True, 4, ((3, 2), (4, 1)))
    fresh = Turn((1, 2), (-1.0,) * 2, True, 4)
    prompt = Prompt("p", ())
    rollouts = Rollouts.gather([Rollout(prompt, (Turn((9,)), turn)) for turn in (aged, fresh)], version=4)
    batch = TrainBatch.from_rollouts(rollouts)
    off = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.0, 0.4, 0.5])
    policy = ModelOutput(logprobs=batch.rollout_logprobs + off)
    actual = logprob_diff_metrics(batch, policy)
    # The third token of the first one is of version 4, too, but behind what version 3 wrote.
    assert actual["rollout/logprob_diff_mean"] == pytest.approx(0.45)
    assert actual["rollout/logprob_diff"] == pytest.approx(0.5)
    assert actual["rollout/logprob_diff_mean_stale_prefix"] == pytest.approx(0.3)
    assert actual["rollout/logprob_diff_mean_stale"] == pytest.approx(0.15)
    replayed = dataclasses.replace(batch, routing=(torch.zeros(0, 0, 0),) * 2)
    assert logprob_diff_metrics(replayed, policy) == actual and len(actual) == 9
    plain = TrainBatch.from_rollouts(rollouts.select(torch.tensor([False, True])))
    assert len(logprob_diff_metrics(plain, ModelOutput(logprobs=plain.rollout_logprobs))) == 3


def test_vapo_learns_from_what_went_well_besides() -> None:
    """The likelihood of answers with a reward above 0 is a term of the loss, by its weight, and is told."""
    actual, tables = {}, {}
    for weight in (0.0, 0.1, 0.2):
        options = {"critic_lam": 1.0, "length_adaptive_alpha": 5.0, "positive_nll_coef": weight}
        tree = {"algorithm": "vapo", "options": options, "critic": {"warmup_steps": 0}, "loss": {"entropy_coef": 0.0}}
        config = from_dict(tree)
        flow: Any = Given(config, ROLLOUTS)
        result = make_controller(config).step(flow, [])
        actual[weight], tables[weight] = result.metrics, flow.policy.table.detach().clone()
        (mini,) = flow.actor_saw
        assert mini.counts is not None and mini.counts.positive_actions == 4  # two answers of two tokens
    assert "actor/nll_loss" not in actual[0.0]
    right = {weight: float(table[0, 1] + table[1, 4]) for weight, table in tables.items()}  # of the good answer
    assert right[0.0] < right[0.1] < right[0.2]
    # All logits are 0 in the first update: each token costs log 6.
    assert actual[0.1]["actor/nll_loss"] == actual[0.2]["actor/nll_loss"] == pytest.approx(math.log(6))


def test_a_critic_warms_up_before_the_policy_moves_and_a_resume_does_not_begin_it_anew() -> None:
    """VAPO's value pre-training: of two such steps the critic learns from each, the policy from none."""
    assert from_dict({"algorithm": "vapo"}).critic.warmup_steps == 50  # as in its paper
    config = from_dict({"algorithm": "vapo", "critic": {"warmup_steps": 2}})
    flow: Any = Given(config, ROLLOUTS)
    controller = make_controller(config)
    tables = []
    for _ in range(4):
        again = make_controller(config)
        again.load_state_dict(controller.state_dict())
        controller = again
        controller.step(flow, [])
        tables.append(flow.policy.table.detach().clone())
    assert len(flow.critic_saw) == 4 and len(flow.actor_saw) == 2
    assert not tables[1].any() and tables[2].any()
    assert flow.calls == ["sleep", "push"] * 4


def test_vapos_lambdas_by_hand() -> None:
    """Of two actions and a reward of 1 at the end, with values of 0 and gamma 1: the policy's lambda is 1 - 1/2, by the
    answer's length, the critic's 1, and `advantage.lam` is nobody's."""
    options = {"critic_lam": 1.0, "length_adaptive_alpha": 1.0, "positive_nll_coef": 0.0}
    advantage = {"whiten": False, "gamma": 1.0, "lam": 0.9}
    config = from_dict({"algorithm": "vapo", "options": options, "critic": {"warmup_steps": 0}, "advantage": advantage})
    flow: Any = Given(config, [rollout(0, 1.0, "stop")])
    batch = make_controller(config).step(flow, []).batch
    assert batch is not None and batch.advantages is not None and batch.returns is not None
    assert batch.advantages[batch.loss_mask].tolist() == pytest.approx([0.5, 1.0])
    assert batch.returns[batch.loss_mask].tolist() == pytest.approx([1.0, 1.0])


def with_kl(tree: dict[str, Any], rewards: tuple[float, float]) -> TrainBatch:
    """The batch of a step of two answers of one prompt, of which the policy has come to write the first, (1, 4), more
    often than the reference, and the second, (2, 3), less often: log-ratios of d and -e at each of the two tokens."""
    config = from_dict(tree)
    often, seldom = rollout(0, rewards[0], "stop"), rollout(0, rewards[1], "stop")
    seldom = dataclasses.replace(seldom, turns=(seldom.turns[0], Turn((2, 3), (-1.8, -1.8), True, 0)))
    flow: Any = Given(config, [often, seldom])
    with torch.no_grad():
        flow.policy.table[0, 1] += 1.0
        flow.policy.table[1, 4] += 1.0
    batch = make_controller(config).step(flow, []).batch
    assert batch is not None and batch.advantages is not None
    return batch


MORE = 1.0 - math.log((5 + math.e) / 6)
LESS = -math.log((5 + math.e) / 6)
"""What the log-probs of the two answers' tokens are above the reference's."""


def test_a_kl_in_the_reward_is_taken_off() -> None:
    """Without the deviation: half of the difference of the rewards, each less its two tokens' KL."""
    tree = {"algorithm": "dr_grpo", "kl": {"apply_to": "reward", "coef": 0.1, "target": None}}
    batch = with_kl(tree, (1.0, 0.5))
    half = (1.0 - 0.2 * MORE - (0.5 - 0.2 * LESS)) / 2
    assert batch.advantages is not None
    assert batch.advantages[batch.loss_mask].tolist() == pytest.approx([half] * 2 + [-half] * 2, abs=1e-6)


@pytest.mark.parametrize("apply_to", ["reward", "loss", "none"])
@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline", "gspo"])
def test_a_group_of_equal_rewards_has_advantage_zero_wherever_the_kl_is(algorithm: str, apply_to: str) -> None:
    """The KL of its samples differs: divided by the deviation, it alone would be advantages of 0.7."""
    kl = {"apply_to": apply_to, "estimator": None, "coef": 0.001, "target": None}
    batch = with_kl({"algorithm": algorithm, "kl": kl}, (1.0, 1.0))
    assert batch.advantages is not None and batch.advantages.tolist() == [0.0] * 6


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_reinforce_pp_takes_off_the_kl_from_a_token_on(gamma: float) -> None:
    """arXiv:2501.03262, eq. 9: A_t = r - coef sum_{i >= t} KL_i, then whitened over the action tokens."""
    tree = {"algorithm": "reinforce_pp", "kl": {"coef": 0.5, "target": None}, "advantage": {"gamma": gamma}}
    batch = with_kl(tree, (1.0, 0.0))
    last = [1.0 - 0.5 * MORE, -0.5 * LESS]
    returns = torch.tensor([[-0.5 * kl + gamma * end, end] for kl, end in zip((MORE, LESS), last, strict=True)]).view(4)
    expected = (returns - returns.mean()) / returns.std(correction=0)
    assert batch.advantages is not None
    assert batch.advantages[batch.loss_mask].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("name", [name for name, item in RECIPES.items() if "advantage.norm_by_std" in item.defaults])
def test_no_recipe_divides_a_kl_by_a_groups_deviation(name: str) -> None:
    config = from_dict({"algorithm": name})
    assert not (config.advantage.norm_by_std and config.kl.apply_to == "reward"), name


def test_grpo_has_the_kl_in_the_loss() -> None:
    """arXiv:2402.03300, eq. 3."""
    config = from_dict({"algorithm": "grpo"})
    assert (config.kl.apply_to, config.advantage.estimator, config.advantage.norm_by_std) == ("loss", "grpo", True)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "remax", "reinforce_pp"])
def test_without_a_reference_there_is_no_kl_to_it(algorithm: str) -> None:
    """Not a 0: also with a lag, and with log-probs from before the update or without."""
    aged = dataclasses.replace(rollout(0, 1.0, "stop"), turns=(Turn((9,)), Turn((1, 4), (-1.8, -1.8), True, -1)))
    for updates in (1, 2):
        config = from_dict({"algorithm": algorithm, "kl": {"apply_to": "none"}, "run": {"num_update": updates}})
        flow: Any = Given(config, [aged, rollout(0, 0.0, "stop")])
        metrics = make_controller(config).step(flow, [Prompt("0", ())]).metrics
        assert "actor/grad_norm" in metrics or "actor/ppo_kl" in metrics
        assert not {"actor/kl_to_reference", "actor/kl_coef", "actor/kl_loss"} & metrics.keys()
