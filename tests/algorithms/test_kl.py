"""KL estimators and the adaptive KL coefficient."""

import math

import pytest
import torch

from megarl.algorithms.kl import AdaptiveKL, kl_estimate
from megarl.config import KLConfig

pytestmark = pytest.mark.alone

POLICY = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
REFERENCE = torch.tensor([-1.5, -1.0, -0.5], dtype=torch.float64)  # d = 0.5, -1, 0


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("k1", [0.5, -1.0, 0.0]),
        ("k2", [0.125, 0.5, 0.0]),
        ("k3", [0.10653065971263342, 0.7182818284590451, 0.0]),  # e^-0.5 - 1 + 0.5, e^1 - 1 - 1, 0
    ],
)
def test_estimators_by_hand(kind, expected):
    torch.testing.assert_close(kl_estimate(POLICY, REFERENCE, kind), torch.tensor(expected, dtype=torch.float64))


def test_k1_and_k3_are_unbiased():
    torch.manual_seed(0)
    p, q = torch.softmax(torch.randn(6, dtype=torch.float64), 0), torch.softmax(torch.randn(6, dtype=torch.float64), 0)
    exact = float((p * (p / q).log()).sum())
    for kind in ("k1", "k3", "k3_unbiased"):  # the expectation under p, exactly
        assert float((p * kl_estimate(p.log(), q.log(), kind)).sum()) == pytest.approx(exact, abs=1e-12)


def test_k2_gradient_is_unbiased_and_k1_gradient_vanishes():
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.randn(6, dtype=torch.float64), 0)
    logp = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    drawn = logp.detach().exp()
    for kind, expected in (("k2", exact), ("k1", torch.zeros_like(exact))):
        (actual,) = torch.autograd.grad((drawn * kl_estimate(logp, reference, kind)).sum(), logits, retain_graph=True)
        torch.testing.assert_close(actual, expected)


