"""Losses other than the policy's, and the token weights that aggregate a loss.

The critic's clipped regression loss, the Bradley-Terry loss of a reward model (1952), VAPO's imitation loss on correct
answers, and the weight of each token in the loss of a batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megarl.algorithms.token_stats import count_action_tokens, masked_select
from megarl.types import AllReduce, TokenLoss, TrainBatch, local_all_reduce


def token_mean_weights(loss_mask: torch.Tensor, actions: int) -> torch.Tensor:
    """[T] fp32 weights that make a sum of token losses their mean: 1 / (number of action tokens) on each of those.

    actions: of the whole mini-batch of an optimizer step, of which a rank has a share: the weights stay right however
    ranks and micro-batches cut it up. All 0 where there is no action token.
    """
    return loss_mask.float().div_(max(actions, 1))


def sequence_mean_weights(cu_seqlens: torch.Tensor, loss_mask: torch.Tensor, sequences: int) -> torch.Tensor:
    """[T] fp32 weights that make a sum of token losses the mean over sequences of each one's mean over its action
    tokens (arXiv:2402.03300, eq. 3): 1 / (N * action tokens of the sequence) on each of those.

    sequences: N, those of the whole mini-batch that have an action token; others weigh nothing. Of episodes in several
    branches (`types.Episodes`), which count as one each, `cu_seqlens` are those of episodes, and N counts these.
    """
    lengths = cu_seqlens.diff().tolist()
    masks = loss_mask.split(lengths)
    actions = torch.tensor([int(torch.count_nonzero(mask)) for mask in masks], dtype=torch.int64)
    share = 1.0 / (actions.clamp(min=1) * max(sequences, 1))
    weights = torch.zeros(len(loss_mask))
    for part, mask, number in zip(weights.split(lengths), masks, share, strict=True):
        part.masked_fill_(mask, number)
    return weights


def constant_weights(loss_mask: torch.Tensor, length: int, sequences: int) -> torch.Tensor:
    """[T] fp32 weights that make a sum of token losses the mean over sequences of each one's sum over its action
    tokens, divided by a constant: 1 / (length * N) on each action token.

    Dr. GRPO (arXiv:2503.20783, listing 1), whose constant is the tokens that may be generated: a token of a long answer
    counts no less than one of a short one. sequences: N as of `sequence_mean_weights`.
    """
    return loss_mask.float().div_(length * max(sequences, 1))


def pair_mean_weights(cu_seqlens: torch.Tensor, total: AllReduce = local_all_reduce) -> torch.Tensor:
    """[T] fp32 weights that make a sum of `bradley_terry` losses their mean over the pairs: 1 / pairs at the last token
    of each chosen sequence, which are those with even numbers. A share of the pairs has whole ones."""
    chosen = cu_seqlens[1:][0::2] - 1
    weights = torch.zeros(int(cu_seqlens[-1]))
    weights[chosen] = 1.0 / max(1, int(total(chosen.new_tensor(len(chosen)))))
    return weights


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    loss_mask: torch.Tensor,
    value_clip: float | None,
) -> TokenLoss:
    """Loss per token, [T]: 0.5 * max((v - R)^2, (clip(v, old - value_clip, old + value_clip) - R)^2).

    The clipping of OpenAI's baselines (ppo2/model.py); `value_clip` None leaves 0.5 * (v - R)^2. All inputs are [T],
    aligned as in `types/`. Where `loss_mask` is False loss, gradient and metrics are 0, whatever the inputs are there.

    Metrics: `critic/vf_loss` the loss, `critic/vf_clipfrac` 1 where clipping changed it, `critic/value_mean` v,
    `critic/return_mean` R.
    """
    zeros = torch.zeros_like(values)
    values = torch.where(loss_mask, values, zeros)
    old_values = torch.where(loss_mask, old_values, zeros)
    returns = torch.where(loss_mask, returns, zeros)
    plain = (values - returns).square()
    if value_clip is None:
        loss, changed = 0.5 * plain, torch.zeros_like(loss_mask)
    else:
        clipped = (values.clamp(old_values - value_clip, old_values + value_clip) - returns).square()
        loss, changed = 0.5 * torch.maximum(plain, clipped), clipped > plain
    metrics = {
        "critic/vf_loss": loss.detach(),
        "critic/vf_clipfrac": changed.to(loss.dtype),
        "critic/value_mean": values.detach(),
        "critic/return_mean": returns,
    }
    return TokenLoss(loss=loss, metrics=metrics)


def explained_variance(
    values: torch.Tensor, returns: torch.Tensor, loss_mask: torch.Tensor, total: AllReduce = local_all_reduce
) -> float:
    """1 - Var(R - V) / Var(R) over the action tokens of all: 1 is a perfect critic, 0 no better than a constant.

    0 where the returns are all equal, for then there is nothing to explain.
    """
    count = count_action_tokens(loss_mask, total)
    if not count:
        return 0.0
    actual = masked_select(returns, loss_mask, torch.float64)
    unexplained = actual - masked_select(values, loss_mask)
    weight = len(actual) / count  # 1 where this is all of them: what comes out is then their own mean and variance
    own = torch.stack([torch.stack(_moments(actual)), torch.stack(_moments(unexplained))])  # [2, mean and variance]
    means = total(weight * own[:, 0])
    # Equal returns have this mean but for the rounding of fp64, and so exactly this one in their own dtype.
    others = torch.count_nonzero(actual != means[0].to(returns.dtype))
    variances = weight * (own[:, 1] + (own[:, 0] - means).square())
    variance, rest, different = total(torch.cat([variances, others[None].to(variances.dtype)]))
    return float(1.0 - rest / variance) if different else 0.0


def _moments(share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and (population) variance of [n] fp64, 0 of none."""
    return (share.mean(), share.var(correction=0)) if len(share) else (share.new_zeros(()), share.new_zeros(()))


