"""PPO and GRPO on stale rollouts under each correction, with the table of `test_learning.py`. Responses come from the
table of two steps ago, and the engine's log-probs are slightly off."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import as_ranks

from megarl.config import Config, ConfigError, from_dict
from megarl.controllers.controller import load_requirements, make_controller
from megarl.controllers.mini_batches import split_mini_batches
from megarl.controllers.policy_gradient import apply_loss_masks, policy_loss, policy_loss_columns
from megarl.controllers.rollout_correction import apply_correction, check_correction, compute_old_logprobs
from megarl.types import LOCAL, Comm, ModelOutput, Prompt, Rollout, Rollouts, TrainBatch, Turn

sys.path.insert(0, str(Path(__file__).parent))

from test_learning import ACTIONS, TableFlow  # noqa: E402

pytestmark = pytest.mark.alone

CORRECTIONS = (
    {"kind": "none"},
    {"kind": "none", "proximal": "trainer"},
    {"kind": "none", "proximal": "engine"},
    {"kind": "tis"},
    {"kind": "tis", "level": "sequence"},
    {"kind": "icepop"},
    {"kind": "mis"},
    {"kind": "reject", "low": 0.5, "high": 2.0},
)
NAMES = [" ".join(map(str, correction.values())) for correction in CORRECTIONS]


class StaleFlow(TableFlow):
    """The second token of a response comes from weights `staleness` syncs old, the first from one sync earlier."""

    def __init__(self, config: Config, comm: Comm = LOCAL, world: int = 1, staleness: int = 2) -> None:
        super().__init__(config, comm, world)
        self.lag = staleness
        self.tables = [self.policy.table.detach().clone()]
        self.forwards = 0
        forward = self.policy.forward
        self.policy.forward = lambda batch: (setattr(self, "forwards", self.forwards + 1), forward(batch))[1]  # type: ignore

    def generate(self, items: Any, samples: int, greedy: bool = False, held_out: bool = False) -> Rollouts:
        self.calls.append("generate")
        current_version = len(self.tables) - 1
        versions = [max(0, current_version - self.lag - 1), max(0, current_version - self.lag)]
        local = []
        for group in range(self.comm.rank, len(items), self.world):
            draw = random.Random(f"{len(self.calls)}/{group}")
            for _ in range(samples):
                response, engine_logprobs = [], []
                for k, version in enumerate(versions):
                    logprobs = self.tables[version].log_softmax(-1)[k]
                    response.append(draw.choices(range(ACTIONS), logprobs.exp().tolist())[0])
                    engine_logprobs.append(float(logprobs[response[-1]]) + draw.uniform(-0.01, 0.01))
                runs = tuple((version, 1) for version in versions)
                turns = (Turn((9,)), Turn(tuple(response), tuple(engine_logprobs), True, versions[-1], runs))
                local.append(Rollout(items[group], turns, group=group))
        return Rollouts.gather(local, [rollout.group for rollout in local], self.comm, current_version)

    def update_weights(self, actor: Any) -> None:
        super().update_weights(actor)
        self.tables.append(self.policy.table.detach().clone())


def config_of(correction: dict[str, Any], algorithm: str = "grpo", **run: int) -> Config:
    tree = {"algorithm": algorithm, "kl": {"apply_to": "none"}, "run": {"num_update": 2, "ppo_epochs": 2} | run}
    return from_dict(tree | {"rollout": {"samples_per_prompt": 8}, "correction": correction})


def prompts(count: int = 4) -> list[Prompt]:
    return [Prompt(id=str(i), messages=()) for i in range(count)]


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("correction", CORRECTIONS, ids=NAMES)
def test_corrections_learn_two_versions_behind(correction: dict[str, Any], algorithm: str) -> None:
    config = config_of(correction, algorithm)
    flow: Any = StaleFlow(config)
    controller = make_controller(config)
    means = []
    for _ in range(30):
        result = controller.step(flow, prompts())
        assert result.batch is not None
        means.append(float(result.batch.sequence_reward.mean()))
    assert means[0] < 0.4 and sum(means[-5:]) / 5 > 0.8, means
    if correction.get("proximal") != "engine":
        assert result.metrics["rollout_corr/ratio_max_staleness3"] > 0
        assert "rollout_corr/kl_staleness2" in result.metrics
        assert "rollout_corr/kl_staleness1" not in result.metrics
        assert 0 < result.metrics["rollout_corr/rollout_is_eff_sample_size"] <= 1


def steps_of(config: Config, comm: Comm, world: int) -> list[dict[str, Any]]:
    flow: Any = StaleFlow(config, comm, world)
    controller = make_controller(config)
    results = []
    for _ in range(4):
        result = controller.step(flow, prompts(5))
        results.append({"metrics": result.metrics, "table": flow.policy.table.detach().clone()})
    return results


@pytest.mark.parametrize("correction", CORRECTIONS, ids=NAMES)
def test_step_does_not_depend_on_world_size(correction: dict[str, Any]) -> None:
    config = config_of(correction)
    single_rank = steps_of(config, LOCAL, 1)
    for world in (2, 3):
        first, *other_ranks = as_ranks(world, lambda comm, world=world: steps_of(config, comm, world))
        for steps in other_ranks:
            torch.testing.assert_close(steps, first, rtol=0, atol=0)
        torch.testing.assert_close(first, single_rank, rtol=1e-5, atol=1e-6)


def stale_batch(config: Config) -> tuple[Any, Rollouts, TrainBatch]:
    """Return a flow after four steps, with rollouts of two versions and their batch."""
    flow: Any = StaleFlow(config)
    controller = make_controller(config_of({}))
    for _ in range(4):
        controller.step(flow, prompts())
    rollouts = flow.score(flow.generate(prompts(), 8))
    return flow, rollouts, TrainBatch.from_rollouts(rollouts)


def test_kind_none_has_no_weights() -> None:
    """The ratio is to the engine's log-probs, and the loss equals that of unit weights, bitwise."""
    config = config_of({})
    flow, _, batch = stale_batch(config)
    policy = compute_old_logprobs(flow, batch).wait()
    corrected_batch, _ = apply_correction(flow, batch, policy, 0)
    assert batch.staleness is not None and bool((batch.staleness[batch.loss_mask] > 0).all())
    assert corrected_batch.importance is None and policy_loss_columns(config) == ("old_logprobs", "advantages")
    assert corrected_batch.old_logprobs is not None and policy.logprobs is not None
    assert torch.equal(corrected_batch.old_logprobs[batch.loss_mask], batch.rollout_logprobs[batch.loss_mask])
    corrected, metrics = apply_correction(flow, batch.with_(staleness=None), policy, 0)
    assert corrected.old_logprobs is policy.logprobs and corrected.importance is None
    assert not any(name.startswith("rollout_corr") for name in metrics)
    corrected_batch = corrected_batch.with_(advantages=torch.randn(len(batch.tokens)))
    uncorrected = policy_loss(policy, corrected_batch, config, 0.0)
    weighted = corrected_batch.with_(importance=torch.ones(len(batch.tokens)))
    ones = policy_loss(policy, weighted, config_of({"kind": "tis"}), 0.0)
    assert torch.equal(uncorrected.loss, ones.loss)


