"""Off-policy corrections: loss weights of tokens that another policy sampled than the one that learns.

The engine's kernels differ from the trainer's, and in asynchronous runs tokens come from older weights. Both show in
the ratio of the trainer's probability of a token, with the weights at the beginning of the step, to the engine's when
it sampled the token:

    rho_t = pi_trainer(a_t | s_t) / pi_engine(a_t | s_t)

`CORRECTIONS.md` explains when to use which correction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megarl.algorithms.policy_losses import MAX_LOG_RATIO
from megarl.algorithms.token_stats import batched_kth_values, masked_select, sequence_sums
from megarl.types import AllReduce, local_all_reduce

CorrectionKind = Literal["none", "tis", "icepop", "mis", "reject"]
RatioLevel = Literal["token", "sequence", "geometric"]

LAST_STALENESS_BUCKET = 3  # metrics by staleness have buckets 0, 1, 2, and this value or more


@dataclass(frozen=True)
class Correction:
    """Correction of each token. All [T]; 0 and False where `loss_mask` is False."""

    weights: torch.Tensor  # fp32 weight of the token's loss, without a gradient
    is_below: torch.Tensor  # bool, True where the ratio is below the bounds
    is_above: torch.Tensor  # bool, True where the ratio is above the bounds


def log_ratios(policy: torch.Tensor, engine: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return [T] log rho from two columns of log-probs, clamped to [-20, 20] at action tokens; 0 elsewhere."""
    difference = (policy.detach() - engine).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.masked_fill_(~loss_mask, 0.0)


def aggregate_log_ratio(
    log_ratio: torch.Tensor, loss_mask: torch.Tensor, cu_seqlens: torch.Tensor, level: RatioLevel
) -> torch.Tensor:
    """Return [T] log of the ratio at `level`, in [-20, 20]; 0 outside action tokens. `log_ratio` is from `log_ratios`.

    token      rho_t
    sequence   product of rho over the sequence's action tokens
    geometric  geometric mean of rho over the sequence's action tokens
    """
    if level == "token":
        return log_ratio
    aggregate = sequence_sums(log_ratio.double(), cu_seqlens)
    if level == "geometric":
        aggregate = aggregate / sequence_sums(loss_mask.double(), cu_seqlens).clamp(min=1)
    aggregate = aggregate.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).to(log_ratio.dtype)
    return torch.repeat_interleave(aggregate, cu_seqlens.diff()).masked_fill_(~loss_mask, 0.0)


def compute_correction(
    log_ratio: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    kind: CorrectionKind,
    level: RatioLevel,
    low: float,
    high: float,
) -> Correction:
    """Return the weight of each action token's loss. `log_ratio` [T] is from `log_ratios`, `cu_seqlens` [N + 1].

    With r the ratio at `level`:

        tis     w = min(max(r, low), high)          truncated importance sampling (Ionides 2008); at token level, with
                                                    a loss ratio to the trainer's log-probs before the update, this is
                                                    decoupled PPO (arXiv:2110.00641, arXiv:2505.24298) with its
                                                    weight pi_prox / pi_behav truncated
        icepop  w = r where low <= r <= high else 0             at token level (arXiv:2510.18855, the function M)
        mis     the same at sequence level: masked importance sampling
        reject  w = 0 for all tokens of a sequence with any r outside [low, high], else 1
        none    w = 1

    Weights depend on whole sequences only, so a rank's share of the batch gets the same weights as the full batch.
    """
    level_log_ratio = aggregate_log_ratio(log_ratio, loss_mask, cu_seqlens, level)
    ratio = torch.exp(level_log_ratio)
    below, above = loss_mask & (ratio < low), loss_mask & (ratio > high)
    outside = below | above
    if kind == "tis":
        weights = ratio.clamp(low, high)
    elif kind in ("icepop", "mis"):
        weights = ratio.masked_fill(outside, 0.0)
    elif kind == "reject":
        is_rejected = sequence_sums(outside.int(), cu_seqlens) > 0
        weights = torch.ones_like(ratio).masked_fill_(torch.repeat_interleave(is_rejected, cu_seqlens.diff()), 0.0)
    elif kind == "none":
        weights = torch.ones_like(ratio)
    else:
        raise ValueError(f"kind must be none, tis, icepop, mis or reject, not {kind!r}")
    return Correction(weights.masked_fill_(~loss_mask, 0.0), below, above)


