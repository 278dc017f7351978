"""Policy losses of `loss.policy_loss` and their options. `POLICY_LOSSES` is the table.

GSPO, GSPO-token and GMPO use one importance ratio per sequence, the geometric mean of its tokens' ratios. Each action
token carries the loss of its sequence: `loss.agg_mode: seq-mean-token-mean` then gives the papers' mean over sequences,
while `token-mean` weights a sequence by its length. Sequences must be whole, which they are in a micro-batch on every
rank that computes a loss. A branch of an episode counts as a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from megarl.algorithms.token_stats import kth_values
from megarl.config.strict import NonNegativeFloat, Range
from megarl.types import TokenLoss, TrainBatch

MAX_LOG_RATIO = 20.0
"""Far outside any clip range; above it exp would overflow and turn even the dual clip's zero gradient into NaN."""


@dataclass(frozen=True)
class Clip:
    """Clip range [1 - low, 1 + high] of a token's ratio, and PPO's dual clip for negative advantages."""

    low: float = 0.2
    high: float | None = None
    """None means `low`."""
    dual: float | None = None


@dataclass(frozen=True)
class PolicyLossInput:
    """Input of a policy loss: whole sequences, aligned as in `types/`.

    Where `loss_mask` is False, a loss must return 0 as loss, gradient and metrics, whatever the columns contain there.
    """

    logprobs: torch.Tensor  # [T] of the policy, with a gradient
    old_logprobs: torch.Tensor  # [T] denominator of the ratio
    advantages: torch.Tensor  # [T]
    loss_mask: torch.Tensor  # [T] bool
    cu_seqlens: torch.Tensor  # [n + 1]
    marked: torch.Tensor | None = None  # [T] bool, tokens selected from the global mini-batch by `PolicyLoss.mark`

    @property
    def advantage(self) -> torch.Tensor:
        """[T], 0 where `loss_mask` is False."""
        return torch.where(self.loss_mask, self.advantages, torch.zeros_like(self.logprobs))

    @property
    def log_ratio(self) -> torch.Tensor:
        """[T], 0 where `loss_mask` is False. Masked before exp, since 0 * inf would be NaN, in gradients too."""
        return torch.where(self.loss_mask, self.logprobs - self.old_logprobs, torch.zeros_like(self.logprobs))

    @property
    def marked_actions(self) -> torch.Tensor:
        """[T] bool, marked action tokens."""
        return torch.zeros_like(self.loss_mask) if self.marked is None else self.marked & self.loss_mask


def ppo_loss(inputs: PolicyLossInput, clip: Clip, options: object = None) -> TokenLoss:
    """Return PPO's loss, [T] (arXiv:1707.06347, eq. 7, negated), bounded for negative advantages by the dual clip.

        ratio = exp(logprobs - old_logprobs), at most e^20
        loss  = max(-A * ratio, -A * clip(ratio, 1 - clip.low, 1 + clip.high))
        loss  = min(loss, -A * clip.dual) where A < 0          (arXiv:1912.09729, eq. 5)

    The gradient flows into `logprobs` only. Has no options.

    Metrics: `actor/pg_clipfrac` 1 where clipping changed the loss, `actor/pg_clipfrac_lower` 1 where the dual clip did,
    `actor/ppo_kl` old - new log-probs, the k1 estimate of KL(old || new).
    """
    if clip.dual is not None and clip.dual <= 1.0:
        raise ValueError(f"dual_clip must be greater than 1, not {clip.dual}")
    result = _clipped_loss(inputs, inputs.log_ratio, clip.low, clip.low if clip.high is None else clip.high)
    if clip.dual is None:
        return result
    bound = -inputs.advantage * clip.dual
    bounded = (inputs.advantage < 0) & (result.loss > bound)
    metrics = {"actor/pg_clipfrac_lower": bounded.to(bound.dtype)}
    return TokenLoss(torch.where(bounded, bound, result.loss), result.metrics | metrics)


