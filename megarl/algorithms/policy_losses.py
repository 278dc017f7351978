"""The policy losses that `loss.policy` names, with their options. `POLICY_LOSSES` is the table; `README.md` has the
papers.

- PPO's clipped loss, with dual clip.
- GSPO, GSPO-token and GMPO use one importance ratio per sequence, the geometric mean of its tokens' ratios. Each action
  token carries the loss of its sequence: `loss.mean: sequence` then gives the papers' mean over sequences, while
  `token` weights a sequence by its length. Sequences must be whole, which they are in a micro-batch on every rank
  that computes a loss. A branch of an episode counts as a sequence.
- CISPO and SAPO weight a token instead of clipping it: CISPO by a bounded ratio, SAPO by a soft gate.
- Clip-Cov and KL-Cov (arXiv:2505.22617) mask or penalise the few tokens that make the policy's entropy fall.

Entropy falls with the covariance of log-prob and advantage. The contribution of a token, among the N action tokens of a
mini-batch, is

    Cov(y_i) = (log pi(y_i) - mean_j log pi(y_j)) (A(y_i) - mean_j A(y_j))                     (section 4.2)

which depends on all of them, so tokens are marked before the mini-batch is split into micro-batches. Each rank marks
its own tokens; the means and thresholds are computed with `total`. The log-probs are those from before the first
update on the batch, which the advantages belong to as well; those of a later update would need another forward pass.
The marks depend on the tokens and on `seed`, not on which rank holds them, up to rounding at a threshold.
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
"""Far outside of any clip range; above it exp would overflow and turn even the dual clip's zero gradient into NaN."""


@dataclass(frozen=True)
class Clip:
    """The range [1 - low, 1 + high] of a token's ratio, and the bound of PPO's loss for negative advantages."""

    low: float = 0.2
    high: float | None = None
    """None for `low`."""
    dual: float | None = None


@dataclass(frozen=True)
class PolicyLossInput:
    """What a policy loss is given: whole sequences, aligned as in `types/`. Where `loss_mask` is False a loss, its
    gradient and its metrics are 0, whatever stands there."""

    logprobs: torch.Tensor  # [T] of the policy, with a gradient
    old_logprobs: torch.Tensor  # [T] of the one that the ratio is to
    advantages: torch.Tensor  # [T]
    loss_mask: torch.Tensor  # [T] bool
    cu_seqlens: torch.Tensor  # [n + 1]
    marked: torch.Tensor | None = None  # [T] bool, what the loss has chosen out of the whole mini-batch

    @property
    def advantage(self) -> torch.Tensor:
        """[T], 0 where `loss_mask` is False."""
        return torch.where(self.loss_mask, self.advantages, torch.zeros_like(self.logprobs))

    @property
    def log_ratio(self) -> torch.Tensor:
        """[T], 0 where `loss_mask` is False: masked before exp, for 0 * inf would be NaN, in gradients too."""
        return torch.where(self.loss_mask, self.logprobs - self.old_logprobs, torch.zeros_like(self.logprobs))

    @property
    def marked_actions(self) -> torch.Tensor:
        """[T] bool, the tokens that are marked."""
        return torch.zeros_like(self.loss_mask) if self.marked is None else self.marked & self.loss_mask


