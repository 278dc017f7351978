"""The value function: same trunk as the policy, a head of one number per token."""

from __future__ import annotations

import torch

from megarl.megatron.model import MegatronModel
from megarl.models.registry import load_hf_config
from megarl.parallel import ranks
from megarl.parallel.placement import role_config
from megarl.types import TrainBatch
from megarl.workers.training import TrainingWorker


class CriticWorker(TrainingWorker):
    role = "critic"

    def start(self) -> None:
        with self.clock.phase("load"):
            context, config = self.context, role_config(self.config, self.role)
            layout = ranks.layout(config.parallel, config.run.timeout_s)
            path = config.critic.path or config.model.path
            self.model = MegatronModel(load_hf_config(path), config, layout, self.role, context.updates[self.role])
            self.model.load_hf(path)
            context.models.add(self.model)

    def values(self, batch: TrainBatch) -> torch.Tensor:
        """[T] fp32 on the host; values[t] is of the state before token t."""
        with self.clock.phase("critic_values"):
            values = self.model.forward(batch)["values"]
        return self.require_finite("values", values, batch)
