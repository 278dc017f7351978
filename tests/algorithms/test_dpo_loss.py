"""Losses of a policy on preference pairs: by hand, and against formulas of their papers written out per pair."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.algorithms.preference_losses import PreferenceOptions, chosen_mean_weights, pair_losses, preference_loss
from megarl.config.recipes import RECIPES
from megarl.config.strict import ConfigError
from megarl.types import TrainBatch

pytestmark = pytest.mark.alone

F64 = torch.float64


def make_batch(lengths: list[int], actions: list[int], seed: int = 0) -> tuple[TrainBatch, torch.Tensor]:
    """Return a batch of pairs whose last `actions` tokens are the answers, and the policy's log-probs."""
    draw = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = torch.cat([torch.arange(n) >= n - a for n, a in zip(lengths, actions, strict=True)])
    batch = TrainBatch(
        tokens=torch.zeros(total, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        loss_mask=mask,
        group=torch.arange(len(lengths) // 2).repeat_interleave(2),
        sequence_reward=torch.zeros(len(lengths)),
        rollout_logprobs=torch.zeros(total),
        ref_logprobs=-torch.rand(total, generator=draw, dtype=F64) * 3,
    )
    return batch, -torch.rand(total, generator=draw, dtype=F64) * 3


def test_dpo_by_hand() -> None:
    """One pair: the chosen answer gains ln 4, the rejected one loses ln 2, so the margin at beta = 1 is ln 8."""
    batch = TrainBatch(
        tokens=torch.zeros(5, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 3, 5]),
        loss_mask=torch.tensor([False, True, True, False, True]),
        group=torch.tensor([7, 7]),
        sequence_reward=torch.zeros(2),
        rollout_logprobs=torch.zeros(5),
        ref_logprobs=torch.tensor([9.0, -2.0, -1.0, 9.0, -1.0], dtype=F64),
    )
    ln2 = math.log(2)
    logprobs = torch.tensor([5.0, -2.0 + ln2, -1.0 + ln2, 5.0, -1.0 - ln2], dtype=F64, requires_grad=True)
    result = preference_loss(logprobs, batch, PreferenceOptions(beta=1.0))
    expected = math.log(1 + 1 / 8)  # -log sigmoid(ln 8)
    assert result.loss.tolist() == pytest.approx([0, expected, expected, 0, 0])
    weights = chosen_mean_weights(batch)
    assert weights.tolist() == [0, 0.5, 0.5, 0, 0]
    (result.loss * weights).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0, -1 / 9, -1 / 9, 0, 1 / 9])  # 1 - sigmoid(ln 8)
    means = {name: float((values * weights).sum()) for name, values in result.metrics.items()}
    assert means == pytest.approx(
        {
            "rewards/chosen": 2 * ln2,
            "rewards/rejected": -ln2,
            "rewards/margin": 3 * ln2,
            "rewards/accuracy": 1.0,
            "logps/chosen": -3 + 2 * ln2,
            "logps/rejected": -1 - ln2,
            "actor/nll_loss": 1.5 - ln2,
        }
    )


def test_pair_losses_by_hand() -> None:
    """The difference is 3 in the first pair and -1 in the second."""
    chosen, rejected = torch.tensor([2.0, -3.0], dtype=F64), torch.tensor([-1.0, -2.0], dtype=F64)

    def losses(**options: object) -> list[float]:
        return pair_losses(chosen, rejected, PreferenceOptions(**options)).tolist()  # type: ignore[arg-type]

    assert losses(loss="ipo", beta=0.25) == [1.0, 9.0]  # (3 - 2)^2, (-1 - 2)^2
    assert losses(loss="hinge", beta=0.5) == [0.0, 1.5]  # 1 - 1.5 < 0, 1 + 0.5
    assert losses(loss="hinge", beta=0.5, target_margin=1.0) == [0.5, 2.5]
    first = [math.log(1 + math.exp(-0.3)), math.log(1 + math.exp(0.1))]  # -log sigmoid(0.1 h)
    second = [math.log(1 + math.exp(0.3)), math.log(1 + math.exp(-0.1))]  # -log sigmoid(-0.1 h)
    assert losses() == pytest.approx(first)
    assert losses(label_smoothing=0.2) == pytest.approx([0.8 * a + 0.2 * b for a, b in zip(first, second, strict=True)])
    assert losses(loss="robust", label_smoothing=0.2) == pytest.approx(
        [(0.8 * a - 0.2 * b) / 0.6 for a, b in zip(first, second, strict=True)]
    )