def bradley_terry(scores: torch.Tensor, cu_seqlens: torch.Tensor, group: torch.Tensor) -> TokenLoss:
    """Loss per pair, -log sigmoid(r_chosen - r_rejected), put at the last token of the chosen one and 0 elsewhere, [T].

    arXiv:2203.02155, eq. 1, for K = 2 answers to a prompt. `scores` [T]: a sequence's score r is the one at its last
    token. Sequences 2k and 2k + 1 are the chosen and the rejected one of a pair and have one number in `group` [N].
    Raises ValueError where they do not, that is, where pairs were parted.

    Metrics: `reward_model/accuracy` 1 where the chosen one has the higher score, `reward_model/margin` the difference.
    """
    if len(group) % 2 or not torch.equal(group[0::2], group[1::2]):
        raise ValueError(f"these are no pairs: sequences of the groups {group.tolist()}")
    last = cu_seqlens[1:] - 1
    chosen, rejected = last[0::2], last[1::2]
    margin = scores[chosen] - scores[rejected]

    def at_chosen(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(scores).index_put((chosen,), values)

    metrics = {
        "reward_model/accuracy": at_chosen((margin > 0).to(scores.dtype)),
        "reward_model/margin": at_chosen(margin.detach()),
    }
    return TokenLoss(at_chosen(-F.logsigmoid(margin)), metrics)


def positive_nll(logprobs: torch.Tensor, part: TrainBatch) -> TokenLoss:
    """VAPO's positive-example LM loss (arXiv:2504.05118, section 4.3), a term to be added with a weight (0.1 there).

        L = -1 / (sum_{o in T} |o|) sum_{o in T} sum_t log pi(a_t | s_t),   T: the answers whose reward is above 0

    It is normalised by the tokens of these answers in the whole mini-batch, `part.counts.rewarded`, whatever
    `loss.mean` says: [T], of which sum(loss_weights * loss) is this part's share of L. `logprobs` [T] with a gradient.
    Metric: `actor/nll_loss`, L. Both are 0 of a mini-batch without such an answer.
    """
    assert part.counts is not None and part.loss_weights is not None
    lengths = part.cu_seqlens.diff().to(logprobs.device)
    good = (
        torch.repeat_interleave(part.sequence_reward[part.local_indices].to(logprobs.device) > 0, lengths)
        & part.loss_mask
    )
    zeros = torch.zeros_like(logprobs)
    nll = torch.where(good, -logprobs, zeros) / max(part.counts.positive_actions, 1)
    loss = torch.where(good, nll / part.loss_weights.where(good, torch.ones_like(zeros)), zeros)
    return TokenLoss(loss, {"actor/nll_loss": nll.detach() * part.counts.actions})
