"""A branched episode equals an unbranched one: action tokens have the same advantages, returns, weights and metrics."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import as_ranks

sys.path.insert(0, str(Path(__file__).parent))

from scripted_flow import ScriptedFlow  # noqa: E402

from megarl.algorithms.advantages import (
    gae,  # noqa: E402
    token_rewards,  # noqa: E402
)
from megarl.config import Config, from_dict  # noqa: E402
from megarl.controllers.controller import make_controller  # noqa: E402
from megarl.controllers.mini_batches import (
    set_loss_weights,  # noqa: E402
    split_mini_batches,
)
from megarl.controllers.pf_ppo import (
    ReplayBuffer,  # noqa: E402
    reliable_mask,  # noqa: E402
)
from megarl.types import (  # noqa: E402
    LOCAL,
    Comm,
    Counts,
    Episodes,
    ModelOutput,
    Prompt,
    Rollout,
    Rollouts,
    Status,
    TrainBatch,
    Turn,
    as_branches,
)
from megarl.workers.futures import Future, UpdateMetrics  # noqa: E402

pytestmark = pytest.mark.alone

VOCABULARY = 4096
"""Each action token has a unique id from 1; all other tokens are 0."""


def episodes(step: int, groups: int = 5, samples: int = 4) -> list[list[Rollout]]:
    """Return each episode's branches, ordered by group."""
    draw, token, episode_groups = random.Random(f"episodes/{step}"), step % 100 * 1000, []
    for group in range(groups):
        for sample in range(samples):
            status: Status = draw.choices(["stop", "length", "aborted"], (8, 2, 1))[0]
            reward = draw.choice([0.0, 0.25, 1.0])
            branches, branch_rollouts = draw.choice([1, 1, 2, 3, 4]), []
            for branch in range(branches):
                turns = [Turn((0,) * draw.randint(1, 5))]
                for _ in range(draw.randint(1, 3)):
                    count = draw.randint(1, 6)
                    ids, logprobs = range(token + 1, token + 1 + count), [-draw.random() for _ in range(count)]
                    turn_reward = draw.choice([0.0, 0.5]) if branch == branches - 1 and status != "aborted" else 0.0
                    turns += [Turn(ids, logprobs, True, 0, reward=turn_reward), Turn((0,) * draw.randint(0, 3))]
                    token += count
                branch_rollouts.append(Rollout(Prompt(f"{step}/{group}", ()), tuple(turns), status, group=group))
            reward += sum(turn.reward for turn in branch_rollouts[-1].turns)
            unscored = {"part": "it raised"} if draw.random() < 0.1 else {}
            parts = {"right": float(reward >= 1)}
            branch_rollouts = [
                replace(item, reward=0.0 if unscored else reward, reward_parts=parts) for item in branch_rollouts
            ]
            episode_groups.append(
                list(as_branches([replace(item, unscored=unscored) for item in branch_rollouts], sample))
            )
    assert token < step % 100 * 1000 + 1000
    return episode_groups


def join_branches(branches: Sequence[Rollout]) -> Rollout:
    """Return a rollout with the actions of all branches in one sequence."""
    turns = tuple(turn for item in branches for turn in item.turns)
    return replace(branches[0], turns=turns, episode=-1)


class RecordingFlow:
    """A flow whose roles' outputs depend on token ids only; it records every update."""

    def __init__(self, config: Config, branched: bool, comm: Comm, world: int) -> None:
        self.config, self.branched, self.comm, self.world = config, branched, comm, world
        numbers = torch.Generator().manual_seed(1)
        self.columns = torch.randn(3, VOCABULARY, generator=numbers)
        self.rollout = self.reward = self.loader = self.clock = self
        self.phase = lambda name: nullcontext()
        self.actor, self.critic, self.reference = Role(self, "actor"), Role(self, "critic"), Role(self, "reference")
        self.teacher = self.reference
        self.weights = {"right": 0.5}
        self.step = 0
        self.updates: list[dict[str, Any]] = []

    def generate(self, items: Any, samples: int, greedy: bool = False, held_out: bool = False) -> Rollouts:
        """Return every `world`-th group."""
        all_episodes = episodes(100 + self.step if greedy else self.step, samples=samples)
        local_episodes = [item for item in all_episodes if item[0].group % self.world == self.comm.rank]
        local_rollouts = [
            branch for item in local_episodes for branch in (item if self.branched else [join_branches(item)])
        ]
        return Rollouts.gather(local_rollouts, [item.group for item in local_rollouts], self.comm)

    def generate_again(self, rollouts: Rollouts, samples: int = 1, greedy: bool = True) -> Rollouts:
        return self.generate((), samples, greedy)

    def score(self, rollouts: Rollouts) -> Rollouts:
        return rollouts

    def sleep(self) -> None: ...

    def update_weights(self, actor: Any) -> None:
        self.step += 1


