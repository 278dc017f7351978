"""Every policy loss: against loops in Python floats, gradients against finite differences, and shared invariants."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.losses import constant_weights, sequence_mean_weights, token_mean_weights
from megarl.algorithms.policy_losses import POLICY_LOSSES, Clip, PolicyLossInput
from megarl.types import Counts, TrainBatch

sys.path.insert(0, str(Path(__file__).parent))

from sharded_batches import random_batch, shard_sequences  # noqa: E402

pytestmark = pytest.mark.alone

F64 = torch.float64
CLIP = Clip(0.2, 0.3, 3.0)
OPTIONS: dict[str, dict[str, float]] = {
    "gspo": {"clip_low": 0.1, "clip_high": 0.2},
    "gspo_token": {"clip_low": 0.1, "clip_high": 0.2},
    "cispo": {"max_ratio": 1.3, "min_ratio": 0.6},
    "gmpo": {"clip_low": 0.3, "clip_high": 0.4},
}
NAMES = list(POLICY_LOSSES)


def run(name: str, sampled: PolicyLossInput) -> Any:
    chosen = POLICY_LOSSES[name]
    return chosen.loss(sampled, CLIP, chosen.options(**OPTIONS.get(name, {})))


def random_sampled(seed: int, sequences: int = 12) -> PolicyLossInput:
    """Return a random batch with one advantage per sequence; some sequences have no action, some no token."""
    mask, cu = random_batch(seed, sequences, 12)
    generator = torch.Generator().manual_seed(seed + 100)
    new, noise = torch.randn(2, len(mask), generator=generator, dtype=F64)
    advantages = torch.randn(sequences, generator=generator, dtype=F64).repeat_interleave(cu.diff())
    marked = torch.rand(len(mask), generator=generator) < 0.3
    return PolicyLossInput(new.requires_grad_(), new.detach() - 0.4 * noise, advantages, mask, cu, marked)


def loop_losses(
    name: str, new: list[float], old: list[float], advantage: list[float], marked: list[bool]
) -> list[float]:
    """Compute the losses of one sequence's action tokens as the papers define them."""
    options = POLICY_LOSSES[name].options(**OPTIONS.get(name, {}))
    ratios = [math.exp(a - b) for a, b in zip(new, old, strict=True)]

    def ppo(ratio: float, a: float, low: float, high: float, dual: float | None) -> float:
        loss = max(-a * ratio, -a * min(max(ratio, 1 - low), 1 + high))
        return min(loss, -a * dual) if dual is not None and a < 0 else loss

    if name in ("ppo", "clip_cov"):
        losses = [ppo(r, a, 0.2, 0.3, 3.0) for r, a in zip(ratios, advantage, strict=True)]
        return [0.0 if m and name == "clip_cov" else x for x, m in zip(losses, marked, strict=True)]
    if name == "kl_cov":
        terms = zip(ratios, advantage, marked, strict=True)
        return [-a * r + (abs(math.log(r)) if m else 0.0) for r, a, m in terms]
    if name in ("gspo", "gspo_token"):
        mean = math.prod(ratios) ** (1 / len(ratios)) if ratios else 1.0
        return [ppo(mean, a, 0.1, 0.2, None) for a in advantage]
    if name == "gmpo":
        product = 1.0
        for r, a in zip(ratios, advantage, strict=True):
            product *= abs(min(r * a, min(max(r, math.exp(-0.3)), math.exp(0.4)) * a)) / abs(a)
        return [-a * product ** (1 / len(ratios)) for a in advantage]
    if name == "cispo":
        return [-min(max(r, 0.6), 1.3) * a * n for r, a, n in zip(ratios, advantage, new, strict=True)]
    assert name == "sapo"
    taus = [options.tau_positive if a > 0 else options.tau_negative for a in advantage]
    terms = zip(ratios, advantage, taus, strict=True)
    return [-a * 4 / tau / (1 + math.exp(-tau * (r - 1))) for r, a, tau in terms]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", NAMES)
def test_losses_match_a_loop(name: str, seed: int) -> None:
    sampled = random_sampled(seed)
    expected = torch.zeros(len(sampled.loss_mask), dtype=F64)
    assert sampled.marked is not None
    for start, end in zip(sampled.cu_seqlens[:-1].tolist(), sampled.cu_seqlens[1:].tolist(), strict=True):
        positions = [t for t in range(start, end) if sampled.loss_mask[t]]
        columns = (sampled.logprobs, sampled.old_logprobs, sampled.advantages, sampled.marked)
        expected[positions] = torch.tensor(loop_losses(name, *(x[positions].tolist() for x in columns)), dtype=F64)
    result = run(name, sampled)
    torch.testing.assert_close(result.loss.detach(), expected, rtol=1e-12, atol=1e-12)
    for metric in result.metrics.values():
        assert metric.shape == expected.shape and not metric.requires_grad
        assert bool((metric[~sampled.loss_mask] == 0).all())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("cispo", "gspo_token")])
