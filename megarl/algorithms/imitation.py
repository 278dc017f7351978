"""Learning from one's own good answers: VAPO's loss of positive examples."""

from __future__ import annotations

import torch

from megarl.types import TokenLoss, TrainBatch


def positive_nll(logprobs: torch.Tensor, part: TrainBatch) -> TokenLoss:
    """VAPO's positive-example LM loss (arXiv:2504.05118, section 4.3), a term to be added with a weight (0.1 there).

        L = -1 / (sum_{o in T} |o|) sum_{o in T} sum_t log pi(a_t | s_t),   T: the answers whose reward is above 0

    It is normalised by the tokens of these answers in the whole mini-batch, `part.counts.rewarded`, whatever
    `loss.mean` says: [T], of which sum(loss_weights * loss) is this part's share of L. `logprobs` [T] with a gradient.
    Metric: `actor/nll_loss`, L. Both are 0 of a mini-batch without such an answer.
    """
    assert part.counts is not None and part.loss_weights is not None
    lengths = part.cu_seqlens.diff().to(logprobs.device)
    good = torch.repeat_interleave(part.sequence_reward[part.own].to(logprobs.device) > 0, lengths) & part.loss_mask
    zeros = torch.zeros_like(logprobs)
    nll = torch.where(good, -logprobs, zeros) / max(part.counts.rewarded, 1)
    loss = torch.where(good, nll / part.loss_weights.where(good, torch.ones_like(zeros)), zeros)
    return TokenLoss(loss, {"actor/nll_loss": nll.detach() * part.counts.actions})