@pytest.mark.parametrize("kind", ["tis", "icepop", "mis"])
def test_weights_scale_the_surrogate_and_keep_every_token(kind: str) -> None:
    config = config_of({"kind": kind, "low": 0.9, "high": 1.1}, num_update=1, ppo_epochs=1)
    flow, rollouts, batch = stale_batch(config)
    policy = compute_old_logprobs(flow, batch).wait()
    batch, metrics = apply_correction(flow, batch, policy, 0)
    assert batch.importance is not None and batch.old_logprobs is policy.logprobs
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(float(batch.importance[batch.loss_mask].mean()))
    (mini,) = split_mini_batches(apply_loss_masks(batch, rollouts, config), config, 0)
    assert mini.loss_weights is not None and mini.importance is not None
    weighted = mini.loss_weights[mini.loss_mask]
    assert float(weighted.min()) == float(weighted.max()) == pytest.approx(1 / int(mini.loss_mask.sum()))
    mini = mini.with_(advantages=torch.ones(len(mini.tokens)))
    loss = policy_loss(policy, mini, config, 0.0)
    assert torch.equal(loss.loss[mini.loss_mask], -mini.importance[mini.loss_mask])  # ratio and advantage are 1
    assert "importance" in policy_loss_columns(config)


def test_weights_scale_k3_unbiased_kl_but_not_k2() -> None:
    actual = {}
    for estimator in ("k2", "k3_unbiased"):
        config = from_dict(
            {"correction": {"kind": "tis"}, "kl": {"apply_to": "loss", "estimator": estimator}, "algorithm": "grpo"}
        )
        flow, _, batch = stale_batch(config)
        policy = compute_old_logprobs(flow, batch).wait()
        batch = apply_correction(flow, batch, policy, 0)[0].with_(advantages=torch.zeros(len(batch.tokens)))
        batch = batch.with_(ref_logprobs=batch.rollout_logprobs - 0.1)
        assert batch.importance is not None and policy.logprobs is not None
        full = policy_loss(policy, batch, config, 1.0).metrics["actor/kl_loss"]
        uncorrected_kl = policy_loss(policy, batch.with_(importance=None), config, 1.0).metrics["actor/kl_loss"]
        actual[estimator] = torch.equal(full, uncorrected_kl), torch.equal(full, uncorrected_kl * batch.importance)
    assert actual == {"k2": (True, False), "k3_unbiased": (False, True)}


