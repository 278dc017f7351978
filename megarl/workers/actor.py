"""The policy in training: log-probs, updates, weights for the engine, export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from megarl.checkpoint.gather import gather_hf
from megarl.checkpoint.hf import save_adapter, save_hf
from megarl.megatron.model import MegatronModel
from megarl.models.adapters import adapted_weights, peft_config, peft_tensors
from megarl.parallel.ranks import together
from megarl.types import ModelOutput, TrainBatch
from megarl.workers.training import TrainingWorker


class ActorWorker(TrainingWorker):
    role = "actor"

    def start(self) -> None:
        with self.clock.phase("load"):
            context = self.context
            self.model = MegatronModel(
                context.hf_config, self.config, self.ranks, self.role, total_updates=context.updates[self.role]
            )
            self.model.load_hf(self.config.model.path)
            context.models.add(self.model)

    def forward(self, batch: TrainBatch) -> ModelOutput:
        """Log-probs, [T] fp32 on the host, of the policy as it is now."""
        with self.clock.phase("actor_logprobs"):
            output = self.model.forward(batch, self.temperature)
        return ModelOutput(logprobs=self.require_finite("log-probs", output["logprobs"], batch))

    @property
    def temperature(self) -> float:
        """The policy is the distribution that was sampled from; greedy rollouts are scored as drawn at 1."""
        return self.config.rollout.temperature or 1.0

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the policy under its HF name, whole, on every rank of the actor, one after another; adapters
        merged."""
        return gather_hf(self.model.merged(), self.model.params(), self.model.ranks)

    def export(self, folder: Path) -> None:
        """Write the policy as an HF folder, with LoRA also its adapters, in PEFT's format, into the folder `adapter`
        beside it; the actor's first rank writes, all of its ranks take part. Raises OSError on all of them where the
        disk does not take it."""
        with self.clock.phase("export"):
            together(lambda: self._export_model(folder), group=self.model.ranks.host)
            if self.config.lora.rank:
                together(lambda: self._export_adapter(folder.with_name("adapter")), group=self.model.ranks.host)

    def _export_model(self, folder: Path) -> None:
        save_hf(
            folder,
            self.hf_tensors(),
            self.config.model.path,
            getattr(torch, self.config.model.dtype),
            write=self.model.ranks.role_rank == 0,
            table=self.model.params(),
        )

    def _export_adapter(self, folder: Path) -> None:
        lora, table = self.config.lora, self.model.params()
        factors = dict(gather_hf(self.model.local_adapters(), self.model.adapter_params(), self.model.ranks))
        if self.model.ranks.role_rank == 0:
            tensors = peft_tensors(factors, adapted_weights(table, lora.targets), lora.rank)
            save_adapter(folder, tensors, peft_config(table, lora, str(Path(self.config.model.path).resolve())))
