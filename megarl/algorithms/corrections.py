"""What a sampled token counts for where the policy that learns is not the one that sampled it.

The engine computes in other kernels than the trainer, and of an asynchronous run tokens are of older weights. Both show
in the ratio of the trainer's probability of a token, by the weights at the beginning of the step, to the engine's when
it drew it:

    rho_t = pi_trainer(a_t | s_t) / pi_engine(a_t | s_t)

`CORRECTIONS.md` beside this file says when which of the corrections is of use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megarl.algorithms.policy_losses import MAX_LOG_RATIO
from megarl.algorithms.token_rewards import sequence_sums
from megarl.algorithms.token_stats import batched_kth_values, masked_select
from megarl.types import AllReduce, local_all_reduce

CorrectionKind = Literal["none", "tis", "icepop", "mis", "reject"]
RatioLevel = Literal["token", "sequence", "geometric"]

LAST_STALENESS_BUCKET = 3
"""Figures by lag are of 0, 1, 2, and of this and more."""


@dataclass(frozen=True)
class Correction:
    """Of each token, all [T]; 0 and False where `loss_mask` is False."""

    weights: torch.Tensor  # fp32, what the token's loss counts for, without a gradient
    is_below: torch.Tensor  # bool, where the ratio is below the bounds
    is_above: torch.Tensor  # bool, where it is above them


def log_ratios(policy: torch.Tensor, engine: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """[T] log rho at action tokens, from -20 to 20, 0 elsewhere, of two columns of log-probs."""
    difference = (policy.detach() - engine).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.masked_fill_(~loss_mask, 0.0)


def aggregate_log_ratio(
    log_ratio: torch.Tensor, loss_mask: torch.Tensor, cu_seqlens: torch.Tensor, level: RatioLevel
) -> torch.Tensor:
    """[T] log of the ratio that an action token is judged by, from -20 to 20, 0 elsewhere; `log_ratio` as above.

    token      rho_t
    sequence   product of rho over the sequence's action tokens
    geometric  the same to the power of 1 / (number of these tokens)
    """
    if level == "token":
        return log_ratio
    whole = sequence_sums(log_ratio.double(), cu_seqlens)
    if level == "geometric":
        whole = whole / sequence_sums(loss_mask.double(), cu_seqlens).clamp(min=1)
    whole = whole.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).to(log_ratio.dtype)
    return torch.repeat_interleave(whole, cu_seqlens.diff()).masked_fill_(~loss_mask, 0.0)


def compute_correction(
    log_ratio: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kind: CorrectionKind,
    level: RatioLevel,
    low: float,
    high: float,
) -> Correction:
    """What each action token's loss counts for; `log_ratio` [T] of `log_ratios`, `cu_seqlens` [N + 1].

    With r the ratio at its level:

        tis     w = min(max(r, low), high)          truncated importance sampling (Ionides 2008); of tokens, with the
                                                    ratio of the loss to the trainer's log-probs of before: decoupled
                                                    PPO (arXiv:2110.00641, arXiv:2505.24298), whose
                                                    weight is pi_prox / pi_behav, here cut
        icepop  w = r where low <= r <= high else 0             of tokens (arXiv:2510.18855, the function M)
        mis     the same, of sequences: masked importance sampling
        reject  w = 0 for all of a sequence of which a token has r outside of [low, high], else 1
        none    w = 1

    Functions of whole sequences: a share of them has the weights that it has of all.
    """
    judged = aggregate_log_ratio(log_ratio, loss_mask, cu_seqlens, level)
    ratio = torch.exp(judged)
    below, above = loss_mask & (ratio < low), loss_mask & (ratio > high)
    outside = below | above
    if kind == "tis":
        weights = ratio.clamp(low, high)
    elif kind in ("icepop", "mis"):
        weights = ratio.masked_fill(outside, 0.0)
    elif kind == "reject":
        out = sequence_sums(outside.int(), cu_seqlens) > 0
        weights = torch.ones_like(ratio).masked_fill_(torch.repeat_interleave(out, cu_seqlens.diff()), 0.0)
    elif kind == "none":
        weights = torch.ones_like(ratio)
    else:
        raise ValueError(f"kind must be none, tis, icepop, mis or reject, not {kind!r}")
    return Correction(weights.masked_fill_(~loss_mask, 0.0), below, above)


def correction_metrics(
    log_ratio: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    made: Correction,
    lag: torch.Tensor | None = None,
    total: AllReduce = local_all_reduce,
) -> dict[str, float]:
    """How far apart the two policies are, and what was done about it, of all tokens and of those of each lag.

    `lag` [T] whole numbers: tokens of 0, 1, 2, and 3 or more versions ago are looked at alone, under names that end in
    _lag0 and so on; sequences by their oldest token. None is no lag at all. Names are verl's where it has the figure:

        kl, k3_kl                        of the engine's policy to the trainer's, by token: -log rho; rho - 1 - log rho
        ratio_p5, _p50, _p95, _max       of rho, by token
        rollout_is_eff_sample_size       (sum w)^2 / (n sum w^2) of the products w of rho over n sequences: 1 where both
                                         are one policy, 1/n where one sequence outweighs all others; not cut by bounds
        rollout_is_ratio_fraction_high   share of tokens above the bounds at the correction's level, _low: below them
        rollout_is_mean                  mean weight
        rollout_rs_masked_fraction       share of tokens that weigh nothing
        rollout_rs_seq_masked_fraction   share of sequences of which no token weighs anything

    Collective in `total`; the same on all ranks. Nothing where there is no action token.
    """
    of_tokens, of_sequences = _split_by_staleness(loss_mask, cu_seqlens, lag)
    whole = torch.exp(sequence_sums(log_ratio.double(), cu_seqlens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    kept = sequence_sums((made.weights > 0).int(), cu_seqlens) > 0
    values, sums = [], []
    for mask, chosen in zip(of_tokens, of_sequences, strict=True):
        logs, weights, own = (
            masked_select(log_ratio, mask, torch.float64),
            masked_select(made.weights, mask),
            whole[chosen],
        )
        ratios = torch.exp(logs)
        values.append(ratios.float())
        parts = [float(part.sum()) for part in (-logs, ratios - 1.0 - logs, weights.double(), weights == 0)]
        parts += [float(torch.count_nonzero(mask & part)) for part in (made.is_above, made.is_below)]
        parts += [len(own), float(own.sum()), float(own.square().sum()), float(torch.count_nonzero(~kept[chosen]))]
        sums.append(torch.tensor([len(logs), *parts], dtype=torch.float64))
    table = total(torch.stack(sums))
    there = [row for row, tokens in enumerate(table[:, 0].tolist()) if tokens]
    if not there:
        return {}
    counts = [int(table[row, 0]) for row in there]
    shares = [tuple(-(-count * percent // 100) for percent in (5, 50, 95, 100)) for count in counts]
    found: dict[str, float] = {}
    for row, ks in zip(there, batched_kth_values([values[row] for row in there], shares, total), strict=True):
        tokens, kl, k3, weight, masked, above, below, sequences, first, second, rejected = table[row].tolist()
        figures = dict(zip(("ratio_p5", "ratio_p50", "ratio_p95", "ratio_max"), ks, strict=True))
        figures |= {"kl": kl / tokens, "k3_kl": k3 / tokens, "rollout_is_mean": weight / tokens}
        figures |= {"rollout_is_ratio_fraction_high": above / tokens, "rollout_is_ratio_fraction_low": below / tokens}
        figures["rollout_rs_masked_fraction"] = masked / tokens
        if sequences:  # tokens of a lag may all be in sequences with older ones
            figures["rollout_is_eff_sample_size"] = first * first / (sequences * second)
            figures["rollout_rs_seq_masked_fraction"] = rejected / sequences
        ending = f"_lag{row - 1}" if row else ""
        found |= {f"rollout_corr/{name}{ending}": value for name, value in figures.items()}
    return found


def _split_by_staleness(
    loss_mask: torch.Tensor, cu_seqlens: torch.Tensor, lag: torch.Tensor | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Masks [T] of action tokens and [N] of sequences that have some: of all, then of each lag."""
    acting = sequence_sums(loss_mask.int(), cu_seqlens) > 0
    if lag is None:
        return [loss_mask], [acting]
    ages = lag.clamp(0, LAST_STALENESS_BUCKET)
    # A sequence is as old as its oldest action: that is of the highest of these lags of which it has one.
    oldest = torch.zeros_like(cu_seqlens[1:])
    for age in range(1, LAST_STALENESS_BUCKET + 1):
        oldest[sequence_sums((loss_mask & (ages == age)).int(), cu_seqlens) > 0] = age
    each = range(LAST_STALENESS_BUCKET + 1)
    tokens = [loss_mask, *(loss_mask & (ages == age) for age in each)]
    return tokens, [acting, *(acting & (oldest == age) for age in each)]
