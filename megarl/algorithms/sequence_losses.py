"""Policy losses whose ratio is of a sequence, the geometric mean of its tokens' ratios: GSPO, GSPO-token, GMPO.

Each action token is given the loss of its sequence. So with `loss.mean: sequence` the mean over tokens gives a
sequence's loss back, and what is minimised is the papers' mean over sequences; with `token` a sequence counts with its
length. Sequences must be whole, which they are in a micro-batch on every rank that computes a loss; a branch of an
episode is one by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch

from megarl.algorithms.policy_loss import MAX_LOG_RATIO, Clip, Sampled
from megarl.strict import Range
from megarl.types import TokenLoss

Bound = Annotated[float, Range(above=0, most=1000)]


@dataclass(frozen=True)
class GSPOOptions:
    clip_low: Bound = 3e-4
    """The sequence's ratio is clipped to [1 - clip_low, 1 + clip_high]; both as in the paper's section 5.1."""
    clip_high: Bound = 4e-4


@dataclass(frozen=True)
class GMPOOptions:
    clip_low: Bound = 0.4
    """A token's log ratio is clipped to [-clip_low, clip_high], its ratio to [e^-0.4, e^0.4], as in the paper."""
    clip_high: Bound = 0.4


def gspo_loss(sampled: Sampled, clip: Clip, options: GSPOOptions) -> TokenLoss:
    """Group sequence policy optimisation (arXiv:2507.18071, eq. 5), [T], the same number on each token of a sequence.

        s_i    = (pi(y_i) / pi_old(y_i))^(1 / |y_i|) = exp(mean over its action tokens of log pi - log pi_old)
        loss_i = max(-A_i s_i, -A_i clip(s_i, 1 - clip_low, 1 + clip_high))

    A is the token's own where tokens of a sequence differ in it. Metrics: `actor/pg_clipfrac`, `actor/ppo_kl` as of
    `ppo_policy_loss`, `actor/sequence_clipfrac` the share of sequences that were clipped.
    """
    return _clipped(sampled, _on_tokens(_sequence_log_ratio(sampled), sampled), options)


def gspo_token_loss(sampled: Sampled, clip: Clip, options: GSPOOptions) -> TokenLoss:
    """GSPO-token (arXiv:2507.18071, section 4.3), [T]: each token has the sequence's ratio, and its own gradient.

        s_it   = sg[s_i] pi(y_it) / sg[pi(y_it)]
        loss_t = max(-A_t s_it, -A_t clip(s_it, 1 - clip_low, 1 + clip_high))

    The same as GSPO where a sequence has one advantage and the mean is over sequences; else for advantages per token.
    """
    log_ratio = sampled.log_ratio
    whole = _on_tokens(_sequence_log_ratio(sampled), sampled).detach()
    return _clipped(sampled, whole + (log_ratio - log_ratio.detach()), options)


def gmpo_loss(sampled: Sampled, clip: Clip, options: GMPOOptions) -> TokenLoss:
    """Geometric-mean policy optimisation (arXiv:2507.20673), [T], the same number on each token of a sequence.

        g_i    = (prod_t rho'_t)^(1 / |o_i|)
        rho'_t = min(rho_t, e^clip_high) where A > 0, max(rho_t, e^-clip_low) where A < 0
        loss_i = -A_i g_i

    which is the paper's objective, with min[rho A, clip(rho, e^-clip_low, e^clip_high) A] of each token inside of the
    geometric mean. A is the token's own where tokens of a sequence differ in it, with the sign of each for its clip.
    Metrics: `actor/pg_clipfrac` 1 where the clip changed a token's ratio, `actor/ppo_kl`.
    """
    log_ratio, advantage = sampled.log_ratio, sampled.advantage
    within = log_ratio.clamp(-options.clip_low, options.clip_high)
    kept = torch.where(advantage > 0, torch.minimum(log_ratio, within), torch.maximum(log_ratio, within))
    kept = torch.where(sampled.loss_mask & (advantage != 0), kept, torch.zeros_like(kept))
    mean = _on_tokens(_means(kept, sampled), sampled).clamp(max=MAX_LOG_RATIO)
    metrics = {
        "actor/pg_clipfrac": (kept != log_ratio).where(advantage != 0, torch.zeros_like(sampled.loss_mask)).to(mean),
        "actor/ppo_kl": -log_ratio.detach(),
    }
    return TokenLoss(-advantage * torch.exp(mean), metrics)


def _clipped(sampled: Sampled, log_ratio: torch.Tensor, options: GSPOOptions) -> TokenLoss:
    ratio, advantage = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO)), sampled.advantage
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    was_clipped = (clipped > plain).to(plain.dtype)
    metrics = {"actor/pg_clipfrac": was_clipped, "actor/ppo_kl": -sampled.log_ratio.detach()}
    of_sequences = {"actor/sequence_clipfrac": _means(was_clipped, sampled)}
    return TokenLoss(torch.maximum(plain, clipped), metrics, of_sequences)


def _sequence_log_ratio(sampled: Sampled) -> torch.Tensor:
    """[n] the mean log ratio of a sequence's action tokens, 0 where there is none."""
    return _means(sampled.log_ratio, sampled)


def _means(x: torch.Tensor, sampled: Sampled) -> torch.Tensor:
    """[T], 0 where nothing is trained on -> [n], the mean over each sequence's action tokens; 0 where there is none."""
    lengths = sampled.cu_seqlens.diff().tolist()
    means = [
        part.sum() / mask.sum().clamp(min=1)  # a sum each: in one order, on a GPU too
        for part, mask in zip(x.split(lengths), sampled.loss_mask.split(lengths), strict=True)
    ]
    return torch.stack(means) if means else x[:0]


def _on_tokens(x: torch.Tensor, sampled: Sampled) -> torch.Tensor:
    """[n] -> [T], 0 where `loss_mask` is False."""
    lengths = sampled.cu_seqlens.diff().tolist()
    spread = [x[:0], *(one.expand(length) for one, length in zip(x, lengths, strict=True))]
    return torch.where(sampled.loss_mask, torch.cat(spread), torch.zeros_like(sampled.logprobs))
