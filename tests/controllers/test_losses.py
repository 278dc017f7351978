"""Policy loss and aggregation by configuration, and that updates do not depend on sharding."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import as_ranks

from megarl.algorithms.policy_losses import (
    POLICY_LOSSES,
    Clip,
    GSPOOptions,
    NoOptions,
    PolicyLoss,
    PolicyLossInput,
    ppo_loss,
)
from megarl.config import Config, ConfigError, from_dict
from megarl.controllers.controller import make_controller
from megarl.controllers.mini_batches import (
    load_policy_loss,
    max_response_length,
    needs_old_logprobs,
    split_mini_batches,
)
from megarl.controllers.policy_gradient import policy_loss, policy_loss_columns
from megarl.types import LOCAL, BatchSharding, Comm, Counts, ModelOutput, Prompt, TokenLoss, TrainBatch

sys.path.insert(0, str(Path(__file__).parent))

from test_learning import TableFlow  # noqa: E402

pytestmark = pytest.mark.alone

OPTIONS: dict[str, dict[str, float]] = {
    "gspo": {"clip_low": 0.05, "clip_high": 0.05},
    "gspo_token": {"clip_low": 0.05, "clip_high": 0.05},
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.1, "clip_cov_ub": 100.0},
    "kl_cov": {"kl_cov_ratio": 0.2},
}
MEANS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def custom_loss(sampled: PolicyLossInput, clip: Clip, options: NoOptions) -> TokenLoss:
    return TokenLoss(-sampled.advantage * sampled.log_ratio * clip.low)


@dataclasses.dataclass(frozen=True)
class CustomOptions:
    size: float = 2.0


CUSTOM = PolicyLoss(custom_loss, CustomOptions)


def make_config(policy: str = "ppo", mean: str = "token-mean", kl: str = "none", **run: int) -> Config:
    loss = {"policy_loss": policy, "agg_mode": mean, "scale_factor": 7, "options": OPTIONS.get(policy, {})}
    return from_dict({"loss": loss, "kl": {"apply_to": kl}, "run": run, "algorithm": "grpo"})


def test_loads_a_policy_loss_and_its_options() -> None:
    loss, options = load_policy_loss(from_dict({"loss": {"policy_loss": "gspo", "options": {"clip_low": "1e-3"}}}))
    assert loss is POLICY_LOSSES["gspo"] and options == GSPOOptions(clip_low=0.001, clip_high=4e-4)
    assert load_policy_loss(Config()) == (POLICY_LOSSES["ppo"], NoOptions())
    module_prefix = f"{__name__}:"
    sys.modules.setdefault(__name__, sys.modules[__name__])
    assert load_policy_loss(from_dict({"loss": {"policy_loss": module_prefix + "custom_loss"}})) == (
        PolicyLoss(custom_loss),
        NoOptions(),
    )
    actual = load_policy_loss(from_dict({"loss": {"policy_loss": module_prefix + "CUSTOM", "options": {"size": 3}}}))
    assert actual == (CUSTOM, CustomOptions(3.0))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"policy_loss": "gpso"}, "did you mean gspo"),
        ({"policy_loss": "no_module:x"}, "loss.policy_loss: cannot import no_module"),
        ({"policy_loss": f"{__name__}:MEANS"}, "is a tuple, and neither"),
        ({"options": {"clip_low": 1}}, "unknown key loss.options.clip_low"),
        ({"policy_loss": "gspo", "options": {"clip_lo": 1}}, "did you mean loss.options.clip_low"),
        ({"policy_loss": "gspo", "options": {"clip_low": 0}}, "loss.options.clip_low must be a number, above 0"),
        ({"policy_loss": "kl_cov", "options": {"kl_cov_ratio": 2}}, "loss.options.kl_cov_ratio"),
        ({"policy_loss": "cispo", "options": {"max_ratio": "many"}}, "loss.options.max_ratio"),
        ({"policy_loss": "cispo", "options": {"most": 5}}, "did you mean loss.options.max_ratio"),
    ],
)
def test_invalid_loss_settings_raise(loss: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_policy_loss(from_dict({"loss": loss}))


def test_readme_example_loss_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(__file__).parents[2] / "megarl/algorithms/README.md").read_text()
    code = readme.partition("    # lab/losses.py\n")[2].partition("\n    loss: {policy")[0]
    (tmp_path / "readme_losses.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = from_dict(
        {"loss": {"policy_loss": "readme_losses:SOFT", "options": {"power": 3}}, "kl": {"apply_to": "none"}}
    )
    batch, new = make_batch()
    (mini,) = split_mini_batches(batch, settings, seed=0)
    logprobs = new.clone().requires_grad_()
    result = policy_loss(ModelOutput(logprobs=logprobs), mini, settings, 0.0)
    result.loss.sum().backward()
    assert logprobs.grad is not None and bool(logprobs.grad[batch.loss_mask].any())
    assert not logprobs.grad[~batch.loss_mask].any()
    assert 0 < float(result.reduce_metrics(mini)["actor/weight"]) < 1


def test_max_response_length_from_config() -> None:
    def length(max_turns: int) -> int:
        rollout = {"max_new_tokens": 100, "max_turns": max_turns, "max_context": 1000}
        return max_response_length(from_dict({"loss": {"scale_factor": 5}, "rollout": rollout}))

    assert (length(3), length(30)) == (300, 1000)


def test_needs_old_logprobs() -> None:
    assert not needs_old_logprobs(make_config()) and needs_old_logprobs(make_config(num_update=2))
    assert needs_old_logprobs(make_config("kl_cov")) and not needs_old_logprobs(make_config("gspo"))


def make_batch(sequences: int = 20) -> tuple[TrainBatch, torch.Tensor]:
    """Return a batch and the current policy's log-probs; one sequence has no action."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(2, 15, (sequences,), generator=generator)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(cu[-1])
    mask = torch.rand(total, generator=generator) < 0.6
    mask[cu[:-1]] = False
    mask[cu[2] : cu[3]] = False
    columns = torch.randn(4, total, generator=generator)
    reward = torch.randint(-1, 2, (sequences,), generator=generator).float()
    batch = TrainBatch(torch.zeros(total), cu, mask, torch.arange(sequences) // 4, reward, columns[0] - 2)
    advantages = torch.randn(sequences, generator=generator).repeat_interleave(lengths)
    new = columns[0] - 2 + 0.3 * columns[3]
    return batch.with_(old_logprobs=columns[0] - 2, ref_logprobs=columns[2] - 2, advantages=advantages), new


def shard_batch(batch: TrainBatch, comm: Comm, ranks: int) -> TrainBatch:
    owner = torch.randint(0, ranks, (batch.num_sequences,), generator=torch.Generator().manual_seed(ranks))
    local = (owner == comm.rank).nonzero().squeeze(1)
    sharding = BatchSharding(batch.lengths, torch.zeros_like(owner), owner, local, comm)
    part = batch.select(local.tolist())
    return dataclasses.replace(part, group=batch.group, sequence_reward=batch.sequence_reward, sharding=sharding)


def run_updates(config: Config, batch: TrainBatch, new: torch.Tensor, micro_batch: int) -> dict[str, Any]:
    """Return each update's loss, gradient and metrics; micro_batch: sequences per micro-batch."""
    updates: dict[str, Any] = {"loss": [], "metrics": []}
    gradient = torch.zeros(config.run.num_update, len(new))
    for number, mini in enumerate(split_mini_batches(batch, config, seed=9)):
        loss, metrics, lengths = torch.zeros(()), {}, mini.cu_seqlens.diff()
        unsharded = dataclasses.replace(mini, sharding=None, group=mini.group[mini.local_indices])
        unsharded = unsharded.with_(sequence_reward=mini.sequence_reward[mini.local_indices], values=mini.tokens * 0)
        for first in range(0, len(lengths), micro_batch):
            part = unsharded.select(range(first, min(first + micro_batch, len(lengths))))
            assert part.loss_weights is not None and part.returns is not None
            indices = part.returns.long()  # indices into `new`
            logprobs = new[indices].requires_grad_()
            result = policy_loss(ModelOutput(logprobs=logprobs), part, config, 0.1)
            value = (part.loss_weights * result.loss).sum()
            value.backward()
            loss = loss + value.detach()
            assert logprobs.grad is not None
            gradient[number, indices] += logprobs.grad
            for name, metric in result.reduce_metrics(part).items():
                metrics[name] = metrics.get(name, torch.zeros(())) + metric
        names = sorted({name for names in batch.comm.all_gather_objects(list(metrics)) for name in names})
        updates["loss"].append(float(batch.all_reduce(loss)))
        updates["metrics"].append({name: float(batch.all_reduce(metrics.get(name, torch.zeros(())))) for name in names})
    updates["gradient"] = batch.all_reduce(gradient)
    return updates


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("policy", list(POLICY_LOSSES))
def test_update_does_not_depend_on_sharding_or_micro_batches(policy: str, mean: str) -> None:
    """Loss, gradient and metrics of two mini-batches are the same on 1 to 3 ranks and for any micro-batch size."""
    settings = make_config(policy, mean, "loss", num_update=2)
    batch, new = make_batch()
    batch = batch.with_(returns=torch.arange(len(new)).float())
    single_rank = run_updates(settings, batch, new, 1000)
    assert float(single_rank["gradient"].abs().max()) > 1e-3
    for ranks, micro_batch in ((1, 1), (2, 1000), (3, 2)):

        def work(comm: Comm, ranks: int = ranks, micro_batch: int = micro_batch) -> dict[str, Any]:
            return run_updates(settings, shard_batch(batch, comm, ranks), new, micro_batch)

        for actual in as_ranks(ranks, work):
            torch.testing.assert_close(actual["gradient"], single_rank["gradient"], rtol=1e-5, atol=1e-8)
            assert actual["loss"] == pytest.approx(single_rank["loss"], rel=1e-5, abs=1e-7)
            for actual_metrics, expected_metrics in zip(actual["metrics"], single_rank["metrics"], strict=True):
                assert actual_metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("policy", list(POLICY_LOSSES))
def test_metrics_are_token_means_under_every_agg_mode(policy: str) -> None:
    batch, new = make_batch()
    batch = batch.with_(returns=torch.arange(len(new)).float())
    actual = {mean: run_updates(make_config(policy, mean, num_update=1), batch, new, 1000) for mean in MEANS}
    for mean in MEANS:
        assert actual[mean]["metrics"][0] == pytest.approx(actual["token-mean"]["metrics"][0], rel=1e-6)
    assert len({round(value["loss"][0], 4) for value in actual.values()}) == 3
    assert batch.old_logprobs is not None
    diff = (batch.old_logprobs - new)[batch.loss_mask].mean()
    assert actual["seq-mean-token-mean"]["metrics"][0]["actor/ppo_kl"] == pytest.approx(float(diff), rel=1e-5)


def test_loss_weights_by_hand() -> None:
    """Three sequences have 1, 0 and 3 actions."""
    mask = torch.tensor([0, 1, 0, 0, 1, 1, 1]).bool()
    zeros = torch.zeros(7)
    batch = TrainBatch(zeros, torch.tensor([0, 2, 3, 7]), mask, torch.arange(3), torch.tensor([1.0, 1.0, -1.0]), zeros)
    for mean, positive, negative in (
        ("token-mean", 1 / 4, 1 / 4),
        ("seq-mean-token-mean", 1 / 2, 1 / 6),
        ("seq-mean-token-sum-norm", 1 / 14, 1 / 14),
    ):
        (mini,) = split_mini_batches(batch, make_config(mean=mean), seed=0)
        assert mini.loss_weights is not None and mini.counts == Counts(actions=4, sequences=2, positive_actions=1)
        assert mini.loss_weights.tolist() == pytest.approx([0, positive, 0, 0, negative, negative, negative])
    metric = TokenLoss(zeros, {"a": torch.arange(7.0)}, {"b": torch.tensor([1.0, 0.0, 4.0])})
    assert {name: float(value) for name, value in metric.reduce_metrics(mini).items()} == {"a": 4.0, "b": 2.5}
    without_counts = mini.with_(counts=None)
    assert float(TokenLoss(zeros, {"a": torch.arange(7.0)}).reduce_metrics(without_counts)["a"]) == pytest.approx(
        16 / 14
    )


@pytest.mark.parametrize("policy", [name for name, loss in POLICY_LOSSES.items() if loss.mark is None])
def test_single_update_needs_no_old_logprobs(policy: str) -> None:
    """Without old log-probs, the loss uses the policy's own, or the engine's for stale tokens."""
    batch, new = make_batch()
    staleness = torch.randint(0, 3, (len(new),), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    settings = make_config(policy)
    for argument in (None, staleness):
        old = new if argument is None else torch.where(argument > 0, batch.rollout_logprobs, new)
        results = []
        for variant in (
            batch.with_(old_logprobs=old, staleness=argument),
            batch.with_(old_logprobs=None, staleness=argument),
        ):
            (mini,) = split_mini_batches(variant, settings, seed=0)
            logprobs = new.clone().requires_grad_()
            result = policy_loss(ModelOutput(logprobs=logprobs), mini, settings, 0.0)
            assert mini.loss_weights is not None
            (mini.loss_weights * result.loss).sum().backward()
            metrics = result.reduce_metrics(mini)
            diff = metrics.pop("rollout/logprob_diff_mean", None)  # reported only without old log-probs
            assert (diff is None) == (variant.old_logprobs is not None or argument is not None)
            results.append((result.loss.detach(), logprobs.grad, metrics))
        torch.testing.assert_close(*results, rtol=0, atol=0)
        assert {"rollout_logprobs", "staleness"} <= {
            *policy_loss_columns(settings, batch.with_(old_logprobs=None, staleness=argument))
        }


def test_missing_old_logprobs_raise() -> None:
    batch, new = make_batch()
    without_old = batch.with_(old_logprobs=None)
    with pytest.raises(ConfigError, match="loss.policy_loss=kl_cov selects tokens by old_logprobs"):
        list(split_mini_batches(without_old, make_config("kl_cov"), seed=0))
    (first, *_) = split_mini_batches(without_old, make_config(num_update=2), seed=0)
    with pytest.raises(AssertionError, match="second update"):
        policy_loss(ModelOutput(logprobs=new[: len(first.tokens)]), first, make_config(num_update=2), 0.0)


def test_batches_without_advantages_are_not_marked() -> None:
    """For example SFT conversations, which have another loss."""
    batch, _ = make_batch()
    without_advantages = batch.with_(advantages=None, old_logprobs=None)
    assert [mini.marked for mini in split_mini_batches(without_advantages, make_config("clip_cov"), seed=0)] == [None]
    (mini,) = split_mini_batches(batch, make_config("clip_cov"), seed=0)
    assert mini.marked is not None and bool(mini.marked.any())
    assert policy_loss_columns(make_config("clip_cov", kl="loss")) == (
        "old_logprobs",
        "advantages",
        "ref_logprobs",
        "marked",
    )
    assert policy_loss_columns(make_config()) == ("old_logprobs", "advantages")


def test_policy_loss_equals_ppo_loss_bitwise() -> None:
    batch, new = make_batch()
    assert batch.old_logprobs is not None and batch.advantages is not None
    inputs = PolicyLossInput(new, batch.old_logprobs, batch.advantages, batch.loss_mask, batch.cu_seqlens)
    expected = ppo_loss(inputs, Clip(0.2, 0.28, 3.0))
    actual = policy_loss(
        ModelOutput(logprobs=new), batch, from_dict({"loss": {"clip_high": 0.28}, "kl": {"apply_to": "none"}}), 0
    )
    assert torch.equal(actual.loss, expected.loss)
    assert all(torch.equal(actual.metrics[name], value) for name, value in expected.metrics.items())


@pytest.mark.parametrize(
    ("policy", "kind", "mean"),
    [
        ("gspo", "grpo", "seq-mean-token-mean"),
        ("gspo_token", "grpo", "seq-mean-token-mean"),
        ("gmpo", "opo", "seq-mean-token-mean"),
        ("cispo", "rloo", "token-mean"),
        ("sapo", "reinforce_pp", "seq-mean-token-mean"),
        ("clip_cov", "reinforce_pp_baseline", "token-mean"),
        ("kl_cov", "grpo", "seq-mean-token-sum-norm"),
    ],
)
def test_policy_losses_learn_a_table(policy: str, kind: str, mean: str) -> None:
    tree: dict[str, Any] = {"algorithm": "grpo", "kl": {"apply_to": "none"}, "run": {"num_update": 2, "ppo_epochs": 2}}
    options = OPTIONS.get(policy, {})
    loss = {"policy_loss": policy, "agg_mode": mean, "scale_factor": 2, "options": options}
    tree |= {"loss": loss, "advantage": {"estimator": kind}}
    settings = from_dict(tree | {"rollout": {"samples_per_prompt": 8}})
    controller, flow = make_controller(settings), TableFlow(settings, LOCAL)
    rewards = []
    for _ in range(25):
        result = controller.step(flow, [Prompt(id=str(i), messages=()) for i in range(4)])  # type: ignore[arg-type]
        assert result.batch is not None
        rewards.append(float(result.batch.sequence_reward.mean()))
    assert rewards[0] < 0.4 and sum(rewards[-5:]) / 5 > 0.8, rewards