def _clipped_loss(inputs: PolicyLossInput, log_ratio: torch.Tensor, low: float, high: float) -> TokenLoss:
    """Return max(-A ratio, -A clip(ratio, 1 - low, 1 + high)), [T], with `actor/pg_clipfrac` and `actor/ppo_kl`."""
    ratio, advantage = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO)), inputs.advantage
    plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1.0 - low, 1.0 + high)
    was_clipped = (clipped > plain).to(plain.dtype)
    metrics = {"actor/pg_clipfrac": was_clipped, "actor/ppo_kl": -inputs.log_ratio.detach()}
    return TokenLoss(torch.maximum(plain, clipped), metrics)


Bound = Annotated[float, Range(above=0, most=1000)]


@dataclass(frozen=True)
class GSPOOptions:
    clip_low: Bound = 3e-4
    """The sequence's ratio is clipped to [1 - clip_low, 1 + clip_high]; defaults from the paper's section 5.1."""
    clip_high: Bound = 4e-4


@dataclass(frozen=True)
class GMPOOptions:
    clip_low: Bound = 0.4
    """A token's log ratio is clipped to [-clip_low, clip_high]; the defaults are the paper's."""
    clip_high: Bound = 0.4


def gspo_loss(inputs: PolicyLossInput, clip: Clip, options: GSPOOptions) -> TokenLoss:
    """Return the loss of GSPO, group sequence policy optimization (arXiv:2507.18071, eq. 5), [T].

        s_i    = (pi(y_i) / pi_old(y_i))^(1 / |y_i|) = exp(mean over its action tokens of log pi - log pi_old)
        loss_i = max(-A_i s_i, -A_i clip(s_i, 1 - clip_low, 1 + clip_high))

    A is the token's own if it differs within a sequence. Metrics: `actor/pg_clipfrac`, `actor/ppo_kl` as in `ppo_loss`,
    `actor/sequence_clipfrac` the share of clipped sequences.
    """
    return _sequence_clipped_loss(inputs, _spread_means(inputs.log_ratio, inputs), options)


def gspo_token_loss(inputs: PolicyLossInput, clip: Clip, options: GSPOOptions) -> TokenLoss:
    """Return the loss of GSPO-token (arXiv:2507.18071, section 4.3), [T]: the sequence's ratio, the token's gradient.

        s_it   = sg[s_i] pi(y_it) / sg[pi(y_it)]
        loss_t = max(-A_t s_it, -A_t clip(s_it, 1 - clip_low, 1 + clip_high))

    Meant for advantages per token. Equal to GSPO if a sequence has one advantage and the mean is over sequences.
    """
    log_ratio = inputs.log_ratio
    sequence_log_ratio = _spread_means(log_ratio, inputs).detach()
    return _sequence_clipped_loss(inputs, sequence_log_ratio + (log_ratio - log_ratio.detach()), options)


