"""The frozen policy that the KL is measured against: the actor's first weights, swapped into its model in place; with
LoRA the actor's model without its adapters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from megarl.types import TrainBatch
from megarl.workers.actor import ActorWorker
from megarl.workers.context import Context, Worker


class ReferenceWorker(Worker):
    """Keeps a host copy of the actor's weights as they were loaded from `model.path`, but with LoRA, where they stay
    what they are; no second model on the device."""

    def __init__(self, context: Context, actor: ActorWorker) -> None:
        super().__init__(context)
        self.actor = actor

    def start(self) -> None:
        model = self.actor.model
        if self.config.lora.rank:
            self.first: Callable[[], AbstractContextManager[None]] = model.without_adapters
        else:
            self.first = partial(model.swapped, model.snapshot())

    def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """[T] fp32 on the host. Its router chooses for itself: the experts on record are those of other weights."""
        batch = batch.with_(routing=None)
        with self.clock.phase("reference_logprobs"), self.first():
            logprobs = self.actor.model.forward(batch, self.actor.temperature)["logprobs"]
        return self.actor.require_finite("log-probs by the first weights", logprobs, batch)