def sample_policies() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a policy's logits and log-probs, and log-probs of a reference and an old policy, over eight tokens."""
    torch.manual_seed(1)
    logits = torch.randn(8, dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(logits.detach() + 2 * torch.randn(8, dtype=torch.float64), 0)
    old = torch.log_softmax(logits.detach() + 0.5 * torch.randn(8, dtype=torch.float64), 0)
    return logits, torch.log_softmax(logits, 0), reference, old


def gradient(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    (result,) = torch.autograd.grad(value, logits, retain_graph=True)
    return result


@pytest.mark.parametrize("off_policy", [False, True])
def test_k3_unbiased_has_the_true_value_and_gradient_off_policy_too(off_policy):
    logits, policy, reference, old = sample_policies()
    exact = (policy.exp() * (policy - reference)).sum()
    drawn_by = old if off_policy else policy.detach()
    estimate = kl_estimate(policy, reference, "k3_unbiased", None, old if off_policy else None)
    expected = (drawn_by.exp() * estimate).sum()  # the exact expectation, over all tokens
    torch.testing.assert_close(expected, exact)
    torch.testing.assert_close(gradient(expected, logits), gradient(exact, logits))


def test_k2_and_k3_as_losses_have_biased_gradients():
    """On policy, k3 has the gradient of KL(reference || policy); off policy, k2 and k3 are both biased."""
    logits, policy, reference, old = sample_policies()
    exact = gradient((policy.exp() * (policy - reference)).sum(), logits)
    reverse = gradient((reference.exp() * (reference - policy)).sum(), logits)

    def estimate_gradient(kind: str, drawn_by: torch.Tensor) -> torch.Tensor:
        return gradient((drawn_by.detach().exp() * kl_estimate(policy, reference, kind)).sum(), logits)

    def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(a @ b / a.norm() / b.norm())

    torch.testing.assert_close(estimate_gradient("k3", policy), reverse)
    assert cosine(estimate_gradient("k3", policy), exact) < 0.95
    assert cosine(estimate_gradient("k2", policy), exact) == pytest.approx(1.0)
    assert max(cosine(estimate_gradient(kind, old), exact) for kind in ("k2", "k3")) < 0.99


def test_default_estimator_depends_on_apply_to():
    assert (KLConfig().resolved_estimator, KLConfig(apply_to="loss").resolved_estimator) == ("k1", "k3_unbiased")
    assert KLConfig(apply_to="loss", estimator="k2").resolved_estimator == "k2"


@pytest.mark.parametrize("kind", ["k3", "k3_unbiased"])
def test_ratios_do_not_overflow(kind):
    policy = torch.tensor([-500.0, -0.1], requires_grad=True)
    estimate = kl_estimate(policy, torch.tensor([-0.1, -500.0]), kind, None, torch.tensor([-0.2, -500.0]))
    estimate.sum().backward()
    assert bool(torch.isfinite(estimate).all()) and policy.grad is not None and bool(torch.isfinite(policy.grad).all())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3_unbiased"])
def test_masked_positions_have_no_effect(kind):
    mask = torch.tensor([True, False, False, False])
    policy = torch.tensor([-1.0, -1e4, float("-inf"), float("nan")], requires_grad=True)
    estimate = kl_estimate(policy, torch.tensor([-1.5, 0.0, -1.0, 0.0]), kind, mask)
    assert estimate[1:].tolist() == [0, 0, 0]
    estimate.sum().backward()
    assert policy.grad is not None and policy.grad[1:].tolist() == [0, 0, 0] and policy.grad[0] != 0


def test_unknown_estimator_raises():
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(POLICY, REFERENCE, "k4")  # type: ignore[arg-type]


def test_adaptive_kl_by_hand():
    start = AdaptiveKL(coef=0.001, target=0.015, horizon=10000)
    # Twice the target: the error 1 is clipped to 0.2; 0.001 * (1 + 0.2 * 64 / 10000).
    assert start.updated(0.03, 64).coef == pytest.approx(0.00100128, abs=1e-15)
    # No divergence: -1 clipped to -0.2; 0.001 * (1 - 0.2 * 64 / 10000).
    assert start.updated(0.0, 64).coef == pytest.approx(0.00099872, abs=1e-15)
    # Inside the clip: 0.0165 / 0.015 - 1 = 0.1; 0.001 * (1 + 0.1 * 1000 / 10000).
    assert start.updated(0.0165, 1000).coef == pytest.approx(0.00101, abs=1e-15)
    assert start.updated(0.015, 64).coef == pytest.approx(0.001, abs=1e-15)
    assert start.coef == 0.001


def test_adaptive_kl_is_constant_without_target_and_never_negative():
    assert AdaptiveKL(0.5, None, 10000).updated(100.0, 64).coef == 0.5
    assert AdaptiveKL(0.5, 0.1, 10).updated(0.0, 1000).coef == 0.0


def test_adaptive_kl_restores_its_state():
    steered = AdaptiveKL(0.001, 0.015, 10000).updated(1.0, 64).updated(0.01, 64)
    initial = AdaptiveKL(0.001, 0.015, 10000)
    assert initial != steered
    assert initial.restored(steered.state_dict()) == steered
    # A coefficient that was changed in the configuration since wins.
    assert AdaptiveKL(7.0, 0.015, 10000).restored(steered.state_dict()).coef == 7.0


def test_adaptive_kl_rejects_nan_and_zero_target():
    with pytest.raises(ValueError, match="diverged"):
        AdaptiveKL(0.001, 0.015, 10000).updated(math.nan, 64)
    with pytest.raises(ValueError, match="positive"):
        AdaptiveKL(0.001, 0.0, 10000)


def test_adaptive_kl_respects_max_coef():
    start = AdaptiveKL(0.19, 0.015, 100, max_coef=0.2)
    assert start.updated(1.0, 64).coef == 0.2  # 0.19 * (1 + 0.2 * 0.64) is 0.2143
    assert start.updated(1.0, 64).updated(0.0, 100).coef == pytest.approx(0.16)  # then down: 0.2 * (1 - 0.2)
    assert start.restored({"coef": 7.0, "initial": 0.19}).coef == 0.2  # saved by a run without max_coef
    assert AdaptiveKL(0.5, None, 100, max_coef=0.2).updated(1.0, 64).coef == 0.5  # a fixed coefficient


def test_only_k1_as_reward_has_the_true_gradient():
    """The policy gradient of E[k] is the sum over tokens of p grad log p k; k3 adds that of the reverse KL."""
    logits, policy, reference, _ = sample_policies()
    exact = gradient((policy.exp() * (policy - reference)).sum(), logits)
    reverse = gradient((reference.exp() * (reference - policy)).sum(), logits)

    def estimate_gradient(kind: str) -> torch.Tensor:
        reward = kl_estimate(policy, reference, kind).detach()
        return gradient((policy.detach().exp() * policy * reward).sum(), logits)

    torch.testing.assert_close(estimate_gradient("k1"), exact)
    torch.testing.assert_close(estimate_gradient("k3"), exact - reverse)
    assert not torch.allclose(estimate_gradient("k2"), exact, rtol=0.1)


def test_adaptive_kl_above_max_kl_turns_off_permanently() -> None:
    guarded = AdaptiveKL(0.001, 0.015, 10000, max_kl=0.5)
    assert guarded.updated(0.5, 64).coef == AdaptiveKL(0.001, 0.015, 10000).updated(0.5, 64).coef > 0.001
    disabled = guarded.updated(0.51, 64)
    assert disabled.coef == 0.0 and disabled.updated(1e-4, 64).coef == 0.0 and disabled.updated(9.0, 64).coef == 0.0
    fixed = AdaptiveKL(0.1, None, 10000, max_kl=0.5)
    assert fixed.updated(0.5, 64).coef == 0.1 and fixed.updated(0.6, 64).coef == 0.0
    assert guarded.restored(disabled.state_dict()).coef == 0.0
    # A coefficient that was changed in the configuration wins.
    assert AdaptiveKL(0.002, 0.015, 10000, max_kl=0.5).restored(disabled.state_dict()).coef == 0.002