class Role:
    def __init__(self, flow: RecordingFlow, name: str) -> None:
        self.flow, self.name = flow, name

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        """Return log-probs near the engine's, for the policy and the reference."""
        policy_noise, reference_noise, values = self.flow.columns[:, batch.tokens.long()]
        error = 0.1 * policy_noise if self.name == "actor" else 0.1 * reference_noise
        return Future.completed(ModelOutput(logprobs=batch.rollout_logprobs + error, values=values))

    def update(self, batch: TrainBatch, loss_fn: Any) -> UpdateMetrics:
        """Record loss and batch columns of each action by token id."""
        policy_noise = self.flow.columns[0][batch.tokens.long()]
        logprobs, zeros = batch.rollout_logprobs + 0.1 * policy_noise + 0.02, torch.zeros_like(policy_noise)
        output = ModelOutput(logprobs=logprobs, entropy=zeros, values=zeros)
        result, table = loss_fn(output, batch), {}
        columns = {"loss": result.loss, **{name: getattr(batch, name) for name in batch.columns()}}
        for name, column in columns.items():
            by_token = torch.zeros(VOCABULARY, dtype=torch.float64)
            by_token[batch.tokens[batch.loss_mask].long()] = column[batch.loss_mask].double()
            table[name] = batch.all_reduce(by_token)
        assert batch.counts is not None
        self.flow.updates.append({"critic": float(self.name == "critic"), "tokens": batch.counts.actions, **table})
        return UpdateMetrics({})


TREES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo", "kl": {"apply_to": "reward", "coef": 0.5}},
    "grpo, a mean over sequences": {"algorithm": "grpo", "loss": {"agg_mode": "seq-mean-token-mean"}},
    "dr_grpo": {"algorithm": "dr_grpo"},
    "gdpo": {"algorithm": "gdpo"},
    "rloo": {"algorithm": "rloo", "loss": {"agg_mode": "seq-mean-token-mean", "truncated": "mask"}},
    "opo": {"algorithm": "opo", "loss": {"truncated": "drop"}},
    "reinforce_pp": {"algorithm": "reinforce_pp", "kl": {"apply_to": "reward", "coef": 0.5}},
    "reinforce_pp_baseline": {"algorithm": "reinforce_pp_baseline"},
    "remax": {"algorithm": "remax", "loss": {"agg_mode": "seq-mean-token-mean"}},
    "dapo": {"algorithm": "dapo", "loss": {"scale_factor": 20}, "options": {"max_num_gen_batches": 1}},
    "clip_cov": {"algorithm": "clip_cov"},
    "corrected": {"algorithm": "grpo", "correction": {"kind": "tis", "level": "sequence", "high": 1.2}},
    "rejected": {"algorithm": "grpo", "correction": {"kind": "reject", "high": 1.25, "low": 0.8}},
    "ppo": {"algorithm": "ppo", "kl": {"apply_to": "reward", "coef": 0.5}, "advantage": {"gamma": 0.9, "lam": 0.8}},
    "ppo, a mean over sequences": {
        "algorithm": "ppo",
        "loss": {"agg_mode": "seq-mean-token-mean"},
        "options": {"critic_lam": 1.0},
    },
    "vapo": {"algorithm": "vapo", "options": {"length_adaptive_alpha": 0.5}, "critic": {"warmup_steps": 0}},
    "distill": {"algorithm": "distill", "options": {"reward_coef": 0.5}, "loss": {"agg_mode": "seq-mean-token-mean"}},
    "pf_ppo": {"algorithm": "pf_ppo", "options": {"drop_prob": 0.7, "buffer_size": 12}, "kl": {"apply_to": "none"}},
}


def run_steps(tree: dict[str, Any], branched: bool, comm: Comm, world: int) -> list[dict[str, Any]]:
    """Run three steps; return all updates and some metrics."""
    config = from_dict(tree | {"run": {"num_update": 4, "ppo_epochs": 2}, "rollout": {"samples_per_prompt": 4}})
    controller, flow = make_controller(config), RecordingFlow(config, branched, comm, world)
    prompts = [Prompt(str(i), ()) for i in range(5)]
    metrics = [controller.step(flow, prompts).metrics for _ in range(3)]  # type: ignore[arg-type]
    names = ("rollout/filtered_frac", "rollout/buffer_size", "rollout/reward_greedy", "actor/kl_coef")
    return [*flow.updates, *({name: item[name] for name in names if name in item} for item in metrics)]


