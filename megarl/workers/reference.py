"""The frozen policy that the KL is measured against: the actor's first weights, swapped into its model in place."""

from __future__ import annotations

import torch

from megarl.types import TrainBatch
from megarl.workers.actor import ActorWorker
from megarl.workers.context import Context, Worker


class ReferenceWorker(Worker):
    """Keeps a host copy of the actor's weights as they were loaded from `model.path`; no second model on the device."""

    def __init__(self, context: Context, actor: ActorWorker) -> None:
        super().__init__(context)
        self.actor = actor

    def start(self) -> None:
        self.weights = self.actor.model.snapshot()

    def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """[T] fp32 on the host. Its router chooses for itself: the experts on record are those of other weights."""
        batch = batch.with_(routing=None)
        with self.clock.phase("reference_logprobs"), self.actor.model.swapped(self.weights):
            return self.actor.model.forward(batch, self.actor.temperature)["logprobs"]
