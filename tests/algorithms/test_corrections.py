"""Rollout correction weights: by hand, against plain Python, unbiased without bounds, independent of sharding."""

from __future__ import annotations

import math
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import as_ranks

from megarl.algorithms.corrections import (
    Correction,
    aggregate_log_ratio,
    compute_correction,
    correction_metrics,
    log_ratios,
)
from megarl.algorithms.policy_losses import Clip, PolicyLossInput, ppo_loss

sys.path.insert(0, str(Path(__file__).parent))

from sharded_batches import random_batch, shard_sequences  # noqa: E402

pytestmark = pytest.mark.alone

# Ratios: 2 and 1/4 in the first sequence, 3 in the second; the third has no action.
CU = torch.tensor([0, 3, 5, 7])
MASK = torch.tensor([False, True, True, False, True, False, False])
LOGS = torch.tensor([0.0, math.log(2), math.log(0.25), 0.0, math.log(3), 0.0, 0.0])


@pytest.mark.parametrize(
    ("kind", "level", "low", "high", "expected"),
    [
        ("none", "token", 0.5, 2.0, [1, 1, 1]),
        ("tis", "token", 0.0, 2.5, [2, 0.25, 2.5]),
        ("tis", "token", 0.5, 2.5, [2, 0.5, 2.5]),
        ("tis", "sequence", 0.0, 2.0, [0.5, 0.5, 2]),
        ("tis", "geometric", 0.0, 9.0, [0.5**0.5, 0.5**0.5, 3]),
        ("icepop", "token", 0.5, 5.0, [2, 0, 3]),
        ("icepop", "token", 0.2, 2.5, [2, 0.25, 0]),
        ("mis", "sequence", 0.4, 2.0, [0.5, 0.5, 0]),
        ("mis", "geometric", 0.75, 5.0, [0, 0, 3]),
        ("reject", "token", 0.5, 5.0, [0, 0, 1]),
        ("reject", "sequence", 0.4, 2.0, [1, 1, 0]),
        ("reject", "geometric", 0.7, 1.5, [1, 1, 0]),
    ],
)
def test_weights_by_hand(kind: str, level: str, low: float, high: float, expected: list[float]) -> None:
    result = compute_correction(LOGS, MASK, CU, kind, level, low, high)  # type: ignore[arg-type]
    assert result.weights[MASK].tolist() == pytest.approx(expected) and not result.weights[~MASK].any()
    assert not (result.is_above | result.is_below)[~MASK].any()


def test_unknown_kind_raises() -> None:
    with pytest.raises(ValueError, match="tis, icepop"):
        compute_correction(LOGS, MASK, CU, "no", "token", 0, 1)  # type: ignore[arg-type]


def test_log_ratios_are_masked_clamped_and_detached() -> None:
    mask = torch.tensor([True, True, True, False])
    result = log_ratios(torch.tensor([-1.0, -90.0, -1.0, math.nan]), torch.tensor([-1.5, -1.0, -math.inf, 0.0]), mask)
    assert result.tolist() == [0.5, -20.0, 20.0, 0.0]
    policy = torch.zeros(4, requires_grad=True)
    assert not log_ratios(policy, torch.zeros(4), mask).requires_grad
    full = aggregate_log_ratio(torch.full((4,), 15.0), torch.ones(4).bool(), torch.tensor([0, 4]), "sequence")
    assert full.tolist() == [20.0] * 4


def loop_weights(kind: str, level: str, low: float, high: float, logs: Any, mask: Any, cu: Any) -> list[float]:
    """Compute the weights sequence by sequence in Python floats."""
    weights = [0.0] * len(mask)
    for start, end in zip(cu, cu[1:], strict=False):
        actions = [t for t in range(start, end) if mask[t]]
        full = math.fsum(logs[t] for t in actions)
        ratios = {}
        for t in actions:
            log_ratio = {"token": logs[t], "sequence": full, "geometric": full / len(actions)}
            ratios[t] = math.exp(log_ratio[level])
        in_range = {t: low <= ratio <= high for t, ratio in ratios.items()}
        for t in actions:
            weights[t] = {
                "tis": min(max(ratios[t], low), high),
                "icepop": ratios[t] * in_range[t],
                "mis": ratios[t] * in_range[t],
                "reject": float(all(in_range.values())),
            }[kind]
    return weights


