"""Clip-Cov and KL-Cov (arXiv:2505.22617): the few tokens that make a policy's entropy fall are left out, or held back.

Entropy falls by the covariance of log-prob and advantage. A token's part in it, over the N action tokens of a
mini-batch,

    Cov(y_i) = (log pi(y_i) - mean_j log pi(y_j)) (A(y_i) - mean_j A(y_j))                     (section 4.2)

is a figure of all of them, and the tokens with the most are chosen out of all. So they are marked before the mini-batch
is cut into micro-batches, on the rank that has them: means and the few numbers that say where the bounds lie go through
`total`, and each rank marks its own. The log-probs are those from before the first update on the batch, which the
advantages belong to: they are known everywhere then, where those of a later update would need another forward pass.
What is marked depends on the tokens and on `seed`, not on who has them, but for a covariance within rounding of a
bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from megarl.algorithms.policy_loss import MAX_LOG_RATIO, Clip, Sampled, ppo_loss
from megarl.algorithms.totals import kth_values
from megarl.strict import NotNegative, Range
from megarl.types import TokenLoss, TrainBatch

Part = Annotated[float, Range(above=0, most=1)]


@dataclass(frozen=True)
class ClipCovOptions:
    share: Part = 2e-4
    """Of a mini-batch's action tokens that are left out, drawn at random of those whose covariance is in the range."""
    least: NotNegative = 1.0
    """The range of covariances; these three are the defaults of the paper's authors, in verl."""
    most: NotNegative = 5.0


@dataclass(frozen=True)
class KLCovOptions:
    share: Part = 2e-4
    """Of a mini-batch's action tokens that are held back: those with the largest covariance. Its
    authors' recipe for a model of 7B has 2e-3."""
    coef: Annotated[float, Range(0, 1000)] = 1.0
    """Weight of the KL to the policy before the update on these."""


def clip_cov_loss(sampled: Sampled, clip: Clip, options: ClipCovOptions) -> TokenLoss:
    """PPO's clipped loss, [T], and 0 without a gradient on the tokens that are marked.

    The paper's (section 4.3) is -A rho without a clip: the recipe `clip_cov` opens those of `loss`. Metrics: those of
    `ppo_policy_loss`, and `actor/cov_frac` 1 on the marked ones.
    """
    ppo = ppo_loss(sampled, clip)
    loss = torch.where(sampled.chosen, torch.zeros_like(ppo.loss), ppo.loss)
    return TokenLoss(loss, ppo.metrics | {"actor/cov_frac": sampled.chosen.to(loss.dtype)})


def kl_cov_loss(sampled: Sampled, clip: Clip, options: KLCovOptions) -> TokenLoss:
    """-A rho, [T], without a clip, plus coef |log rho| on the tokens that are marked.

    |log pi - log pi_old| is what the paper's authors take for the KL of a token to the policy before the update; it has
    no gradient where nothing has changed yet. Metrics: `actor/ppo_kl`, `actor/cov_frac`, and `actor/cov_kl` the KL
    on the marked tokens, 0 elsewhere.
    """
    log_ratio = sampled.log_ratio
    penalty = torch.where(sampled.chosen, log_ratio.abs(), torch.zeros_like(log_ratio))
    loss = -sampled.advantage * torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO)) + options.coef * penalty
    metrics = {
        "actor/ppo_kl": -log_ratio.detach(),
        "actor/cov_frac": sampled.chosen.to(loss.dtype),
        "actor/cov_kl": penalty.detach(),
    }
    return TokenLoss(loss, metrics)


def mark_in_range(mini: TrainBatch, options: ClipCovOptions, seed: int) -> torch.Tensor:
    """[T] bool of the tokens here: floor(share N) of all N action tokens (one, at least), drawn at random from those
    with least < Cov < most, or all of these where there are fewer. Collective."""
    covariance, actions = _covariance(mini)
    eligible = mini.loss_mask & (covariance > options.least) & (covariance < options.most)
    return _drawn(mini, eligible, _wanted(options.share, actions), seed)


def mark_largest(mini: TrainBatch, options: KLCovOptions, seed: int) -> torch.Tensor:
    """[T] bool of the tokens here: the floor(share N) of all N action tokens (one, at least) with the largest
    covariance, if it is positive. Of those that equal the last of them, which are many where a policy is sure of most
    tokens, as many are drawn at random as are wanted. Collective."""
    covariance, actions = _covariance(mini)
    eligible = mini.loss_mask & (covariance > 0)
    found, wanted = int(mini.total(eligible.sum())), _wanted(options.share, actions)
    if found <= wanted:
        return eligible
    (last,) = kth_values(covariance[eligible], (found - wanted + 1,), mini.total)
    above, equal = eligible & (covariance > last), eligible & (covariance == last)
    return above | _drawn(mini, equal, wanted - int(mini.total(above.sum())), seed)


def _drawn(mini: TrainBatch, eligible: torch.Tensor, wanted: int, seed: int) -> torch.Tensor:
    """So many of all eligible tokens, [T] bool of the tokens here; all where there are no more."""
    if int(mini.total(eligible.sum())) <= wanted:
        return eligible
    order = _at_random(mini, seed)
    (last,) = kth_values(order[eligible], (wanted,), mini.total)
    return eligible & (order <= last)


def _wanted(share: float, actions: int) -> int:
    return max(1, int(share * actions))


def _covariance(mini: TrainBatch) -> tuple[torch.Tensor, int]:
    """[T] fp32 of the tokens here, 0 outside of actions; and how many action tokens there are in all."""
    assert mini.old_logprobs is not None and mini.advantages is not None
    mask = mini.loss_mask
    logprobs, advantages = (torch.where(mask, x.double(), 0.0) for x in (mini.old_logprobs, mini.advantages))
    sums = mini.total(torch.stack([mask.sum().double(), logprobs.sum(), advantages.sum()]))
    _, of_logprobs, of_advantages = sums / sums[0].clamp(min=1)
    product = (logprobs - of_logprobs) * (advantages - of_advantages)
    return torch.where(mask, product, 0.0).float(), int(sums[0])


def _at_random(mini: TrainBatch, seed: int) -> torch.Tensor:
    """[T] fp32 numbers that are not negative, of each token its own, by its sequence's number in the mini-batch, its
    place in it, and the seed: a hash, whose bits are read as a number."""
    bits = _mixed(_mixed(mini.sequence_ids + _mixed(torch.tensor(seed))) + mini.positions)
    return (bits % 0x7F800000).int().view(torch.float32)  # below infinity


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """A hash of the lowest 32 bits of whole numbers, int64: each bit of the result depends on each of them."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # Wellons, nullprogram.com/blog/2018/07/31
        x = ((x ^ ((x & 0xFFFFFFFF) >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)
