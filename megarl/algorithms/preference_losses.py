"""Losses of a policy on preference pairs: DPO and its relatives, as one composition of few options.

With x = log pi(y | x) - log pi_ref(y | x) of an answer, each loss is a function of the difference of x between the
chosen and the rejected answer. The methods differ in this function, in whether x has a reference and is per token, and
in whether the NLL of the chosen answer is added (`README.md` has the table).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F

from megarl.algorithms.losses import check_pairs, sequence_mean_weights
from megarl.config.strict import ConfigError, NonNegativeFloat, PositiveFloat, Range
from megarl.types import TokenLoss, TrainBatch

MAX_MEAN_LOGPROB = -1e-6
"""Upper bound of a mean log-prob in ORPO's odds p / (1 - p), which are infinite at 0."""


@dataclass(frozen=True)
class PreferenceOptions:
    loss: Literal["sigmoid", "hinge", "ipo", "robust", "orpo"] = "sigmoid"
    """Function of the pair's margin: `sigmoid` is DPO's, `hinge` SLiC's, `ipo` a squared distance to 1 / (2 beta),
    `robust` the unbiased estimate of `sigmoid` for labels of which `label_smoothing` are wrong, `orpo` the log odds
    ratio."""
    beta: PositiveFloat = 0.1
    """Scale of the implicit reward beta x; in DPO the coefficient of the KL to the reference. In `orpo` the weight of
    its odds ratio term, lambda in the paper."""
    label_smoothing: Annotated[float, Range(0, below=0.5)] = 0.0
    """Probability that a label is wrong, epsilon: `sigmoid` with it is conservative DPO."""
    target_margin: NonNegativeFloat = 0.0
    """Margin by which the chosen answer's reward shall exceed the rejected one's, gamma in SimPO; subtracted from the
    difference of rewards in `sigmoid`, `hinge` and `robust`."""
    reference_free: bool = False
    """Compare log-probs themselves, without a reference, whose forward pass and weights are then saved."""
    length_normalized: bool = False
    """Divide x by the answer's tokens."""
    sft_coef: Annotated[float, Range(0, 1000)] = 0.0
    """Weight of the chosen answer's NLL, a mean over its tokens, added to the loss: RPO's alpha. It keeps the
    likelihood of chosen answers from falling with that of rejected ones."""

    def check(self, key: str = "options") -> None:
        """Raise ConfigError for options that contradict each other."""
        if self.loss == "orpo" and not (self.reference_free and self.length_normalized):
            raise ConfigError(
                f"{key}.loss=orpo compares the odds of mean log-probs without a reference: set {key}.reference_free "
                f"and {key}.length_normalized, as algorithm=orpo does"
            )
        if self.label_smoothing and self.loss not in ("sigmoid", "robust"):
            raise ConfigError(f"{key}.label_smoothing={self.label_smoothing:g} has no effect on {key}.loss={self.loss}")
        if self.target_margin and self.loss in ("ipo", "orpo"):
            raise ConfigError(f"{key}.target_margin={self.target_margin:g} has no effect on {key}.loss={self.loss}")


def pair_losses(chosen: torch.Tensor, rejected: torch.Tensor, options: PreferenceOptions) -> torch.Tensor:
    """Return the loss of each pair, [n], without the NLL. chosen, rejected: [n] x of the two answers.

    With z = beta (chosen - rejected) - target_margin and e = label_smoothing:

        sigmoid  -(1 - e) log sigmoid(z) - e log sigmoid(-z)                DPO, arXiv:2305.18290, eq. 7
        robust   (-(1 - e) log sigmoid(z) + e log sigmoid(-z)) / (1 - 2 e)  arXiv:2403.00409, eq. 9
        hinge    max(0, 1 - z)                                              arXiv:2305.10425, eq. 6; 2309.06657, eq. 10
        ipo      (chosen - rejected - 1 / (2 beta))^2                       arXiv:2310.12036, eq. 17
        orpo     -beta log sigmoid(log odds(chosen) - log odds(rejected))   arXiv:2403.07691, eq. 7; odds = p / (1 - p)
    """
    beta, smoothing = options.beta, options.label_smoothing
    margin = beta * (chosen - rejected) - options.target_margin
    if options.loss == "sigmoid":
        return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
    if options.loss == "robust":
        return (smoothing * F.logsigmoid(-margin) - (1 - smoothing) * F.logsigmoid(margin)) / (1 - 2 * smoothing)
    if options.loss == "hinge":
        return F.relu(1 - margin)
    if options.loss == "ipo":
        return (chosen - rejected - 1 / (2 * beta)).square()
    chosen, rejected = (x.clamp(max=MAX_MEAN_LOGPROB) for x in (chosen, rejected))
    log_odds_ratio = chosen - rejected - torch.log(-torch.expm1(chosen)) + torch.log(-torch.expm1(rejected))
    return -beta * F.logsigmoid(log_odds_ratio)


