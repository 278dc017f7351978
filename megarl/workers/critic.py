"""The value function: the policy's trunk with a head of one value per token."""

from __future__ import annotations

from megarl.models.registry import load_hf_config
from megarl.parallel.placement import role_config
from megarl.types import ModelOutput, TrainBatch
from megarl.workers.futures import Future
from megarl.workers.model_worker import TrainingWorker


class CriticWorker(TrainingWorker):
    role = "critic"

    def start(self) -> None:
        path = self.config.critic.path or self.config.model.path
        self.build(load_hf_config(path), path, role_config(self.config, self.role))

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        """Return [T] values; values[t] is that of the state before token t."""
        with self.clock.phase("critic_values", self.phase_owner):
            return self._forward(batch, "values")
