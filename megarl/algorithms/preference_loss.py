"""The loss of a reward model on pairs of which one was preferred (Bradley and Terry 1952)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megarl.types import TokenLoss


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