def ppo_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> TokenLoss:
    """Loss per token, [T] (arXiv:1707.06347, eq. 7, negated), bounded for negative advantages by `dual_clip`.

        ratio = exp(logprobs - old_logprobs), at most e^20
        loss  = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
        loss  = min(loss, -A * dual_clip) where A < 0          (arXiv:1912.09729, eq. 5)

    All inputs are [T], aligned as in `types/`; `clip_high` None means `clip_low`. The gradient flows into `logprobs`
    only. Where `loss_mask` is False loss, gradient and metrics are 0, whatever the other inputs are there.

    Metrics: `actor/pg_clipfrac` 1 where clipping changed the loss, `actor/pg_clipfrac_lower` 1 where the dual clip did,
    `actor/ppo_kl` old - new log-probs, the k1 estimate of KL(old || new).
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip must be greater than 1, not {dual_clip}")
    clip_high = clip_low if clip_high is None else clip_high
    zeros = torch.zeros_like(logprobs)
    # Masked before exp: 0 * inf would be NaN, in the loss as in the gradient.
    log_ratio = torch.where(loss_mask, logprobs - old_logprobs, zeros)
    advantages = torch.where(loss_mask, advantages, zeros)
    ratio = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    metrics = {"actor/pg_clipfrac": (clipped > plain).to(loss.dtype), "actor/ppo_kl": -log_ratio.detach()}
    if dual_clip is not None:
        bound = -advantages * dual_clip
        bounded = (advantages < 0) & (loss > bound)
        loss = torch.where(bounded, bound, loss)
        metrics["actor/pg_clipfrac_lower"] = bounded.to(loss.dtype)
    return TokenLoss(loss=loss, metrics=metrics)


def ppo_loss(sampled: PolicyLossInput, clip: Clip, options: object = None) -> TokenLoss:
    """`ppo_policy_loss`, as `loss.clip`, `loss.clip_high` and `loss.dual_clip` say; it has no options."""
    return ppo_policy_loss(
        sampled.logprobs,
        sampled.old_logprobs,
        sampled.advantages,
        sampled.loss_mask,
        clip_low=clip.low,
        clip_high=clip.high,
        dual_clip=clip.dual,
    )


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


def gspo_loss(sampled: PolicyLossInput, clip: Clip, options: GSPOOptions) -> TokenLoss:
    """Group sequence policy optimisation (arXiv:2507.18071, eq. 5), [T], the same number on each token of a sequence.

        s_i    = (pi(y_i) / pi_old(y_i))^(1 / |y_i|) = exp(mean over its action tokens of log pi - log pi_old)
        loss_i = max(-A_i s_i, -A_i clip(s_i, 1 - clip_low, 1 + clip_high))

    A is the token's own where tokens of a sequence differ in it. Metrics: `actor/pg_clipfrac`, `actor/ppo_kl` as of
    `ppo_policy_loss`, `actor/sequence_clipfrac` the share of sequences that were clipped.
    """
    return _clipped_loss(sampled, _expand_to_tokens(_sequence_log_ratio(sampled), sampled), options)


def gspo_token_loss(sampled: PolicyLossInput, clip: Clip, options: GSPOOptions) -> TokenLoss:
    """GSPO-token (arXiv:2507.18071, section 4.3), [T]: each token has the sequence's ratio, and its own gradient.

        s_it   = sg[s_i] pi(y_it) / sg[pi(y_it)]
        loss_t = max(-A_t s_it, -A_t clip(s_it, 1 - clip_low, 1 + clip_high))

    The same as GSPO where a sequence has one advantage and the mean is over sequences; else for advantages per token.
    """
    log_ratio = sampled.log_ratio
    whole = _expand_to_tokens(_sequence_log_ratio(sampled), sampled).detach()
    return _clipped_loss(sampled, whole + (log_ratio - log_ratio.detach()), options)


def gmpo_loss(sampled: PolicyLossInput, clip: Clip, options: GMPOOptions) -> TokenLoss:
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
    mean = _expand_to_tokens(_sequence_means(kept, sampled), sampled).clamp(max=MAX_LOG_RATIO)
    metrics = {
        "actor/pg_clipfrac": (kept != log_ratio).where(advantage != 0, torch.zeros_like(sampled.loss_mask)).to(mean),
        "actor/ppo_kl": -log_ratio.detach(),
    }
    return TokenLoss(-advantage * torch.exp(mean), metrics)


def _clipped_loss(sampled: PolicyLossInput, log_ratio: torch.Tensor, options: GSPOOptions) -> TokenLoss:
    ratio, advantage = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO)), sampled.advantage
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    was_clipped = (clipped > plain).to(plain.dtype)
    metrics = {"actor/pg_clipfrac": was_clipped, "actor/ppo_kl": -sampled.log_ratio.detach()}
    of_sequences = {"actor/sequence_clipfrac": _sequence_means(was_clipped, sampled)}
    return TokenLoss(torch.maximum(plain, clipped), metrics, of_sequences)


def _sequence_log_ratio(sampled: PolicyLossInput) -> torch.Tensor:
    """[n] the mean log ratio of a sequence's action tokens, 0 where there is none."""
    return _sequence_means(sampled.log_ratio, sampled)


def _sequence_means(x: torch.Tensor, sampled: PolicyLossInput) -> torch.Tensor:
    """[T], 0 where nothing is trained on -> [n], the mean over each sequence's action tokens; 0 where there is none."""
    lengths = sampled.cu_seqlens.diff().tolist()
    means = [
        part.sum() / mask.sum().clamp(min=1)  # a sum each: in one order, on a GPU too
        for part, mask in zip(x.split(lengths), sampled.loss_mask.split(lengths), strict=True)
    ]
    return torch.stack(means) if means else x[:0]


def _expand_to_tokens(x: torch.Tensor, sampled: PolicyLossInput) -> torch.Tensor:
    """[n] -> [T], 0 where `loss_mask` is False."""
    lengths = sampled.cu_seqlens.diff().tolist()
    spread = [x[:0], *(one.expand(length) for one, length in zip(x, lengths, strict=True))]
    return torch.where(sampled.loss_mask, torch.cat(spread), torch.zeros_like(sampled.logprobs))