@pytest.mark.parametrize("kind", ["tis", "icepop", "mis", "reject"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("seed", range(3))
def test_weights_match_plain_python(kind: Any, level: Any, seed: int) -> None:
    mask, cu = random_batch(seed)
    logs = (torch.randn(len(mask), generator=torch.Generator().manual_seed(seed)) * 0.3).double() * mask
    result = compute_correction(logs, mask, cu, kind, level, 0.8, 1.5).weights
    expected = loop_weights(kind, level, 0.8, 1.5, logs.tolist(), mask.tolist(), cu.tolist())
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    single = compute_correction(logs.float(), mask, cu, kind, level, 0.8, 1.5).weights
    assert float((single - torch.tensor(expected)).abs().max()) < 1e-6


def all_sequences(actions: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens [T], mask [T] and cu_seqlens of every sequence of this length."""
    tokens = torch.tensor(list(product(range(actions), repeat=length)))
    count = len(tokens)
    return tokens.reshape(-1), torch.ones(count * length).bool(), torch.arange(count + 1) * length


@pytest.mark.parametrize(("level", "length"), [("token", 1), ("sequence", 1), ("sequence", 2), ("sequence", 3)])
def test_unbounded_is_gives_the_on_policy_gradient(level: Any, length: int) -> None:
    """The expectation sums over every sequence the behaviour policy can sample. Token-level weights are exact for one
    token only: with several, the behaviour policy also samples the prefix, and only the product corrects for that."""
    draw = torch.Generator().manual_seed(3)
    tokens, mask, cu = all_sequences(3, length)
    count, step = len(cu) - 1, torch.arange(len(tokens)) % length
    behaviour = torch.randn(length, 3, generator=draw, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(length, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    reward = torch.randn(count, generator=draw, dtype=torch.float64)
    logprobs, engine = logits.log_softmax(-1)[step, tokens], behaviour[step, tokens]
    advantages = torch.repeat_interleave(reward, length)
    weights = compute_correction(log_ratios(logprobs, engine, mask), mask, cu, "tis", level, 0.0, 1e9).weights
    loss = ppo_loss(PolicyLossInput(logprobs, logprobs.detach(), advantages, mask, cu), Clip(0.2)).loss * weights
    chance = engine.reshape(count, length).sum(1).exp()
    (result,) = torch.autograd.grad((loss * torch.repeat_interleave(chance, length)).sum(), logits, retain_graph=True)
    expected_reward = (logprobs.reshape(count, length).sum(1).exp() * reward).sum()
    (expected,) = torch.autograd.grad(-expected_reward, logits)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


def test_decoupled_ppo_uses_the_ratio_to_the_behaviour_policy() -> None:
    """Inside the clip range, the weight times the ratio to the proximal policy is the ratio to the behaviour policy."""
    draw = torch.Generator().manual_seed(1)
    tokens, mask, cu = all_sequences(4, 1)
    policy, prox, behaviour = (torch.randn(4, generator=draw, dtype=torch.float64).log_softmax(-1) for _ in range(3))
    advantages = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    weights = compute_correction(log_ratios(prox, behaviour, mask), mask, cu, "tis", "token", 0.0, 1e9).weights
    loss = ppo_loss(PolicyLossInput(policy, prox, advantages, mask, cu), Clip(1.0, high=100.0)).loss * weights
    assert float((behaviour.exp() * loss).sum()) == pytest.approx(-float((policy.exp() * advantages).sum()))


def test_metrics_by_hand() -> None:
    """One sequence has ratios 2 and 1/4 at staleness 1 and 0, another ratio 3 at staleness 5."""
    staleness = torch.tensor([0, 1, 0, 0, 5, 0, 0], dtype=torch.int32)
    result = correction_metrics(
        LOGS, MASK, CU, compute_correction(LOGS, MASK, CU, "icepop", "token", 0.5, 2.5), staleness
    )

    def metric(name: str) -> float:
        return result[f"rollout_corr/{name}"]

    ratios = [0.25, 2.0, 3.0]
    assert metric("kl") == pytest.approx(-sum(map(math.log, ratios)) / 3)
    assert metric("k3_kl") == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 3)
    assert [metric(f"ratio_{name}") for name in ("p5", "p50", "p95", "max")] == pytest.approx([0.25, 2, 3, 3])
    assert metric("rollout_is_eff_sample_size") == pytest.approx((0.5 + 3) ** 2 / (2 * (0.25 + 9)))
    assert metric("rollout_is_mean") == pytest.approx(2 / 3)
    assert metric("rollout_is_ratio_fraction_high") == metric("rollout_is_ratio_fraction_low") == pytest.approx(1 / 3)
    assert metric("rollout_rs_masked_fraction") == pytest.approx(2 / 3)
    assert metric("rollout_rs_seq_masked_fraction") == 0.5
    # A sequence is as stale as its oldest token: 1 for the first, in the bucket of 3 and more for the second.
    stale = metric("ratio_max_staleness0"), metric("ratio_p5_staleness1"), metric("ratio_p50_staleness3")
    assert stale == pytest.approx((0.25, 2, 3))
    assert metric("rollout_rs_seq_masked_fraction_staleness3") == 1.0
    assert metric("rollout_rs_seq_masked_fraction_staleness1") == 0.0
    assert not any(name.endswith("_staleness2") for name in result)
    assert "rollout_corr/rollout_is_eff_sample_size_staleness0" not in result and len(result) == 4 * 12 - 2
    without = correction_metrics(LOGS, MASK, CU, compute_correction(LOGS, MASK, CU, "none", "token", 0.5, 2.5))
    assert len(without) == 12 and without["rollout_corr/rollout_is_mean"] == 1.0


def test_no_actions_give_no_metrics() -> None:
    no_actions = torch.zeros(7).bool()
    assert (
        correction_metrics(
            LOGS * 0, no_actions, CU, compute_correction(LOGS * 0, no_actions, CU, "tis", "token", 0, 2), LOGS.int()
        )
        == {}
    )


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize(("kind", "level"), [("tis", "sequence"), ("icepop", "token"), ("reject", "geometric")])
def test_weights_and_metrics_do_not_depend_on_sharding(kind: Any, level: Any, ranks: int) -> None:
    mask, cu = random_batch(4)
    draw = torch.Generator().manual_seed(4)
    logs = torch.randn(len(mask), generator=draw) * 0.2 * mask
    staleness = torch.randint(0, 5, (len(mask),), generator=draw, dtype=torch.int32)
    full = compute_correction(logs, mask, cu, kind, level, 0.8, 1.3)
    expected = correction_metrics(logs, mask, cu, full, staleness)
    shares = shard_sequences(cu, ranks, 4)

    def work(comm: Any) -> tuple[Correction, dict[str, float]]:
        _, tokens, starts = shares[comm.rank]
        result = compute_correction(logs[tokens], mask[tokens], starts, kind, level, 0.8, 1.3)
        metrics = correction_metrics(logs[tokens], mask[tokens], starts, result, staleness[tokens], comm.all_reduce)
        return result, metrics

    for (_, tokens, _), (result, metrics) in zip(shares, as_ranks(ranks, work), strict=True):
        assert torch.equal(result.weights, full.weights[tokens])  # bitwise: no sequence is split
        assert metrics == pytest.approx(expected, rel=1e-12) and len(metrics) > 4 * 12