def correction_metrics(
    log_ratio: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    correction: Correction,
    staleness: torch.Tensor | None = None,
    all_reduce: AllReduce = local_all_reduce,
) -> dict[str, float]:
    """Return metrics of the mismatch between the two policies and of its correction, overall and by staleness.

    `staleness` [T]: integer age of each token. Tokens of 0, 1, 2, and 3 or more versions ago have metrics of their own,
    with the suffix _staleness0 and so on; sequences count by their oldest token. None omits these. Names are
    verl's where verl has the metric:

        kl, k3_kl                        KL of the engine's policy to the trainer's, per token: -log rho;
                                         rho - 1 - log rho
        ratio_p5, _p50, _p95, _max       quantiles of rho over tokens
        rollout_is_eff_sample_size       (sum w)^2 / (n sum w^2) of the products w of rho over n sequences: 1 for equal
                                         policies, 1/n if one sequence outweighs all others; ignores the bounds
        rollout_is_ratio_fraction_high   share of tokens above the bounds at the correction's level, _low: below them
        rollout_is_mean                  mean weight
        rollout_rs_masked_fraction       share of tokens with weight 0
        rollout_rs_seq_masked_fraction   share of sequences whose tokens all have weight 0

    Collective in `all_reduce`; the same on all ranks. Empty without action tokens.
    """
    token_masks, sequence_masks = _split_by_staleness(loss_mask, cu_seqlens, staleness)
    sequence_ratio = torch.exp(sequence_sums(log_ratio.double(), cu_seqlens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    is_rejected = sequence_sums((correction.weights > 0).int(), cu_seqlens) == 0
    values, sums = [], []
    for mask, sequence_mask in zip(token_masks, sequence_masks, strict=True):
        logs, weights = masked_select(log_ratio, mask, torch.float64), masked_select(correction.weights, mask)
        ratios, sequence_ratios = torch.exp(logs), sequence_ratio[sequence_mask]
        values.append(ratios.float())
        parts = [-logs, ratios - 1.0 - logs, weights.double(), weights == 0]
        parts += [mask & correction.is_above, mask & correction.is_below]
        sequence_parts = [sequence_ratios, sequence_ratios.square(), is_rejected[sequence_mask]]
        local_sums = [
            len(logs),
            *(part.sum() for part in parts),
            len(sequence_ratios),
            *(p.sum() for p in sequence_parts),
        ]
        sums.append(torch.tensor(local_sums, dtype=torch.float64))
    table = all_reduce(torch.stack(sums))
    nonempty = [row for row, tokens in enumerate(table[:, 0].tolist()) if tokens]
    if not nonempty:
        return {}
    counts = [int(table[row, 0]) for row in nonempty]
    shares = [tuple(-(-count * percent // 100) for percent in (5, 50, 95, 100)) for count in counts]
    result: dict[str, float] = {}
    quantiles = batched_kth_values([values[row] for row in nonempty], shares, all_reduce)
    for row, ks in zip(nonempty, quantiles, strict=True):
        tokens, kl, k3, weight, masked, above, below, sequences, ratio_sum, square_sum, rejected = table[row].tolist()
        metrics = dict(zip(("ratio_p5", "ratio_p50", "ratio_p95", "ratio_max"), ks, strict=True))
        metrics |= {"kl": kl / tokens, "k3_kl": k3 / tokens, "rollout_is_mean": weight / tokens}
        metrics |= {"rollout_is_ratio_fraction_high": above / tokens, "rollout_is_ratio_fraction_low": below / tokens}
        metrics["rollout_rs_masked_fraction"] = masked / tokens
        if sequences:  # all tokens of this age may be in sequences with older tokens
            metrics["rollout_is_eff_sample_size"] = ratio_sum * ratio_sum / (sequences * square_sum)
            metrics["rollout_rs_seq_masked_fraction"] = rejected / sequences
        suffix = f"_staleness{row - 1}" if row else ""
        result |= {f"rollout_corr/{name}{suffix}": value for name, value in metrics.items()}
    return result


def _split_by_staleness(
    loss_mask: torch.Tensor, cu_seqlens: torch.Tensor, staleness: torch.Tensor | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return masks [T] of action tokens and [N] of sequences with action tokens: overall, then per staleness bucket."""
    has_action = sequence_sums(loss_mask.int(), cu_seqlens) > 0
    if staleness is None:
        return [loss_mask], [has_action]
    ages = staleness.clamp(0, LAST_STALENESS_BUCKET)
    # A sequence is as old as its oldest action: the highest bucket in which it has an action.
    oldest = torch.zeros_like(cu_seqlens[1:])
    for age in range(1, LAST_STALENESS_BUCKET + 1):
        oldest[sequence_sums((loss_mask & (ages == age)).int(), cu_seqlens) > 0] = age
    buckets = range(LAST_STALENESS_BUCKET + 1)
    tokens = [loss_mask, *(loss_mask & (ages == age) for age in buckets)]
    return tokens, [has_action, *(has_action & (oldest == age) for age in buckets)]
