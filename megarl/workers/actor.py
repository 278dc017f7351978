"""Workers with a policy: the actor in training, its reference, and a frozen teacher."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.checkpoint.export import gather_hf
from megarl.config import ConfigError, LoraConfig
from megarl.megatron.trainer_model import MegatronModel
from megarl.models.family import is_classifier
from megarl.models.hf_folder import save_adapter, save_hf
from megarl.models.lora_tables import adapted_weights, peft_config, peft_tensors
from megarl.models.registry import load_hf_config
from megarl.observe.clock import REMOTE
from megarl.parallel.host_copy import HostCopy
from megarl.parallel.placement import placement_of, role_config, role_settings
from megarl.parallel.ranks import broadcast_object, new_host_group, run_on_all
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
        """The rollouts' temperature, so that the policy is the distribution sampled from; 1 for greedy rollouts, and
        for algorithms that sample none."""
        return (self.config.rollout.temperature or 1.0) if "rollout" in self.context.num_updates else 1.0

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the policy under its HF name, whole, on all of the actor's ranks, with adapters
        merged."""
        with self.synced_weights() as weights:
            yield from gather_hf(weights, self.local_model.params(), self.local_model.ranks)

    @contextmanager
    def synced_weights(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Give this rank's weights for engines within the block, with adapters merged; none on a rank without the
        model.

        Collective over the model's ranks with `train.fsdp`, see `MegatronModel.gathered_params`.
        """
        if self.model is None:
            yield {}
            return
        with self.model.gathered_params():
            yield self.model.merged_params()

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
        model = self.local_model
        with model.gathered_params():
            factors = dict(gather_hf(model.local_adapters(), model.adapter_params(), model.ranks))
            if model.ranks.role_rank == 0:
                tensors = peft_tensors(factors, adapted_weights(table, lora.target_modules), lora.rank)
                save_adapter(folder, tensors, peft_config(table, lora, str(Path(self.config.model.path).resolve())))


class ReferenceWorker(Worker):
    """Keeps a host copy of the actor's weights: those loaded from `model.path`, or those of the last `refresh`
    (`kl.refresh_reference_every`). With LoRA the copy has the adapters only, and there is none without refreshes, since
    the weights of `model.path` never change. There is no second model on the device. It is colocated with the actor;
    for a reference on other ranks see `SeparateReferenceWorker`."""

    def __init__(self, context: Context, actor: ActorWorker) -> None:
        super().__init__(context)
        self.actor = actor
        self.version = 0
        """Number of refreshes so far: 0 is `model.path`."""
        self.use_reference_weights: Callable[[], AbstractContextManager[None]] = nullcontext
        self._copy: HostCopy | None = None

    def start(self) -> None:
        if self.actor.model is None:
            return
        if self.config.lora.rank and not self.config.kl.refresh_reference_every:
            self.use_reference_weights = self.actor.model.without_adapters
        else:
            self._copy_weights(self.actor.model)

    def _copy_weights(self, model: MegatronModel) -> None:
        self._copy = model.host_copy()
        self.use_reference_weights = partial(model.swap_weights, self._copy)

    def refresh(self, actor: ActorWorker) -> None:
        """Make the policy's current weights the reference. All ranks call it."""
        with self.clock.phase("reference_refresh", REMOTE if actor.model is None else "reference"):
            self.version += 1
            if actor.model is not None:
                assert self._copy is not None
                actor.model.update_host_copy(self._copy)

    @property
    def saved_model(self) -> MegatronModel | None:
        """The model that has the reference's weights within `use_reference_weights`, on its ranks."""
        return self.actor.model

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's copy."""
        return self._copy.size if self._copy is not None else 0

    def restore_version(self, version: int, load: Callable[[MegatronModel], None]) -> None:
        """Restore the weights of a checkpoint, which `load` loads into the model that it is called with."""
        self.version = version
        if version and (model := self.actor.model) is not None:
            if self._copy is None:  # `kl.refresh_reference_every` has been set to 0 since
                self._copy_weights(model)
            with self.use_reference_weights():
                load(model)

    def metrics(self) -> dict[str, float]:
        is_refreshed = self.version or self.config.kl.refresh_reference_every
        return {"actor/reference_version": float(self.version)} if is_refreshed else {}

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        """Return log-probs, [T]. The reference routes for itself: the recorded experts are those of other weights."""
        name = self.context.role or "reference"
        with self.clock.phase(f"{name}_logprobs", REMOTE if self.actor.model is None else name):
            what, temperature = "log-probs with the reference's weights", self.actor.temperature
            return self.actor._forward(
                batch.with_(routing=None, sparse_indices=None), what, temperature, context=self.use_reference_weights()
            )


class FrozenPolicyWorker(ModelWorker):
    """Base of policies that are not trained: a Megatron model in its own layout on its own ranks. It reads the engine's
    token ids, so it must have the policy's vocabulary. It routes for itself: the recorded experts are the policy's."""

    role = "actor"

    def load(self, path: str) -> None:
        """Build the model of an HF folder on the role's ranks."""
        hf, config = load_hf_config(path), role_config(self.config, self.name)
        if is_classifier(hf):
            raise ConfigError(f"roles.{self.name}.model={path} is a classifier, which has no log-probs of tokens")
        train = dataclasses.replace(config.train, routing_replay=False, sparse_index_replay=False)
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


class SeparateReferenceWorker(FrozenPolicyWorker):
    """A reference with a model of its own, so that it may have other ranks than the actor, another layout, or another
    folder of the same vocabulary:

        roles: {reference: {model: /models/big, parallel: {tp: 2}}}     # default: model.path and `parallel`
        placement: {actor: 0-1, reference: 2-3}
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.version = 0
        """Number of refreshes so far: 0 is the folder that it was loaded from."""

    def start(self) -> None:
        self.load(role_settings(self.config, self.name).model or self.config.model.path)

    def wait_ready(self) -> None:
        super().wait_ready()
        source = placement_of(self.config).ranks_of("actor")[0]
        self._refresh_ranks = sorted({source, *self.members})
        self._refresh_group = new_host_group(self._refresh_ranks)
        self._source = self._refresh_ranks.index(source)

    def refresh(self, actor: ActorWorker) -> None:
        """Make the policy's current weights, with adapters merged, the reference's. All ranks call it. The reference
        must be of the actor's architecture.

        The actor gathers its tensors one bucket at a time, and its first rank sends each to all of the reference's
        ranks, over the host: seconds per GB, for a refresh every some hundred steps.
        """
        self.version += 1
        with self.clock.phase("reference_refresh", self.phase_owner):
            tensors = self._receive_tensors(actor)
            if self.model is not None:
                self.model.load_tensors(tensors)
            for _ in tensors:  # other ranks take part in gathering and sending
                pass

    @property
    def saved_model(self) -> MegatronModel | None:
        """The model that has the reference's weights, on its ranks."""
        return self.model

    def use_reference_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's weights."""
        return 0 if self.model is None else sum(tensor.nbytes for tensor in self.model.local_shards().values())

    def restore_version(self, version: int, load: Callable[[MegatronModel], None]) -> None:
        """Restore the weights of a checkpoint, which `load` loads into the model that it is called with."""
        self.version = version
        if version and self.model is not None:
            load(self.model)

    def metrics(self) -> dict[str, float]:
        is_refreshed = self.version or self.config.kl.refresh_reference_every
        return super().metrics() | ({"actor/reference_version": float(self.version)} if is_refreshed else {})

    def _receive_tensors(self, actor: ActorWorker) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the actor's full HF tensors, on the host of the reference's ranks and of the actor's first rank."""
        local = actor.hf_tensors() if actor.model is not None else iter(())
        while True:
            item = next(local, None)
            if self.job.rank not in self._refresh_ranks:
                if item is None:
                    return
                continue
            header = None if item is None else (item[0], list(item[1].shape), str(item[1].dtype).removeprefix("torch."))
            header = broadcast_object(header, self._source, self._refresh_group)
            if header is None:
                return
            name, shape, dtype = header
            is_source = self.job.rank == self._refresh_ranks[self._source]
            tensor = item[1].cpu() if is_source and item else torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(tensor, group_src=self._source, group=self._refresh_group)
            yield name, tensor


class TeacherWorker(FrozenPolicyWorker):
    """A teacher, for a controller that lists the role `teacher`, or another name in its `workers`.

    Its model is always named, its layout and ranks where they differ from the actor's:

        roles: {teacher: {model: /models/big, parallel: {tp: 2}}}
        placement: {actor: 0-1, teacher: 2-3}

    """

    def start(self) -> None:
        path = role_settings(self.config, self.name).model
        if not path:
            raise ConfigError(
                f"roles.{self.name}.model is not set; it must name the HF folder of the {self._display_name}"
            )
        self.load(path)
