"""The critic's clipped regression loss, and how good the critic is."""

from __future__ import annotations

from typing import Any

import torch

from megarl.types import TokenLoss


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    loss_mask: torch.Tensor,
    value_clip: float | None,
) -> TokenLoss:
    """Loss per token, [T]: 0.5 * max((v - R)^2, (clip(v, old - value_clip, old + value_clip) - R)^2).

    The clipping of OpenAI's baselines (ppo2/model.py); `value_clip` None leaves 0.5 * (v - R)^2. All inputs are [T],
    aligned as in types.py. Where `loss_mask` is False loss, gradient and metrics are 0, whatever the inputs are there.

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
    values: torch.Tensor, returns: torch.Tensor, loss_mask: torch.Tensor, total: Any = None
) -> float:
    """1 - Var(R - V) / Var(R) over the action tokens: 1 is a perfect critic, 0 no better than a constant.

    0 where the returns are all equal, for then there is nothing to explain.
    """
    actual = returns[loss_mask].double()
    if len(actual) == 0 or bool((actual == actual[0]).all()):
        return 0.0
    residual = actual - values[loss_mask].double()
    return float(1.0 - residual.var(correction=0) / actual.var(correction=0))
