"""A policy loss that is spoilt in the steps that SPOILT names, by a file of metrics that says which step it is."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.types import TokenLoss


def spoilt(sampled: Any, clip: Any, options: Any) -> TokenLoss:
    """PPO's. Gradients of one rank alone are not finite."""
    result = POLICY_LOSSES["ppo"].loss(sampled, clip, options)
    file = Path(os.environ["SPOILT_RUN"], "metrics.jsonl")
    step = 1 + (len(file.read_text().splitlines()) if file.exists() else 0)
    bad = range(*map(int, os.environ["SPOILT_STEPS"].split(":")))
    if step in bad and os.environ.get("RANK", "0") == os.environ.get("SPOILT_RANK", "1"):
        return replace(result, loss=result.loss * torch.inf)
    return result