def preference_loss(logprobs: torch.Tensor, part: TrainBatch, options: PreferenceOptions) -> TokenLoss:
    """Return the loss of each pair at every action token of the chosen sequence, [T]; 0 at all other tokens.

    Aggregated with `chosen_mean_weights`, each pair counts once and the NLL is a mean over the answer's tokens.
    Sequences 2k and 2k + 1 of `part` are the chosen and the rejected one of a pair; raises ValueError if a pair was
    split. `logprobs` [T] with a gradient; `part.ref_logprobs` [T] unless `reference_free`.

    Metrics, means over pairs: `rewards/chosen`, `rewards/rejected` beta x; `rewards/margin` their difference,
    `rewards/accuracy` 1 where it is positive; `logps/chosen`, `logps/rejected` log-probs of answers, per token if
    `length_normalized`; `actor/nll_loss` of the chosen answer per token.
    """
    check_pairs(part.group[part.local_indices.to(part.group.device)])
    mask, lengths = part.loss_mask, part.cu_seqlens.diff().tolist()

    def sum_answers(x: torch.Tensor) -> torch.Tensor:
        """[T] -> [n, 2]: sums over action tokens, or means, of the two answers of each pair."""
        parts = torch.where(mask, x, torch.zeros_like(x)).split(lengths)
        sums = torch.stack([part.sum() for part in parts]) if parts else x[:0]  # their order is fixed on GPUs too
        if options.length_normalized:
            sums = sums / torch.stack([part.sum() for part in mask.split(lengths)]).clamp(min=1)
        return sums.view(-1, 2)

    def at_chosen(values: torch.Tensor) -> torch.Tensor:
        """[n] -> [T]: each pair's value at the action tokens of its chosen sequence."""
        both = torch.stack([values, torch.zeros_like(values)], dim=1).flatten()
        spread = torch.cat([values[:0], *(x.expand(length) for x, length in zip(both, lengths, strict=True))])
        return torch.where(mask, spread, torch.zeros_like(spread))

    answers = sum_answers(logprobs)
    x = answers
    if not options.reference_free:
        assert part.ref_logprobs is not None
        x = answers - sum_answers(part.ref_logprobs)
    nll = at_chosen(torch.ones_like(answers[:, 0])) * -torch.where(mask, logprobs, torch.zeros_like(logprobs))
    loss = at_chosen(pair_losses(x[:, 0], x[:, 1], options)) + options.sft_coef * nll
    rewards, answers = options.beta * x.detach(), answers.detach()
    margin = rewards[:, 0] - rewards[:, 1]
    metrics = {
        "rewards/chosen": rewards[:, 0],
        "rewards/rejected": rewards[:, 1],
        "rewards/margin": margin,
        "rewards/accuracy": (margin > 0).to(margin.dtype),
        "logps/chosen": answers[:, 0],
        "logps/rejected": answers[:, 1],
    }
    spread_metrics = {name: at_chosen(values) for name, values in metrics.items()}
    return TokenLoss(loss, {**spread_metrics, "actor/nll_loss": nll.detach()})


def chosen_mean_weights(batch: TrainBatch) -> torch.Tensor:
    """Return [T] fp32 weights that turn a sum of `preference_loss` into its mean over all ranks' pairs:
    1 / (pairs * action tokens of the sequence) on each action token of chosen sequences."""
    lengths = batch.cu_seqlens.diff()
    is_chosen = (torch.arange(len(lengths)) % 2 == 0).repeat_interleave(lengths)
    return sequence_mean_weights(batch.cu_seqlens, batch.loss_mask & is_chosen, batch.num_sequences // 2)