def gmpo_loss(inputs: PolicyLossInput, clip: Clip, options: GMPOOptions) -> TokenLoss:
    """Return the loss of GMPO, geometric-mean policy optimization (arXiv:2507.20673), [T].

        g_i    = (prod_t rho'_t)^(1 / |o_i|)
        rho'_t = min(rho_t, e^clip_high) where A > 0, max(rho_t, e^-clip_low) where A < 0
        loss_i = -A_i g_i

    This is the paper's objective, with min[rho A, clip(rho, e^-clip_low, e^clip_high) A] of each token inside the
    geometric mean. If A differs within a sequence, each token uses its own A, and its sign for the clip. Metrics:
    `actor/pg_clipfrac` 1 where the clip changed a token's ratio, `actor/ppo_kl`.
    """
    log_ratio, advantage = inputs.log_ratio, inputs.advantage
    clipped = log_ratio.clamp(-options.clip_low, options.clip_high)
    bounded = torch.where(advantage > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    bounded = torch.where(inputs.loss_mask & (advantage != 0), bounded, torch.zeros_like(bounded))
    mean = _spread_means(bounded, inputs).clamp(max=MAX_LOG_RATIO)
    metrics = {
        "actor/pg_clipfrac": (bounded != log_ratio).where(advantage != 0, torch.zeros_like(inputs.loss_mask)).to(mean),
        "actor/ppo_kl": -log_ratio.detach(),
    }
    return TokenLoss(-advantage * torch.exp(mean), metrics)


def _sequence_clipped_loss(inputs: PolicyLossInput, log_ratio: torch.Tensor, options: GSPOOptions) -> TokenLoss:
    result = _clipped_loss(inputs, log_ratio, options.clip_low, options.clip_high)
    clipfrac = _sequence_means(result.metrics["actor/pg_clipfrac"], inputs)
    return TokenLoss(result.loss, result.metrics, {"actor/sequence_clipfrac": clipfrac})


def _sequence_means(x: torch.Tensor, inputs: PolicyLossInput) -> torch.Tensor:
    """[T] -> [n]: mean over each sequence's action tokens; 0 without any. `x` must be 0 outside action tokens."""
    lengths = inputs.cu_seqlens.diff().tolist()
    means = [
        part.sum() / mask.sum().clamp(min=1)  # one sum per sequence, so that its order is fixed on GPUs too
        for part, mask in zip(x.split(lengths), inputs.loss_mask.split(lengths), strict=True)
    ]
    return torch.stack(means) if means else x[:0]


def _spread_means(x: torch.Tensor, inputs: PolicyLossInput) -> torch.Tensor:
    """[T] -> [T]: `_sequence_means` at each action token, else 0."""
    lengths = inputs.cu_seqlens.diff().tolist()
    means = zip(_sequence_means(x, inputs), lengths, strict=True)
    spread = torch.cat([x[:0], *(mean.expand(length) for mean, length in means)])
    return torch.where(inputs.loss_mask, spread, torch.zeros_like(inputs.logprobs))


@dataclass(frozen=True)
class CISPOOptions:
    max_ratio: Annotated[float, Range(1, 1e6)] = 5.0
    """Upper bound of the ratio as a weight: the paper's 1 + epsilon_high, for which it gives no value. Other projects
    default to 4 (Tinker) and 6 (NeMo RL)."""
    min_ratio: NonNegativeFloat = 0.0
    """Lower bound, 1 - epsilon_low; 0 disables it, as in the paper."""
    synonyms = {"most": "max_ratio", "least": "min_ratio"}


@dataclass(frozen=True)
class SAPOOptions:
    tau_positive: Annotated[float, Range(above=0, most=1000)] = 1.0
    """Temperature of the gate for positive advantages."""
    tau_negative: Annotated[float, Range(above=0, most=1000)] = 1.05
    """Temperature for negative advantages, where the gate closes sooner. Both defaults are the paper's."""


def cispo_loss(inputs: PolicyLossInput, clip: Clip, options: CISPOOptions) -> TokenLoss:
    """Return CISPO's loss (MiniMax-M1, arXiv:2506.13585, section 3.1), [T]: REINFORCE with a bounded weight.

        loss_t = -sg[clip(rho_t, min_ratio, max_ratio)] A_t log pi(o_t)

    No token loses its gradient. Metrics: `actor/pg_clipfrac` 1 where the weight was bounded, `actor/ppo_kl`.
    """
    log_ratio = inputs.log_ratio.detach()
    ratio = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))
    weight = ratio.clamp(options.min_ratio, options.max_ratio)
    logprobs = torch.where(inputs.loss_mask, inputs.logprobs, torch.zeros_like(inputs.logprobs))
    metrics = {"actor/pg_clipfrac": (weight != ratio).to(ratio.dtype), "actor/ppo_kl": -log_ratio}
    return TokenLoss(-weight * inputs.advantage * logprobs, metrics)


def sapo_loss(inputs: PolicyLossInput, clip: Clip, options: SAPOOptions) -> TokenLoss:
    """Return SAPO's loss (soft adaptive policy optimization, arXiv:2511.20347), [T]: a sigmoid instead of a clip.

        loss_t = -A_t f(rho_t),  f(x) = 4 / tau sigmoid(tau (x - 1))
        tau    = tau_positive where A_t > 0, else tau_negative

    f'(1) = 1: on policy the gradient is that of the plain ratio, and it fades as the ratio moves away from 1 on either
    side. Metrics: `actor/sapo_gate` the gradient's weight f'(rho) / f'(1), `actor/ppo_kl`.
    """
    log_ratio, advantage = inputs.log_ratio, inputs.advantage
    ratio = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))
    tau = torch.full_like(ratio, options.tau_negative).masked_fill_(advantage > 0, options.tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1.0))
    openness = (4.0 * gate * (1.0 - gate)).detach() * inputs.loss_mask
    metrics = {"actor/sapo_gate": openness, "actor/ppo_kl": -log_ratio.detach()}
    return TokenLoss(-advantage * gate * (4.0 / tau), metrics)