def test_orpo_by_hand() -> None:
    """Mean probabilities 3/4 and 1/5 have odds 3 and 1/4: a ratio of 12."""
    options = PreferenceOptions(loss="orpo", beta=0.5, reference_free=True, length_normalized=True)
    chosen, rejected = torch.tensor([0.75], dtype=F64).log(), torch.tensor([0.2], dtype=F64).log()
    assert pair_losses(chosen, rejected, options).tolist() == pytest.approx([0.5 * math.log(1 + 1 / 12)])
    certain = torch.zeros(1, requires_grad=True)  # odds of a certain answer are infinite
    loss = pair_losses(certain, torch.tensor([-1.0]), options)
    loss.sum().backward()
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-5) and float(certain.grad or 0.0) == 0.0


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return -torch.log(1 + torch.exp(-x))


def paper_loss(
    algorithm: str, win: torch.Tensor, lose: torch.Tensor, ref_win: torch.Tensor, ref_lose: torch.Tensor
) -> torch.Tensor:
    """Return the loss of a pair from the log-probs of its answers' tokens, as each paper writes it."""
    if algorithm == "dpo":  # eq. 7
        return -log_sigmoid(0.1 * (win.sum() - ref_win.sum()) - 0.1 * (lose.sum() - ref_lose.sum()))
    if algorithm == "ipo":  # eq. 17, tau = beta
        return ((win.sum() + ref_lose.sum() - lose.sum() - ref_win.sum()) - 1 / (2 * 0.1)) ** 2
    if algorithm == "simpo":  # eq. 6
        return -log_sigmoid(2.0 / len(win) * win.sum() - 2.0 / len(lose) * lose.sum() - 1.0)
    if algorithm == "cpo":  # eq. 5, the NLL per token
        return -log_sigmoid(0.1 * win.sum() - 0.1 * lose.sum()) - win.mean()
    p, q = win.mean().exp(), lose.mean().exp()  # eqs. 3, 4, 6 and 7 of orpo
    return -win.mean() - 0.1 * log_sigmoid(torch.log(p / (1 - p)) - torch.log(q / (1 - q)))


@pytest.mark.parametrize("algorithm", ["dpo", "ipo", "simpo", "cpo", "orpo"])
def test_recipes_agree_with_the_papers(algorithm: str) -> None:
    """Loss and gradient of a recipe, a mean over pairs, whether these are in one micro-batch or in several."""
    options = PreferenceOptions(**RECIPES[algorithm].defaults.get("options", {}))
    options.check()
    lengths, actions = [6, 4, 3, 9, 5, 5], [3, 2, 1, 7, 4, 2]
    batch, values = make_batch(lengths, actions)
    expected_logprobs = values.clone().requires_grad_()
    assert batch.ref_logprobs is not None
    columns = expected_logprobs, batch.ref_logprobs
    answers = [
        [x[batch.loss_mask[a:b].nonzero()[:, 0] + a] for x in columns]
        for a, b in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)
    ]
    losses = []
    for (win, ref_win), (lose, ref_lose) in zip(answers[0::2], answers[1::2], strict=True):
        losses.append(paper_loss(algorithm, win, lose, ref_win, ref_lose))
    expected = torch.stack(losses).mean()
    expected.backward()
    weighted = batch.with_(loss_weights=chosen_mean_weights(batch))
    for parts in ([[0, 1, 2, 3, 4, 5]], [[2, 3], [4, 5, 0, 1]]):
        logprobs = values.clone().requires_grad_()
        total = torch.zeros((), dtype=F64)
        for part in parts:
            micro = weighted.select(part)
            places = torch.cat([torch.arange(batch.cu_seqlens[i], batch.cu_seqlens[i + 1]) for i in part])
            result = preference_loss(logprobs[places], micro, options)
            assert micro.loss_weights is not None
            total = total + (result.loss * micro.loss_weights).sum()
        total.backward()
        assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
        torch.testing.assert_close(logprobs.grad, expected_logprobs.grad, rtol=1e-6, atol=1e-9)


def test_split_pairs_raise() -> None:
    batch, logprobs = make_batch([3, 3, 3, 3], [1, 1, 1, 1])
    with pytest.raises(ValueError, match="not pairs"):
        preference_loss(logprobs, batch.with_(group=torch.tensor([0, 1, 1, 0])), PreferenceOptions())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "orpo"}, r"options.loss=orpo compares .* set options.reference_free"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "options.label_smoothing=0.1 has no effect on options.loss=ipo"),
        ({"loss": "ipo", "target_margin": 1.0}, "options.target_margin=1 has no effect on options.loss=ipo"),
    ],
)
def test_contradicting_options_raise(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PreferenceOptions(**options).check()  # type: ignore[arg-type]