@pytest.mark.parametrize("name", TREES)
def test_branches_match_unbranched_episodes(name: str) -> None:
    """Equal up to rounding: sums of KL are split differently."""
    expected = run_steps(TREES[name], False, LOCAL, 1)
    assert len(expected) in (15, 27) and all(actual_step["loss"].any() for actual_step in expected[:-3])
    actual = run_steps(TREES[name], True, LOCAL, 1)
    # Marks are sampled by token position, which differs.
    excluded = {"marked", "loss"} if name == "clip_cov" else set()
    for actual_step, expected_step in zip(actual, expected, strict=True):
        assert actual_step.keys() == expected_step.keys()
        for column in actual_step.keys() - excluded:
            torch.testing.assert_close(actual_step[column], expected_step[column], rtol=2e-5, atol=2e-6, msg=column)


@pytest.mark.parametrize("name", TREES)
def test_branches_do_not_depend_on_world_size(name: str) -> None:
    single_rank = run_steps(TREES[name], True, LOCAL, 1)
    first, *other_ranks = as_ranks(3, lambda comm: run_steps(TREES[name], True, comm, 3))
    for steps in other_ranks:
        torch.testing.assert_close(steps, first, rtol=0, atol=0)
    torch.testing.assert_close(first, single_rank, rtol=1e-5, atol=1e-6)


def test_single_branch_episodes_match_rollouts_without_ids() -> None:
    """An episode of one branch equals a rollout without episode id, bitwise."""
    all_rollouts = [join_branches(branches) for branches in episodes(0)]
    for tree in TREES.values():
        config = from_dict(tree | {"run": {"num_update": 2}})
        with_ids = [replace(rollout, episode=number) for number, rollout in enumerate(all_rollouts)]
        batch, batch_with_ids = (TrainBatch.from_rollouts(rollouts) for rollouts in (all_rollouts, with_ids))
        batch_with_ids = batch_with_ids.with_(episode=torch.arange(len(all_rollouts)))
        for batch_mini, with_ids_mini in zip(
            split_mini_batches(batch, config, 3), split_mini_batches(batch_with_ids, config, 3), strict=True
        ):
            assert batch_mini.loss_weights is not None and with_ids_mini.loss_weights is not None
            assert (
                torch.equal(batch_mini.loss_weights, with_ids_mini.loss_weights)
                and batch_mini.counts == with_ids_mini.counts
            )


# --- by hand --------------------------------------------------------------------------------------------------


def make_rollout(group: int, reward: float, actions: int, episode: int = -1) -> Rollout:
    turns = (Turn((9,)), Turn(range(1, 1 + actions), (-1.0,) * actions, True, 0))
    return Rollout(Prompt(str(group), ()), turns, "stop", reward, group=group, episode=episode)


BRANCHED = [make_rollout(0, 1.0, 1, 5), make_rollout(0, 1.0, 3, 5), make_rollout(0, 0.0, 2), make_rollout(0, 0.0, 2)]
"""Three episodes of a prompt, with rewards 1, 0, 0 and 4, 2, 2 action tokens; the first has two branches."""


def action_values(flow: Any, name: str) -> list[float]:
    (batch,) = flow.batches
    return getattr(batch, name)[batch.loss_mask].tolist()


class FixedFlow(ScriptedFlow):
    def __init__(self, config: Config, rollouts: Sequence[Rollout]) -> None:
        super().__init__(config, [])
        self.rollouts = rollouts
        self.batches: list[TrainBatch] = []
        update = self.policy.update
        self.policy.update = lambda batch, loss: (self.batches.append(batch), update(batch, loss))[1]  # type: ignore

    def generate(self, items: Any, samples: int, greedy: bool = False, held_out: bool = False) -> Rollouts:
        return Rollouts.gather(self.rollouts)


def test_group_advantages_by_hand() -> None:
    """The mean is 1/3, not 1/2; OPO's baseline is (4 * 1) / (4 + 2 + 2) = 1/2; each episode weighs a third."""
    for kind, first_advantage in (("grpo", 2 / 3), ("rloo", 1.0), ("opo", 1 / 2)):
        tree = {
            "algorithm": "grpo",
            "advantage": {"estimator": kind, "norm_by_std": False},
            "loss": {"agg_mode": "seq-mean-token-mean"},
        }
        config = from_dict(tree | {"kl": {"apply_to": "none"}})
        flow: Any = FixedFlow(config, BRANCHED)
        make_controller(config).step(flow, [])
        other_advantage = {"grpo": -1 / 3, "rloo": -1 / 2, "opo": -1 / 2}[kind]
        assert action_values(flow, "advantages") == pytest.approx([first_advantage] * 4 + [other_advantage] * 4)
        assert action_values(flow, "loss_weights") == pytest.approx([1 / 12] * 4 + [1 / 6] * 4)