def test_gradients_match_finite_differences(name: str, seed: int) -> None:
    """Losses with a stop-gradient have a test of their own."""
    sampled = random_sampled(seed, 6)
    weights = sequence_mean_weights(sampled.cu_seqlens, sampled.loss_mask, 5).double()

    def weighted_loss(logprobs: torch.Tensor) -> torch.Tensor:
        columns = sampled.old_logprobs, sampled.advantages, sampled.loss_mask, sampled.cu_seqlens, sampled.marked
        return (weights * run(name, PolicyLossInput(logprobs, *columns)).loss).sum()

    (gradient,) = torch.autograd.grad(weighted_loss(sampled.logprobs), sampled.logprobs)
    point, step = sampled.logprobs.detach(), 1e-6
    for t in range(len(point)):
        offset = torch.zeros_like(point).index_fill(0, torch.tensor(t), step)
        difference = float(weighted_loss(point + offset) - weighted_loss(point - offset)) / (2 * step)
        assert float(gradient[t]) == pytest.approx(difference, abs=1e-8)


def test_stop_gradient_losses_by_hand() -> None:
    """CISPO has the clamped ratio times A; GSPO-token the sequence ratio times the token's A, unless clipped."""
    new = torch.tensor([-1.0, -1.0, -2.0], dtype=F64, requires_grad=True)
    ratios = torch.tensor([1.1, 2.0, 0.5], dtype=F64)
    columns = torch.tensor([1.0, -2.0, 3.0], dtype=F64), torch.ones(3).bool(), torch.tensor([0, 3])
    run("cispo", PolicyLossInput(new, new.detach() - ratios.log(), *columns)).loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-1.1, 2 * 1.3, -3 * 0.6], abs=1e-12)
    new.grad = None
    run("gspo_token", PolicyLossInput(new, new.detach() - ratios.log(), *columns)).loss.sum().backward()
    assert new.grad is not None
    full = (1.1 * 2.0 * 0.5) ** (1 / 3)  # 1.03, inside the clip range
    assert new.grad.tolist() == pytest.approx([-full, 2 * full, -3 * full], abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_gspo_token_equals_gspo_for_sequence_advantages(seed: int) -> None:
    sampled = random_sampled(seed, 40)
    weights = sequence_mean_weights(sampled.cu_seqlens, sampled.loss_mask, 30).double()
    gspo, gspo_token = (run(name, sampled) for name in ("gspo", "gspo_token"))
    torch.testing.assert_close(gspo.loss, gspo_token.loss, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad((weights * x.loss).sum(), sampled.logprobs)[0] for x in (gspo, gspo_token)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)
    clipped = gspo.sequence_metrics["actor/sequence_clipfrac"]
    assert set(clipped.tolist()) <= {0.0, 1.0} and 0 < float(clipped.sum())


@pytest.mark.parametrize("name", NAMES)
def test_losses_have_the_policy_gradient_on_policy(name: str) -> None:
    """The gradient is -A times the token's weight, and without marks nothing is clipped."""
    sampled = random_sampled(3)
    new = sampled.logprobs
    on_policy = PolicyLossInput(new, new.detach(), sampled.advantages, sampled.loss_mask, sampled.cu_seqlens)
    result = run(name, on_policy)
    weights = sequence_mean_weights(sampled.cu_seqlens, sampled.loss_mask, 10).double()
    (gradient,) = torch.autograd.grad((weights * result.loss).sum(), new)
    torch.testing.assert_close(gradient, -weights * sampled.advantages, rtol=1e-9, atol=1e-12)
    for metric, values in (result.metrics | result.sequence_metrics).items():
        assert metric == "actor/sapo_gate" or not values.any(), metric


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf"), 1e30, -1e30])
@pytest.mark.parametrize("name", NAMES)
def test_masked_positions_have_no_effect(name: str, garbage: float) -> None:
    sampled = random_sampled(1)
    mask = sampled.loss_mask
    clean = run(name, sampled)
    (expected,) = torch.autograd.grad(clean.loss.sum(), sampled.logprobs)
    with_garbage = [
        torch.where(mask, x.detach(), garbage) for x in (sampled.logprobs, sampled.old_logprobs, sampled.advantages)
    ]
    logprobs = with_garbage[0].requires_grad_()
    result = run(name, PolicyLossInput(logprobs, *with_garbage[1:], mask, sampled.cu_seqlens, sampled.marked))
    result.loss.sum().backward()
    assert torch.equal(result.loss, clean.loss) and logprobs.grad is not None and torch.equal(logprobs.grad, expected)
    for metric, values in result.metrics.items():
        assert torch.equal(values, clean.metrics[metric])


@pytest.mark.parametrize("name", NAMES)
def test_extreme_ratios_have_finite_gradients_and_nan_propagates(name: str) -> None:
    """Ratios that would overflow exp are clamped. NaN stays NaN; workers reject it before the loss."""
    for sign in (1.0, -1.0):
        logprobs = torch.tensor([0.0, -600.0, -1.0], requires_grad=True)
        columns = torch.ones(3).bool(), torch.tensor([0, 2, 3])
        result = run(
            name, PolicyLossInput(logprobs, torch.tensor([-500.0, -1.0, -1.0]), torch.full((3,), sign), *columns)
        )
        result.loss.sum().backward()
        assert logprobs.grad is not None and bool(torch.isfinite(logprobs.grad).all())
        assert bool(torch.isfinite(result.loss).all())
    nan = torch.tensor([float("nan")])
    assert run(
        name, PolicyLossInput(nan, torch.zeros(1), torch.ones(1), torch.ones(1).bool(), torch.tensor([0, 1]))
    ).loss.isnan()


@pytest.mark.parametrize("name", NAMES)
def test_no_action_tokens_give_zero_loss(name: str) -> None:
    """Cases: all tokens masked, an empty sequence, no sequence."""
    for cu in ([0, 3, 3, 5], [0]):
        logprobs = torch.randn(cu[-1], requires_grad=True)
        zeros = torch.zeros(cu[-1])
        result = run(name, PolicyLossInput(logprobs, zeros, zeros + 1, zeros.bool(), torch.tensor(cu)))
        result.loss.sum().backward()
        assert not result.loss.any() and logprobs.grad is not None and not logprobs.grad.any()
        assert all(len(values) == len(cu) - 1 for values in result.sequence_metrics.values())


@pytest.mark.parametrize("mean", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_metrics_do_not_depend_on_sharding(name: str, mean: str) -> None:
    """Loss, gradient and metrics of shards add up to those of the full batch."""
    full = random_sampled(2, 30)
    mask, cu = full.loss_mask, full.cu_seqlens
    sequences = sum(bool(part.any()) for part in mask.split(cu.diff().tolist()))
    counts = Counts(int(mask.sum()), sequences)

    def compute(sampled: PolicyLossInput) -> tuple[float, torch.Tensor, dict[str, float]]:
        of_mask = {
            "token": lambda: token_mean_weights(sampled.loss_mask, counts.actions),
            "sequence": lambda: sequence_mean_weights(sampled.cu_seqlens, sampled.loss_mask, sequences),
            "constant": lambda: constant_weights(sampled.loss_mask, 7, sequences),
        }
        weights = of_mask[mean]()
        result = run(name, sampled)
        zeros = torch.zeros(len(sampled.loss_mask))
        batch = TrainBatch(zeros, sampled.cu_seqlens, sampled.loss_mask, zeros, zeros, zeros)
        metrics = result.reduce_metrics(batch.with_(loss_weights=weights, counts=counts))
        value = (weights.double() * result.loss).sum()
        (gradient,) = torch.autograd.grad(value, sampled.logprobs)
        return float(value), gradient, {name: float(metric) for name, metric in metrics.items()}

    value, gradient, metrics = compute(full)
    for seed, ranks in ((0, 3), (1, 9)):
        values, gradients, sums = 0.0, torch.zeros_like(gradient), dict.fromkeys(metrics, 0.0)
        for local, tokens, starts in shard_sequences(cu, ranks, seed):
            if not len(local):
                continue
            columns = (full.logprobs.detach(), full.old_logprobs, full.advantages, mask)
            new, *remaining = (column[tokens] for column in columns)
            assert full.marked is not None
            part = PolicyLossInput(new.requires_grad_(), *remaining, starts, full.marked[tokens])
            part_result = compute(part)
            values += part_result[0]
            gradients[tokens] = part_result[1]
            sums = {name: sums[name] + part_result[2][name] for name in sums}
        assert values == pytest.approx(value, rel=1e-9)
        torch.testing.assert_close(gradients, gradient, rtol=1e-6, atol=1e-12)
        assert sums == pytest.approx(metrics, rel=1e-5, abs=1e-7)
