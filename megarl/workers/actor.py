"""Workers with a policy: the actor in training, its reference, and a frozen teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch

from megarl.checkpoint.export import gather_hf
from megarl.config import ConfigError, LoraConfig
from megarl.models.family import is_classifier
from megarl.models.hf_folder import save_adapter, save_hf
from megarl.models.lora_tables import adapted_weights, peft_config, peft_tensors
from megarl.models.registry import load_hf_config
from megarl.observe.clock import REMOTE
from megarl.parallel.placement import role_config, role_settings
from megarl.parallel.ranks import run_on_all
from megarl.parallel.wait_listeners import track_progress
from megarl.types import ModelOutput, TrainBatch
from megarl.workers.context import Context, Worker
from megarl.workers.futures import Future
from megarl.workers.model_worker import ModelWorker, TrainingWorker


class ActorWorker(TrainingWorker):
    """The policy in training: log-probs, updates, weights for the engine, export."""

    role = "actor"

    def start(self) -> None:
        self.build(self.context.hf_config, self.config.model.path, role_config(self.config, self.role))

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        """Return log-probs of the current policy, [T]."""
        with self.clock.phase(f"{self.name}_logprobs", self.phase_owner):
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
        """Write the policy as an HF folder; with LoRA also its adapters in PEFT's format, next to it, to `adapter` for
        `export`. All of the actor's ranks call it, and the first one writes. Raises OSError on all of them if the disk
        fails."""
        with self.clock.phase("export"):
            run_on_all(lambda: self._export_model(folder), group=self.local_model.ranks.host_group)
            if self.config.lora.rank:
                run_on_all(
                    lambda: self._export_adapter(folder.with_name(folder.name.replace("export", "adapter"))),
                    group=self.local_model.ranks.host_group,
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
                model.without_adapters if self.config.lora.rank else partial(model.swap_weights, model.host_copy())
            )

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        """Return log-probs, [T]. The reference routes for itself: the recorded experts are those of other weights."""
        name = self.context.role or "reference"
        with self.clock.phase(f"{name}_logprobs", REMOTE if self.actor.model is None else name):
            what, temperature = "log-probs with the initial weights", self.actor.temperature
            return self.actor._forward(
                batch.with_(routing=None, sparse_indices=None), what, temperature, context=self.use_reference_weights()
            )


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
        train = dataclasses.replace(
            config.train, routing_replay=False, sparse_index_replay=False
        )  # records hold the policy's experts
        self.build(hf, path, dataclasses.replace(config, train=train, lora=LoraConfig()), trains=False)

    def forward(self, batch: TrainBatch, temperature: float | None = None) -> Future[ModelOutput]:
        """Return a future of [T] log-probs of the batch's tokens. temperature: divides the logits; default: that of the
        rollouts."""
        divisor = temperature or self.config.rollout.temperature or 1.0
        with self.clock.phase(f"{self.name}_logprobs", self.phase_owner):
            return self._forward(batch.with_(routing=None, sparse_indices=None), "log-probs", divisor)

    @property
    def _remedy(self) -> str:
        return f"check the model of roles.{self.name}.model"
