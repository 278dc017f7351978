"""The policy in training: log-probs, updates, weights for the engine, export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from megarl.checkpoint.export import gather_hf
from megarl.models.hf_folder import save_adapter, save_hf
from megarl.models.lora_tables import adapted_weights, peft_config, peft_tensors
from megarl.parallel.placement import role_config
from megarl.parallel.ranks import run_on_all
from megarl.parallel.wait_listeners import track_progress
from megarl.types import ModelOutput, TrainBatch
from megarl.workers.futures import Future
from megarl.workers.model_worker import TrainingWorker


class ActorWorker(TrainingWorker):
    role = "actor"

    def start(self) -> None:
        self.build(self.context.hf_config, self.config.model.path, role_config(self.config, self.role))

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        """Return log-probs of the current policy, [T]."""
        with self.clock.phase("actor_logprobs", self.phase_owner):
            return self._forward(batch, "log-probs", self.temperature)

    @property
    def temperature(self) -> float:
        """The rollouts' temperature, so that the policy is the distribution sampled from; greedy rollouts are scored at
        1."""
        return self.config.rollout.temperature or 1.0

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the policy under its HF name, whole, on all of the actor's ranks, with adapters
        merged."""
        return gather_hf(self.local_model.merged_params(), self.local_model.params(), self.local_model.ranks)

    def export(self, folder: Path) -> None:
        """Write the policy as an HF folder; with LoRA also its adapters in PEFT's format, to the folder `adapter` next
        to it. All of the actor's ranks call it, and the first one writes. Raises OSError on all of them if the disk
        fails."""
        with self.clock.phase("export"):
            run_on_all(lambda: self._export_model(folder), group=self.local_model.ranks.host_group)
            if self.config.lora.rank:
                run_on_all(
                    lambda: self._export_adapter(folder.with_name("adapter")), group=self.local_model.ranks.host_group
                )

    def _export_model(self, folder: Path) -> None:
        save_hf(
            folder,
            track_progress(self.hf_tensors(), sum(len(param.hf) for param in self.local_model.params())),
            self.config.model.path,
            getattr(torch, self.config.model.dtype),
            write=self.local_model.ranks.role_rank == 0,
            table=self.local_model.params(),
        )

    def _export_adapter(self, folder: Path) -> None:
        lora, table = self.config.lora, self.local_model.params()
        factors = dict(
            gather_hf(self.local_model.local_adapters(), self.local_model.adapter_params(), self.local_model.ranks)
        )
        if self.local_model.ranks.role_rank == 0:
            tensors = peft_tensors(factors, adapted_weights(table, lora.target_modules), lora.rank)
            save_adapter(folder, tensors, peft_config(table, lora, str(Path(self.config.model.path).resolve())))