@pytest.mark.parametrize("correction", [{"kind": "tis", "level": "sequence"}, {"kind": "icepop"}, CORRECTIONS[-1]])
def test_gradient_does_not_depend_on_micro_batches(correction: dict[str, Any]) -> None:
    config = config_of(correction, num_update=1, ppo_epochs=1)
    flow, rollouts, batch = stale_batch(config)
    batch, _ = apply_correction(flow, batch, compute_old_logprobs(flow, batch).wait(), 0)
    batch = batch.with_(advantages=torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(1)))
    (mini,) = split_mini_batches(apply_loss_masks(batch, rollouts, config), config, 0)

    def gradient(parts: list[list[int]]) -> torch.Tensor:
        flow.policy.table.grad = None
        for part in parts:
            selected = mini.select(part)
            assert selected.loss_weights is not None
            (
                policy_loss(flow.policy.output(selected), selected, config, 0.0).loss * selected.loss_weights
            ).sum().backward()
        assert flow.policy.table.grad is not None
        return flow.policy.table.grad.clone()

    order = list(range(mini.num_sequences))
    full = gradient([order])
    assert float(full.abs().max()) > 0
    for parts in ([order[::2], order[1::2]], [[i] for i in reversed(order)]):
        torch.testing.assert_close(gradient(parts), full, rtol=1e-5, atol=1e-8)


def test_rejected_sequences_leave_the_loss_but_stay_in_their_group() -> None:
    config = config_of({"kind": "reject", "level": "token", "low": 0.5, "high": 1.5}, num_update=1, ppo_epochs=1)
    flow, rollouts, batch = stale_batch(config)
    policy = compute_old_logprobs(flow, batch).wait()
    batch, metrics = apply_correction(flow, batch, policy, 0)
    assert batch.importance is not None
    action_weights = batch.importance.reshape(-1, 3)[:, 1:]
    assert torch.equal(action_weights[:, 0], action_weights[:, 1]) and 0 < float(action_weights.mean()) < 1
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(
        1 - float(action_weights[:, 0].mean())
    )
    (mini,) = split_mini_batches(apply_loss_masks(batch, rollouts, config), config, 0)
    assert mini.importance is None and policy_loss_columns(config) == ("old_logprobs", "advantages")
    assert torch.equal(mini.loss_mask.reshape(-1, 3)[:, 1:], action_weights > 0)
    assert mini.loss_weights is not None
    assert torch.equal(mini.loss_weights > 0, mini.loss_mask)
    assert float(mini.loss_weights.sum()) == pytest.approx(1.0)
    assert torch.equal(mini.group, batch.group) and torch.equal(mini.sequence_reward, batch.sequence_reward)


def test_rejecting_everything_leaves_the_policy_unchanged() -> None:
    config = config_of({"kind": "reject", "low": 1.0, "high": 1.0})
    flow: Any = StaleFlow(config)
    result = make_controller(config).step(flow, prompts())
    assert result.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1.0
    assert not flow.policy.table.detach().any()