@dataclass(frozen=True)
class CISPOOptions:
    most: Annotated[float, Range(1, 1e6)] = 5.0
    """Upper bound of the ratio as a weight, the paper's 1 + epsilon_high, of which it gives no number. Others' defaults
    are 4 (Tinker) and 6 (NeMo RL)."""
    least: NonNegativeFloat = 0.0
    """Lower bound, 1 - epsilon_low; 0 is none, as in the paper."""


@dataclass(frozen=True)
class SAPOOptions:
    tau_positive: Annotated[float, Range(above=0, most=1000)] = 1.0
    """Temperature of the gate where the advantage is positive."""
    tau_negative: Annotated[float, Range(above=0, most=1000)] = 1.05
    """Where it is negative: the gate closes sooner. Both as in the paper."""


def cispo_loss(sampled: PolicyLossInput, clip: Clip, options: CISPOOptions) -> TokenLoss:
    """CISPO (MiniMax-M1, arXiv:2506.13585, section 3.1), [T]: REINFORCE with a bounded importance weight.

        loss_t = -sg[clip(rho_t, least, most)] A_t log pi(o_t)

    No token loses its gradient. Metrics: `actor/pg_clipfrac` 1 where the weight was bounded, `actor/ppo_kl`.
    """
    log_ratio = sampled.log_ratio.detach()
    ratio = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))
    weight = ratio.clamp(options.least, options.most)
    logprobs = torch.where(sampled.loss_mask, sampled.logprobs, torch.zeros_like(sampled.logprobs))
    metrics = {"actor/pg_clipfrac": (weight != ratio).to(ratio.dtype), "actor/ppo_kl": -log_ratio}
    return TokenLoss(-weight * sampled.advantage * logprobs, metrics)


def sapo_loss(sampled: PolicyLossInput, clip: Clip, options: SAPOOptions) -> TokenLoss:
    """Soft adaptive policy optimisation (arXiv:2511.20347), [T]: a sigmoid of the ratio in place of a clip.

        loss_t = -A_t f(rho_t),  f(x) = 4 / tau sigmoid(tau (x - 1))
        tau    = tau_positive where A_t > 0, else tau_negative

    so that f'(1) = 1: on policy the gradient is that of the plain ratio, and it fades as the ratio leaves 1, on either
    side. Metrics: `actor/sapo_gate` the gradient's weight f'(rho) / f'(1), `actor/ppo_kl`.
    """
    log_ratio, advantage = sampled.log_ratio, sampled.advantage
    ratio = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))
    tau = torch.full_like(ratio, options.tau_negative).masked_fill_(advantage > 0, options.tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1.0))
    open_by = (4.0 * gate * (1.0 - gate)).detach() * sampled.loss_mask
    metrics = {"actor/sapo_gate": open_by, "actor/ppo_kl": -log_ratio.detach()}
    return TokenLoss(-advantage * gate * (4.0 / tau), metrics)


Part = Annotated[float, Range(above=0, most=1)]


@dataclass(frozen=True)
class ClipCovOptions:
    share: Part = 2e-4
    """Of a mini-batch's action tokens that are left out, drawn at random of those whose covariance is in the range."""
    least: NonNegativeFloat = 1.0
    """The range of covariances; these three are the defaults of the paper's authors, in verl."""
    most: NonNegativeFloat = 5.0


@dataclass(frozen=True)
class KLCovOptions:
    share: Part = 2e-4
    """Of a mini-batch's action tokens that are held back: those with the largest covariance. Its
    authors' recipe for a model of 7B has 2e-3."""
    coef: Annotated[float, Range(0, 1000)] = 1.0
    """Weight of the KL to the policy before the update on these."""


def clip_cov_loss(sampled: PolicyLossInput, clip: Clip, options: ClipCovOptions) -> TokenLoss:
    """PPO's clipped loss, [T], and 0 without a gradient on the tokens that are marked.

    The paper's (section 4.3) is -A rho without a clip: the recipe `clip_cov` opens those of `loss`. Metrics: those of
    `ppo_policy_loss`, and `actor/cov_frac` 1 on the marked ones.
    """
    ppo = ppo_loss(sampled, clip)
    loss = torch.where(sampled.marked_actions, torch.zeros_like(ppo.loss), ppo.loss)
    return TokenLoss(loss, ppo.metrics | {"actor/cov_frac": sampled.marked_actions.to(loss.dtype)})


