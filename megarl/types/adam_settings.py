"""Settings of a single optimizer update, for callers that choose them anew for each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdamSettings:
    """Settings of a single AdamW update. max_grad_norm: 0 does not clip."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
