"""A policy loss with non-finite gradients in chosen steps.

BAD_LOSS_STEPS=first:end chooses the steps, BAD_LOSS_RANK the rank (1 by default). The current step is one more than
the number of lines in the metrics of the run folder BAD_LOSS_RUN.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.types import TokenLoss


def nonfinite_on_one_rank(sampled: Any, clip: Any, options: Any) -> TokenLoss:
    """Return the PPO loss, made infinite on one rank in the chosen steps."""
    result = POLICY_LOSSES["ppo"].loss(sampled, clip, options)
    file = Path(os.environ["BAD_LOSS_RUN"], "metrics.jsonl")
    step = 1 + (len(file.read_text().splitlines()) if file.exists() else 0)
    bad = range(*map(int, os.environ["BAD_LOSS_STEPS"].split(":")))
    if step in bad and os.environ.get("RANK", "0") == os.environ.get("BAD_LOSS_RANK", "1"):
        return replace(result, loss=result.loss * torch.inf)
    return result
