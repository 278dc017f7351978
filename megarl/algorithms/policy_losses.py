"""The policy losses by the names of `loss.policy`, each with its options; `README.md` has their papers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megarl.algorithms.covariance import (
    ClipCovOptions,
    KLCovOptions,
    clip_cov_loss,
    kl_cov_loss,
    mark_in_range,
    mark_largest,
)
from megarl.algorithms.policy_loss import Clip, Sampled, ppo_loss
from megarl.algorithms.sequence_losses import GMPOOptions, GSPOOptions, gmpo_loss, gspo_loss, gspo_token_loss
from megarl.algorithms.weighted_losses import CISPOOptions, SAPOOptions, cispo_loss, sapo_loss
from megarl.types import TokenLoss, TrainBatch


@dataclass(frozen=True)
class NoOptions:
    """Of a loss that has none."""


@dataclass(frozen=True)
class PolicyLoss:
    """One of a fork is such a value, or a function like `loss` alone, by `module:name`."""

    loss: Callable[[Sampled, Clip, Any], TokenLoss]
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