def test_engine_proximal_computes_logprobs_only_when_verifying() -> None:
    tree = {"correction": {"proximal": "engine"}, "rollout": {"verify_weights_every": 3, "samples_per_prompt": 8}}
    config = from_dict(tree | {"algorithm": "grpo", "kl": {"apply_to": "none"}})
    flow: Any = StaleFlow(config)
    controller = make_controller(config)
    num_forwards, has_metrics = [], []
    for _ in range(5):
        before = flow.forwards
        result = controller.step(flow, prompts())
        num_forwards.append(flow.forwards - before)
        has_metrics.append("rollout/logprob_diff_mean_stale" in result.metrics and "rollout_corr/kl" in result.metrics)
        assert result.batch is not None and result.batch.old_logprobs is result.batch.rollout_logprobs
    # The first step has no stale token.
    assert num_forwards == [1, 0, 0, 1, 0] and has_metrics == [False, False, False, True, False]


def test_defaults_of_each_kind() -> None:
    kinds = {kind: from_dict({"correction": {"kind": kind}}).correction for kind in ("tis", "icepop", "mis", "reject")}
    assert {kind: actual.resolved_level for kind, actual in kinds.items()} == {
        "tis": "token",
        "icepop": "token",
        "mis": "sequence",
        "reject": "geometric",
    }
    assert [actual.resolved_proximal for actual in kinds.values()] == ["trainer", "trainer", "trainer", "behavior"]
    assert [actual.has_weights for actual in kinds.values()] == [True, True, True, False]
    assert from_dict({}).correction.resolved_proximal == "behavior"
    assert from_dict({"correction": {"kind": "tis", "low": 0.25}}).correction.bounds == (0.25, 2.0)


@pytest.mark.parametrize(
    ("correction", "algorithm", "message"),
    [
        ({"kind": "tis", "low": 3.0}, "grpo", "correction.low=3 and correction.high=2 must enclose 1"),
        ({"kind": "tis", "high": 0.5}, "grpo", "correction.low=0 and correction.high=0.5 must enclose 1"),
        ({"kind": "icepop", "level": "sequence"}, "grpo", "that is correction.kind=mis"),
        ({"kind": "mis", "level": "token"}, "ppo", "that is correction.kind=icepop"),
        (
            {"kind": "tis", "proximal": "behavior"},
            "grpo",
            "which with correction.proximal=behavior is also in the ratio",
        ),
        ({"kind": "tis", "proximal": "engine"}, "grpo", "with correction.proximal=engine is also in the ratio"),
        ({"kind": "reject", "proximal": "engine"}, "grpo", "set it to behavior"),
        ({"kind": "tis"}, "sft", "correction.kind=tis with algorithm=sft: it does not generate"),
        (
            {"proximal": "engine"},
            "reward_model",
            "correction.kind=none with algorithm=reward_model: it does not generate",
        ),
    ],
)
def test_invalid_combinations_raise(correction: dict[str, Any], algorithm: str, message: str) -> None:
    config = from_dict({"algorithm": algorithm, "correction": correction})
    with pytest.raises(ConfigError, match=message):
        check_correction(config, load_requirements(config))


@pytest.mark.parametrize("correction", CORRECTIONS, ids=NAMES)
def test_valid_corrections_accept_replayed_rollouts(correction: dict[str, Any]) -> None:
    """Replayed rollouts have the log-probs of the policy that sampled them."""
    config = from_dict({"algorithm": "grpo", "correction": correction, "rollout": {"replay": "runs/other"}})
    check_correction(config, load_requirements(config))


def test_nan_logprobs_give_nan_weights() -> None:
    """NaN is not hidden; the worker rejects it."""
    config = config_of({"kind": "tis"})
    flow, _, batch = stale_batch(config)
    policy = ModelOutput(logprobs=torch.full_like(batch.rollout_logprobs, float("nan")))
    actual, _ = apply_correction(flow, batch.with_(staleness=None), policy, 0)
    assert actual.importance is not None and bool(actual.importance[batch.loss_mask].isnan().all())
