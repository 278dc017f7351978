"""The frozen policy that the KL is measured against: the actor's initial weights, swapped into its model in place, or
with LoRA the actor's model without its adapters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from megarl.observe.clock import REMOTE
from megarl.types import ModelOutput, TrainBatch
from megarl.workers.actor import ActorWorker
from megarl.workers.context import Context, Worker
from megarl.workers.futures import Future


class ReferenceWorker(Worker):
    """Keeps a host copy of the actor's weights as loaded from `model.path`; with LoRA none, since these weights never
    change. There is no second model on the device. It is colocated with the actor."""

    def __init__(self, context: Context, actor: ActorWorker) -> None:
        super().__init__(context)
        self.actor = actor
        self.use_reference_weights: Callable[[], AbstractContextManager[None]] = nullcontext

    def start(self) -> None:
        model = self.actor.model
        if model is not None:
            self.use_reference_weights = (
                model.without_adapters if self.config.lora.rank else partial(model.swap_weights, model.snapshot())
            )

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        """Return log-probs, [T]. The reference routes for itself: the recorded experts are those of other weights."""
        with self.clock.phase("reference_logprobs", REMOTE if self.actor.model is None else "reference"):
            what, temperature = "log-probs with the initial weights", self.actor.temperature
            return self.actor._forward(
                batch.with_(routing=None), what, temperature, context=self.use_reference_weights()
            )
