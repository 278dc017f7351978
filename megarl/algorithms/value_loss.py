"""The critic's clipped regression loss, and how good the critic is."""

from __future__ import annotations

import torch

from megarl.algorithms.totals import action_tokens, picked
from megarl.types import TokenLoss, Total, alone


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
    values: torch.Tensor, returns: torch.Tensor, loss_mask: torch.Tensor, total: Total = alone
) -> float:
    """1 - Var(R - V) / Var(R) over the action tokens of all: 1 is a perfect critic, 0 no better than a constant.

    0 where the returns are all equal, for then there is nothing to explain.
    """
    count = action_tokens(loss_mask, total)
    if not count:
        return 0.0
    actual = picked(returns, loss_mask, torch.float64)
    unexplained = actual - picked(values, loss_mask)
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
