"""Losses other than the policy's, and the token weights that aggregate a loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megarl.algorithms.advantages import spread_to_tokens
from megarl.algorithms.token_stats import count_action_tokens, masked_select
from megarl.types import AllReduce, TokenLoss, TrainBatch, local_all_reduce


def token_mean_weights(loss_mask: torch.Tensor, actions: int) -> torch.Tensor:
    """Return [T] fp32 weights that turn a sum of token losses into their mean: 1 / `actions` on each action token.

    actions: action tokens of the global mini-batch, so that the weights do not depend on its split into ranks and
    micro-batches. All 0 without action tokens.
    """
    return loss_mask.float().div_(max(actions, 1))


def sequence_mean_weights(cu_seqlens: torch.Tensor, loss_mask: torch.Tensor, sequences: int) -> torch.Tensor:
    """Return [T] fp32 weights that turn a sum of token losses into the mean over sequences of per-sequence means
    (arXiv:2402.03300, eq. 3): 1 / (N * action tokens of the sequence) on each action token.

    sequences: N, the sequences of the global mini-batch with an action token; others have weight 0. An episode in
    several branches (`types.Episodes`) counts as one: pass the `cu_seqlens` of episodes, and N counts episodes.
    """
    masks = loss_mask.split(cu_seqlens.diff().tolist())
    actions = torch.tensor([int(torch.count_nonzero(mask)) for mask in masks], dtype=torch.int64)
    return spread_to_tokens(1.0 / (actions.clamp(min=1) * max(sequences, 1)), cu_seqlens, loss_mask)


def constant_weights(loss_mask: torch.Tensor, length: int, sequences: int) -> torch.Tensor:
    """Return [T] fp32 weights that turn a sum of token losses into the mean over sequences of per-sequence sums divided
    by a constant: 1 / (length * N) on each action token.

    Dr. GRPO (arXiv:2503.20783, listing 1) takes the maximum number of generated tokens as the constant: a token of a
    long response then counts as much as a token of a short one. sequences: N as in `sequence_mean_weights`.
    """
    return loss_mask.float().div_(length * max(sequences, 1))


def pair_mean_weights(cu_seqlens: torch.Tensor, all_reduce: AllReduce = local_all_reduce) -> torch.Tensor:
    """Return [T] fp32 weights that turn a sum of `bradley_terry` losses into their mean over all ranks' pairs:
    1 / pairs at the last token of each chosen sequence. Both sequences of a pair must be on one rank."""
    chosen = cu_seqlens[1:][0::2] - 1
    weights = torch.zeros(int(cu_seqlens[-1]))
    weights[chosen] = 1.0 / max(1, int(all_reduce(chosen.new_tensor(len(chosen)))))
    return weights


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    loss_mask: torch.Tensor,
    value_clip: float | None,
) -> TokenLoss:
    """Return the critic's loss, [T]: 0.5 * max((v - R)^2, (clip(v, old - value_clip, old + value_clip) - R)^2).

    The clipping is that of OpenAI Baselines (ppo2/model.py); `value_clip` None gives 0.5 * (v - R)^2. All inputs are
    [T], aligned as in `types/`. Loss, gradient and metrics are 0 where `loss_mask` is False, whatever the inputs are
    there.

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
    values: torch.Tensor, returns: torch.Tensor, loss_mask: torch.Tensor, all_reduce: AllReduce = local_all_reduce
) -> float:
    """Return 1 - Var(R - V) / Var(R) over all ranks' action tokens: 1 is a perfect critic, 0 no better than a constant.

    Returns 0 if all returns are equal, since there is no variance to explain. Collective in `all_reduce`.
    """
    count = count_action_tokens(loss_mask, all_reduce)
    if not count:
        return 0.0
    actual = masked_select(returns, loss_mask, torch.float64)
    unexplained = actual - masked_select(values, loss_mask)
    weight = len(actual) / count  # 1 on a single rank, which then gets exactly its local mean and variance
    local_moments = torch.stack([_moments(actual), _moments(unexplained)])  # [2, mean and variance]
    means = all_reduce(weight * local_moments[:, 0])
    # If all returns are equal, the mean differs from them by fp64 rounding only, so it is exact in their own dtype.
    num_different = torch.count_nonzero(actual != means[0].to(returns.dtype))
    variances = weight * (local_moments[:, 1] + (local_moments[:, 0] - means).square())
    sums = torch.cat([variances, num_different[None].to(variances.dtype)])
    variance, unexplained_variance, different = all_reduce(sums)
    return float(1.0 - unexplained_variance / variance) if different else 0.0


def _moments(share: torch.Tensor) -> torch.Tensor:
    """Return mean and (population) variance of [n] fp64; 0 if empty."""
    return torch.stack([share.mean(), share.var(correction=0)]) if len(share) else share.new_zeros(2)


def bradley_terry(scores: torch.Tensor, cu_seqlens: torch.Tensor, group: torch.Tensor) -> TokenLoss:
    """Return the loss of each pair, -log sigmoid(r_chosen - r_rejected), at the last token of the chosen sequence, [T].

    arXiv:2203.02155, eq. 1, for K = 2 responses to a prompt; 0 at all other tokens. `scores` [T]: the score r of a
    sequence is that of its last token. Sequences 2k and 2k + 1 are the chosen and the rejected one of a pair and share
    a number in `group` [N]. Raises ValueError if they do not, that is, if a pair was split.

    Metrics: `reward_model/accuracy` 1 where the chosen one has the higher score, `reward_model/margin` the difference.
    """
    check_pairs(group)
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


def check_pairs(group: torch.Tensor) -> None:
    """Raise ValueError unless sequences 2k and 2k + 1 share a number in `group` [n]."""
    if len(group) % 2 or not torch.equal(group[0::2], group[1::2]):
        raise ValueError(f"these are not pairs: sequences of the groups {group.tolist()}")


def positive_nll(logprobs: torch.Tensor, part: TrainBatch) -> TokenLoss:
    """Return VAPO's positive-example LM loss (arXiv:2504.05118, section 4.3), to be added with a weight (0.1 there).

        L = -1 / (sum_{o in T} |o|) sum_{o in T} sum_t log pi(a_t | s_t),   T: responses with a reward above 0

    The loss is normalized by the tokens of these responses in the global mini-batch, `part.counts.positive_actions`,
    independent of `loss.agg_mode`: for the returned [T], sum(loss_weights * loss) is this part's share of L. `logprobs`
    [T] with a gradient. Metric: `actor/nll_loss`, L. Both are 0 for a mini-batch without such responses.
    """
    assert part.counts is not None and part.loss_weights is not None
    lengths = part.cu_seqlens.diff().to(logprobs.device)
    has_reward = part.sequence_reward[part.local_indices].to(logprobs.device) > 0
    is_positive = torch.repeat_interleave(has_reward, lengths) & part.loss_mask
    zeros = torch.zeros_like(logprobs)
    nll = torch.where(is_positive, -logprobs, zeros) / max(part.counts.positive_actions, 1)
    loss = torch.where(is_positive, nll / part.loss_weights.where(is_positive, torch.ones_like(zeros)), zeros)
    return TokenLoss(loss, {"actor/nll_loss": nll.detach() * part.counts.actions})