Part = Annotated[float, Range(above=0, most=1)]


@dataclass(frozen=True)
class ClipCovOptions:
    clip_cov_ratio: Part = 2e-4
    """Share of a mini-batch's action tokens to mask, sampled from those with a covariance in the range."""
    clip_cov_lb: NonNegativeFloat = 1.0
    """Range of the covariance. These three names and defaults are those of the paper's authors in verl."""
    clip_cov_ub: NonNegativeFloat = 5.0
    synonyms = {"share": "clip_cov_ratio", "least": "clip_cov_lb", "most": "clip_cov_ub"}


@dataclass(frozen=True)
class KLCovOptions:
    kl_cov_ratio: Part = 2e-4
    """Share of a mini-batch's action tokens to penalize, those with the largest covariance. The authors' recipe for a
    7B model uses 2e-3."""
    coef: Annotated[float, Range(0, 1000)] = 1.0
    """Weight of the KL to the policy before the update on these tokens."""
    synonyms = {"share": "kl_cov_ratio"}


# Clip-Cov and KL-Cov (arXiv:2505.22617) mask or penalize the few tokens that make the policy's entropy fall. Entropy
# falls with the covariance of log-prob and advantage, to which token i of the N action tokens of a mini-batch adds
#
#     Cov(y_i) = (log pi(y_i) - mean_j log pi(y_j)) (A(y_i) - mean_j A(y_j))                     (section 4.2)
#
# This depends on all tokens, so they are marked before the mini-batch is split into micro-batches, by the log-probs
# from before the first update on the batch. Each rank marks its own tokens; the means and thresholds are all-reduced.


def clip_cov_loss(inputs: PolicyLossInput, clip: Clip, options: ClipCovOptions) -> TokenLoss:
    """Return the loss of Clip-Cov, [T]: PPO's clipped loss, and 0 without a gradient on marked tokens.

    The paper's loss (section 4.3) is -A rho without a clip: the recipe `clip_cov` opens the clips of `loss`. Metrics:
    those of `ppo_loss`, and `actor/cov_frac` 1 on marked tokens.
    """
    ppo = ppo_loss(inputs, clip)
    loss = torch.where(inputs.marked_actions, torch.zeros_like(ppo.loss), ppo.loss)
    return TokenLoss(loss, ppo.metrics | {"actor/cov_frac": inputs.marked_actions.to(loss.dtype)})


def kl_cov_loss(inputs: PolicyLossInput, clip: Clip, options: KLCovOptions) -> TokenLoss:
    """Return the loss of KL-Cov, [T]: -A rho without a clip, plus coef |log rho| on marked tokens.

    The paper's authors use |log pi - log pi_old| as the KL of a token to the policy before the update; it has no
    gradient in the first update. Metrics: `actor/ppo_kl`, `actor/cov_frac`, and `actor/cov_kl` the KL on marked
    tokens, 0 elsewhere.
    """
    log_ratio = inputs.log_ratio
    penalty = torch.where(inputs.marked_actions, log_ratio.abs(), torch.zeros_like(log_ratio))
    loss = -inputs.advantage * torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO)) + options.coef * penalty
    metrics = {
        "actor/ppo_kl": -log_ratio.detach(),
        "actor/cov_frac": inputs.marked_actions.to(loss.dtype),
        "actor/cov_kl": penalty.detach(),
    }
    return TokenLoss(loss, metrics)


def mark_in_range(mini: TrainBatch, options: ClipCovOptions, seed: int) -> torch.Tensor:
    """Return [T] bool: max(1, floor(clip_cov_ratio N)) of all ranks' N action tokens, sampled from those
    with clip_cov_lb < Cov < clip_cov_ub; all of these if there are fewer. Collective."""
    covariance, actions = _covariance(mini)
    eligible = mini.loss_mask & (covariance > options.clip_cov_lb) & (covariance < options.clip_cov_ub)
    return _sample_tokens(mini, eligible, max(1, int(options.clip_cov_ratio * actions)), seed)