def test_gae_across_branches_by_hand() -> None:
    """With gamma 1 and lambda 0, an advantage is the next action's value, across branches, minus its own; the last
    action has the reward instead."""
    batch = TrainBatch.from_rollouts(BRANCHED[:2])
    values = torch.tensor([9.0, 0.1, 9.0, 0.2, 0.3, 0.4])
    cu = batch.cu_episodes
    rewards = token_rewards(torch.tensor([1.0]), cu, batch.loss_mask)
    assert rewards.tolist() == [0, 0, 0, 0, 0, 1.0]
    advantages, returns = gae(rewards, values, batch.loss_mask, cu, 1.0, 0.0)
    assert advantages.tolist() == pytest.approx([0, 0.1, 0, 0.1, 0.1, 0.6])
    assert returns.tolist() == pytest.approx([0, 0.2, 0, 0.3, 0.4, 1.0])
    _, returns = gae(rewards, values, batch.loss_mask, cu, 1.0, 1.0)
    assert returns.tolist() == pytest.approx([0, 1, 0, 1, 1, 1])


def test_loss_weights_by_hand() -> None:
    batch = TrainBatch.from_rollouts(BRANCHED)
    for mean, weights in (("token-mean", [1 / 8] * 8), ("seq-mean-token-sum-norm", [1 / 21] * 8)):
        config = from_dict({"loss": {"agg_mode": mean, "scale_factor": 7}})
        mini = set_loss_weights(batch, torch.tensor([1, 3, 2, 2]), config)
        assert mini.loss_weights is not None
        assert mini.loss_weights[mini.loss_mask].tolist() == pytest.approx(weights)
        assert mini.counts == Counts(actions=8, sequences=4, positive_actions=4)


def test_mini_batches_keep_branches_together() -> None:
    all_rollouts = [
        first_epoch
        for sample in range(6)
        for first_epoch in as_branches([make_rollout(0, 1.0, 2)] * (1 + sample % 3), sample)
    ]
    batch = TrainBatch.from_rollouts(all_rollouts)
    for seed in range(5):
        parts = list(split_mini_batches(batch, from_dict({"run": {"num_update": 4, "ppo_epochs": 2}}), seed))
        assert [len(part.episodes) for part in parts] == [3] * 4
        for first_epoch, second_epoch in (parts[:2], parts[2:]):
            numbers = [
                sorted(part.episode.tolist()) for part in (first_epoch, second_epoch) if part.episode is not None
            ]
            assert sorted(sum(numbers, [])) == Rollouts.gather(all_rollouts).episode.tolist()
            assert not set(numbers[0]) & set(numbers[1])


def test_reliable_mask_keeps_or_drops_whole_episodes() -> None:
    all_rollouts = [make_rollout(0, 0.0, 1), make_rollout(0, 1.0, 1)]
    all_rollouts += [item for number in range(500) for item in as_branches([make_rollout(0, 0.5, 1)] * 3, number)]
    rollouts = Rollouts.gather(all_rollouts)
    mask = reliable_mask(rollouts, 0.8, torch.Generator().manual_seed(1))
    groups = mask[2:].view(500, 3)
    assert bool((groups == groups[:, :1]).all()) and 60 < int(groups[:, 0].sum()) < 140 and bool(mask[:2].all())


def test_replay_buffer_counts_episodes_across_steps(tmp_path: Path) -> None:
    """Every step numbers its groups and episodes from 0."""
    buffer = ReplayBuffer(3)
    for step in range(3):
        first, second = as_branches([make_rollout(0, float(step), 1)] * 2, 0)
        buffer.add(Rollouts.gather([first, second]))
    buffer.add(Rollouts.gather([make_rollout(0, 7.0, 1)]))
    buffered = buffer._rollouts
    assert buffered is not None and len(buffer) == 3
    assert buffered.reward.tolist() == [1, 1, 2, 2, 7] and buffered.episodes.episode_ids.tolist() == [0, 0, 1, 1, 2]
    drawn = buffer.sample(2, torch.Generator().manual_seed(3))
    assert drawn is not None and len(drawn.episodes) == 2
    assert drawn.reward.tolist() in ([1, 1, 2, 2], [1, 1, 7], [2, 2, 7])
    buffer.save()(tmp_path)
    restored = ReplayBuffer(3)
    restored.restore(tmp_path, LOCAL)
    assert restored._rollouts is not None and len(restored) == 3
    assert restored._rollouts.reward.tolist() == buffered.reward.tolist()
    assert torch.equal(restored._rollouts.episodes.episode_ids, buffered.episodes.episode_ids)
    extended = TrainBatch.from_rollouts(
        Rollouts.concat([buffered, Rollouts.gather(as_branches([make_rollout(0, 5.0, 1)] * 2, 0))])
    )
    assert extended.episodes.episode_ids.tolist() == [0, 0, 1, 1, 2, 3, 3]
    assert torch.equal(extended.local_episodes.episode_ids, Episodes.from_ids(extended.sequence_reward).episode_ids)