def kl_cov_loss(sampled: PolicyLossInput, clip: Clip, options: KLCovOptions) -> TokenLoss:
    """-A rho, [T], without a clip, plus coef |log rho| on the tokens that are marked.

    |log pi - log pi_old| is what the paper's authors take for the KL of a token to the policy before the update; it has
    no gradient where nothing has changed yet. Metrics: `actor/ppo_kl`, `actor/cov_frac`, and `actor/cov_kl` the KL
    on the marked tokens, 0 elsewhere.
    """
    log_ratio = sampled.log_ratio
    penalty = torch.where(sampled.marked_actions, log_ratio.abs(), torch.zeros_like(log_ratio))
    loss = -sampled.advantage * torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO)) + options.coef * penalty
    metrics = {
        "actor/ppo_kl": -log_ratio.detach(),
        "actor/cov_frac": sampled.marked_actions.to(loss.dtype),
        "actor/cov_kl": penalty.detach(),
    }
    return TokenLoss(loss, metrics)


def mark_in_range(mini: TrainBatch, options: ClipCovOptions, seed: int) -> torch.Tensor:
    """[T] bool of the tokens here: floor(share N) of all N action tokens (one, at least), drawn at random from those
    with least < Cov < most, or all of these where there are fewer. Collective."""
    covariance, actions = _covariance(mini)
    eligible = mini.loss_mask & (covariance > options.least) & (covariance < options.most)
    return _sample_tokens(mini, eligible, _num_marked(options.share, actions), seed)


def mark_largest(mini: TrainBatch, options: KLCovOptions, seed: int) -> torch.Tensor:
    """[T] bool of the tokens here: the floor(share N) of all N action tokens (one, at least) with the largest
    covariance, if it is positive. Of those that equal the last of them, which are many where a policy is sure of most
    tokens, as many are drawn at random as are wanted. Collective."""
    covariance, actions = _covariance(mini)
    eligible = mini.loss_mask & (covariance > 0)
    found, wanted = int(mini.all_reduce(eligible.sum())), _num_marked(options.share, actions)
    if found <= wanted:
        return eligible
    (last,) = kth_values(covariance[eligible], (found - wanted + 1,), mini.all_reduce)
    above, equal = eligible & (covariance > last), eligible & (covariance == last)
    return above | _sample_tokens(mini, equal, wanted - int(mini.all_reduce(above.sum())), seed)


def _sample_tokens(mini: TrainBatch, eligible: torch.Tensor, wanted: int, seed: int) -> torch.Tensor:
    """So many of all eligible tokens, [T] bool of the tokens here; all where there are no more."""
    if int(mini.all_reduce(eligible.sum())) <= wanted:
        return eligible
    order = _random_keys(mini, seed)
    (last,) = kth_values(order[eligible], (wanted,), mini.all_reduce)
    return eligible & (order <= last)


def _num_marked(share: float, actions: int) -> int:
    return max(1, int(share * actions))


def _covariance(mini: TrainBatch) -> tuple[torch.Tensor, int]:
    """[T] fp32 of the tokens here, 0 outside of actions; and how many action tokens there are in all."""
    assert mini.old_logprobs is not None and mini.advantages is not None
    mask = mini.loss_mask
    logprobs, advantages = (torch.where(mask, x.double(), 0.0) for x in (mini.old_logprobs, mini.advantages))
    sums = mini.all_reduce(torch.stack([mask.sum().double(), logprobs.sum(), advantages.sum()]))
    _, of_logprobs, of_advantages = sums / sums[0].clamp(min=1)
    product = (logprobs - of_logprobs) * (advantages - of_advantages)
    return torch.where(mask, product, 0.0).float(), int(sums[0])


def _random_keys(mini: TrainBatch, seed: int) -> torch.Tensor:
    """[T] fp32 numbers that are not negative, of each token its own, by its sequence's number in the mini-batch, its
    place in it, and the seed: a hash, whose bits are read as a number."""
    bits = _hash_bits(_hash_bits(mini.sequence_ids + _hash_bits(torch.tensor(seed))) + mini.positions)
    return (bits % 0x7F800000).int().view(torch.float32)  # below infinity


def _hash_bits(x: torch.Tensor) -> torch.Tensor:
    """A hash of the lowest 32 bits of whole numbers, int64: each bit of the result depends on each of them."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # Wellons, nullprogram.com/blog/2018/07/31
        x = ((x ^ ((x & 0xFFFFFFFF) >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


@dataclass(frozen=True)
class NoOptions:
    """Of a loss that has none."""


@dataclass(frozen=True)
class PolicyLoss:
    """One of a fork is such a value, or a function like `loss` alone, by `module:name`."""

    loss: Callable[[PolicyLossInput, Clip, Any], TokenLoss]
    """Of `loss.clip`, `clip_high` and `dual_clip` and an `options` -> a number per token."""
    options: type = NoOptions
    """A frozen dataclass of what `loss.options` may have, with defaults and ranges."""
    mark: Callable[[TrainBatch, Any, int], torch.Tensor] | None = None
    """Of a whole mini-batch before it is cut, an `options` and a seed -> [T] bool of the tokens here, which the loss is
    given as `marked`; collective."""


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