def mark_largest(mini: TrainBatch, options: KLCovOptions, seed: int) -> torch.Tensor:
    """Return [T] bool: the max(1, floor(kl_cov_ratio N)) of all ranks' N action tokens with the largest positive
    covariance. Ties, of which a confident policy has many, are broken at random. Collective."""
    covariance, actions = _covariance(mini)
    eligible = mini.loss_mask & (covariance > 0)
    num_eligible, wanted = int(mini.all_reduce(eligible.sum())), max(1, int(options.kl_cov_ratio * actions))
    if num_eligible <= wanted:
        return eligible
    (threshold,) = kth_values(covariance[eligible], (num_eligible - wanted + 1,), mini.all_reduce)
    above, equal = eligible & (covariance > threshold), eligible & (covariance == threshold)
    return above | _sample_tokens(mini, equal, wanted - int(mini.all_reduce(above.sum())), seed)


def _sample_tokens(mini: TrainBatch, eligible: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Sample `count` of all ranks' eligible tokens; [T] bool of the local ones. All if there are no more."""
    if int(mini.all_reduce(eligible.sum())) <= count:
        return eligible
    # fp32 sort keys from a hash of a token's sequence and position, so that they do not depend on its rank.
    bits = _hash_bits(_hash_bits(mini.sequence_ids + _hash_bits(torch.tensor(seed))) + mini.positions)
    keys = (bits % 0x7F800000).int().view(torch.float32)  # non-negative, below infinity
    (threshold,) = kth_values(keys[eligible], (count,), mini.all_reduce)
    return eligible & (keys <= threshold)


def _covariance(mini: TrainBatch) -> tuple[torch.Tensor, int]:
    """Return [T] fp32 covariances of the local tokens, 0 outside action tokens, and the action tokens of all ranks."""
    assert mini.old_logprobs is not None and mini.advantages is not None
    mask = mini.loss_mask
    logprobs, advantages = (torch.where(mask, x.double(), 0.0) for x in (mini.old_logprobs, mini.advantages))
    sums = mini.all_reduce(torch.stack([mask.sum().double(), logprobs.sum(), advantages.sum()]))
    _, mean_logprob, mean_advantage = sums / sums[0].clamp(min=1)
    product = (logprobs - mean_logprob) * (advantages - mean_advantage)
    return torch.where(mask, product, 0.0).float(), int(sums[0])


def _hash_bits(x: torch.Tensor) -> torch.Tensor:
    """Hash the lowest 32 bits of int64 values; each bit of the result depends on all of them."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # Wellons, nullprogram.com/blog/2018/07/31
        x = ((x ^ ((x & 0xFFFFFFFF) >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


@dataclass(frozen=True)
class NoOptions:
    """Options of a loss without options."""


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss. A fork names such a value, or only a function like `loss`, as `module:name`."""

    loss: Callable[[PolicyLossInput, Clip, Any], TokenLoss]
    """(input, clips of the `loss` section, options) -> loss per token."""
    options: type = NoOptions
    """Frozen dataclass of the keys of `loss.options`, with defaults and ranges."""
    mark: Callable[[TrainBatch, Any, int], torch.Tensor] | None = None
    """(global mini-batch before the split, options, seed) -> [T] bool of the local tokens, passed to the loss as
    `marked`. Collective."""


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(ppo_loss),
    "gspo": PolicyLoss(gspo_loss, GSPOOptions),
    "gspo_token": PolicyLoss(gspo_token_loss, GSPOOptions),
    "gmpo": PolicyLoss(gmpo_loss, GMPOOptions),
    "cispo": PolicyLoss(cispo_loss, CISPOOptions),
    "sapo": PolicyLoss(sapo_loss, SAPOOptions),
    "clip_cov": PolicyLoss(clip_cov_loss, ClipCovOptions, mark_in_range),
    "kl_cov": PolicyLoss(kl_cov_loss, KLCovOptions, mark_largest),
}
