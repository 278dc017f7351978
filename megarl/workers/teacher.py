"""A frozen policy from another folder, for distillation."""

from __future__ import annotations

import dataclasses

from megarl.config import ConfigError, LoraConfig
from megarl.models.registry import load_hf_config
from megarl.models.scalar_head import is_classifier
from megarl.parallel.placement import role_config
from megarl.parallel.role_settings import role_settings
from megarl.types import ModelOutput, TrainBatch
from megarl.workers.futures import Future
from megarl.workers.model_worker import ModelWorker


class TeacherWorker(ModelWorker):
    """Runs on Megatron, in its own layout on its own ranks. It reads the engine's token ids, so it must have the
    policy's vocabulary. For a controller that lists the role `teacher`, or another name in its `workers`:

        roles: {teacher: {model: /models/big, parallel: {tp: 2}}}
        placement: {actor: 0-1, teacher: 2-3}
    """

    role = "actor"

    def start(self) -> None:
        path = role_settings(self.config, self.name).model
        if not path:
            raise ConfigError(
                f"roles.{self.name}.model is not set; it must name the HF folder of the {self._display_name}"
            )
        hf, config = load_hf_config(path), role_config(self.config, self.name)
        if is_classifier(hf):
            raise ConfigError(f"roles.{self.name}.model={path} is a classifier, which has no log-probs of tokens")
        train = dataclasses.replace(config.train, routing_replay=False)  # records hold the policy's experts
        self.build(hf, path, dataclasses.replace(config, train=train, lora=LoraConfig()), trains=False)

    def forward(self, batch: TrainBatch, temperature: float | None = None) -> Future[ModelOutput]:
        """Return a future of [T] log-probs of the batch's tokens. temperature: divides the logits; default: that of the
        rollouts."""
        divisor = temperature or self.config.rollout.temperature or 1.0
        with self.clock.phase(f"{self.name}_logprobs", self.phase_owner):
            return self._forward(batch.with_(routing=None), "log-probs", divisor)

    @property
    def _remedy(self) -> str:
        return f"check the model of roles.{self.name}.model"
