"""The models of all clients on this rank: one Megatron model, whose trained state is exchanged for each client's.

A client's model is its trained weights (all, or with LoRA the adapters), its optimizer's states and its gradient. One
of them is in the Megatron model, the others in host memory. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from megarl.megatron.dist_checkpoint import WRITERS, SaveSlot, StagedCheckpoint, restore_model
from megarl.megatron.trainer_model import MegatronModel
from megarl.parallel import ranks
from megarl.parallel.host_copy import HostCopy, tensor_bytes
from megarl.serve.commands import CreateModel, ForwardBackward, ForwardBackwardBatch, LoadModel, OptimStep, SaveModel
from megarl.serve.tinker_losses import join_losses, make_batch, make_loss, split_targets
from megarl.serve.tinker_wire import RequestRefused
from megarl.types import ModelOutput
from megarl.workers.actor import ActorWorker
from megarl.workers.engines import Engines

Passed = tuple[list[np.ndarray], dict[str, float]]
"""Result of a forward and backward pass: the log-probs of each example's targets, [N] each, and metrics."""


@dataclass
class ClientModel:
    """A client's model. state: its weights and optimizer states, while they are not in the Megatron model."""

    state: HostCopy | None = None
    updates: int = 0
    """Number of updates so far."""
    changes: int = 0
    """How often its weights have changed."""
    tokens: int = 0
    """Tokens of the batches that the gradient is of; 0 without a gradient."""
    gradient: list[torch.Tensor] | None = None
    """The sum of gradients that are no longer in the Megatron model's buffers, on the host."""


class ClientModels:
    """Executes commands on this rank. Methods raise RequestRefused on all ranks for what is the client's fault.

    Ranks without the actor's model take part in what is collective over the job, and return nothing of a model.
    """

    def __init__(self, actor: ActorWorker, engines: Engines) -> None:
        self._actor, self._engines = actor, engines
        self._model: MegatronModel | None = actor.model
        self.models: dict[str, ClientModel] = {}
        self._active = ""
        """The client whose state is in the Megatron model; empty before the first."""
        self._gradient_owner = ""
        """The client whose latest gradient is in the Megatron model's buffers, if any."""
        self._save_slots = {True: SaveSlot(), False: SaveSlot()}
        self._spare: HostCopy | None = None
        self._sampler_sources: dict[str, tuple[str, int]] = {}
        """Model and its `changes` when it was saved for a sampler, by folder."""
        self._synced, self._num_syncs = "", 0
        """Folder of the weights that the engines have; number of weight syncs."""
        self._start = ClientModel(None if self._model is None else _copy_state(self._model))
        """The state that models start from."""

    def reason_against_batches(self) -> str:
        """Return why adapters of several clients cannot share a pass; empty if they can, or without a model."""
        return "" if self._model is None else self._model.reason_against_slots()

    # --- life of a model

    def create(self, command: CreateModel) -> None:
        model = self.models[command.model_id] = ClientModel()
        if self._model is not None:
            self._park_gradient()
            self._park_state()
            assert self._start.state is not None
            with self._model.trained_state() as tensors:
                self._start.state.copy_back(map(tensor_bytes, tensors))
            self._model.set_update_count(0)
        self._active = command.model_id
        if command.folder:
            try:
                self._load(model, command.folder, command.has_optimizer)
            except BaseException:
                self.unload(command.model_id)
                raise

    def unload(self, model_id: str) -> None:
        """Forget a model. What it has saved stays."""
        if self._gradient_owner == model_id:
            self._gradient_owner = ""
        if self._active == model_id:
            self._active = ""
        self.models.pop(model_id, None)

    def _activate(self, model_id: str) -> ClientModel:
        """Have a client's state in the Megatron model."""
        model = self.models.get(model_id)
        if model is None:  # its creation has failed, after which this request was already under way
            raise RequestRefused(f"model {model_id[:120]} does not exist")
        if self._active == model_id:
            return model
        if self._model is not None:
            incoming, outgoing = model.state, self.models.get(self._active)
            assert incoming is not None
            with self._model.trained_state() as tensors:
                if outgoing is None:
                    incoming.copy_back(map(tensor_bytes, tensors))
                else:
                    incoming.exchange(map(tensor_bytes, tensors))
                    outgoing.state, outgoing.updates = incoming, self._model.update_count
            model.state = None
            self._model.set_update_count(model.updates)
        self._active = model_id
        return model

    def _park_state(self) -> None:
        """Copy the active client's state to the host, if there is one."""
        if (outgoing := self.models.get(self._active)) is not None and self._model is not None:
            outgoing.state, outgoing.updates = _copy_state(self._model), self._model.update_count

    def _park_gradient(self) -> None:
        """Add the gradient in the Megatron model's buffers to its client's sum on the host, if there is one."""
        owner = self.models.get(self._gradient_owner)
        if owner is not None and self._model is not None:
            parts = [tensor.detach().cpu() for tensor in self._model.grad_tensors()]
            if owner.gradient is None:
                owner.gradient = [part.clone() for part in parts]
            else:
                for total, part in zip(owner.gradient, parts, strict=True):
                    total += part
        self._gradient_owner = ""

    # --- training

    def forward_backward(self, command: ForwardBackward) -> Passed:
        """Return log-probs and metrics. The gradient is added to the model's.

        A loss that is not finite is refused, and changes nothing.
        """
        model = self._activate(command.model_id)
        loss_fn, batch = make_loss(command.loss, command.options), make_batch(command.examples)
        if self._model is None:
            return [], {}
        if command.forward_only:
            logprobs = self._model.forward(batch)["logprobs"]
            assert batch.loss_weights is not None
            loss = float((batch.loss_weights * loss_fn(ModelOutput(logprobs), batch).loss).sum())
        else:
            self._park_gradient()
            metrics, logprobs = self._model.forward_backward(batch, loss_fn)
            loss = metrics["actor/loss"]
        if not (math.isfinite(loss) and bool(torch.isfinite(logprobs).all())):
            raise RequestRefused(f"the loss is not finite ({loss}); the gradient is unchanged")
        if not command.forward_only:
            self._gradient_owner = command.model_id
            model.tokens += len(batch.tokens)
        return _format_result(command, logprobs, loss, 1)

    def forward_backward_batch(self, batch: ForwardBackwardBatch) -> list[Passed | RequestRefused]:
        """Execute requests of several adapters in one pass; return each's result, or why it is refused.

        If anything is not finite, the requests are executed in turn, since it may have reached other gradients.
        """
        if self._model is not None and all(request.model_id in self.models for request in batch.requests):
            results = self._pass_together(self._model, batch.requests)
            if results is not None:
                return list(results)
        return [self._pass_alone(request) for request in batch.requests]

    def _pass_alone(self, request: ForwardBackward) -> Passed | RequestRefused:
        try:
            return self.forward_backward(request)
        except RequestRefused as error:
            return error

    def _pass_together(self, model: MegatronModel, requests: Sequence[ForwardBackward]) -> list[Passed] | None:
        """Add the gradients of requests of several adapters; None, and no change, if anything is not finite."""
        self._park_gradient()
        batch = make_batch([example for request in requests for example in request.examples])
        sizes = [sum(len(example.tokens) + 1 for example in request.examples) for request in requests]
        batch = batch.with_(adapter=torch.arange(len(requests)).repeat_interleave(torch.tensor(sizes)))
        loss_fn = join_losses([(request.loss, request.options) for request in requests])
        with model.trained_state() as tensors:
            count = len(model.adapter_shards())
            adapters = [self._read_adapter(request.model_id, tensors[:count]) for request in requests]
        metrics, logprobs, slots = model.forward_backward_adapters(batch, loss_fn, adapters)
        losses = [metrics[f"loss/{number}"] for number in range(len(requests))]
        is_finite = all(map(math.isfinite, losses)) and bool(torch.isfinite(logprobs).all())
        if not is_finite or metrics["not_finite"]:
            return None
        for number, (request, size) in enumerate(zip(requests, sizes, strict=True)):
            slots.write_gradient(number)
            self._gradient_owner = request.model_id
            self._park_gradient()
            self.models[request.model_id].tokens += size
        return [
            _format_result(request, part, loss, len(requests))
            for request, part, loss in zip(requests, logprobs.split(sizes), losses, strict=True)
        ]

    def _read_adapter(self, model_id: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a client's adapter on the device. tensors: that of the active client."""
        if model_id == self._active:
            return [tensor.detach() for tensor in tensors]
        state = self.models[model_id].state
        assert state is not None
        copies = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
        state.copy_back(map(tensor_bytes, copies))
        return copies

    def optim_step(self, command: OptimStep) -> dict[str, float]:
        """Update a model by its gradient, which is then zero. A gradient that is not finite is dropped and refused."""
        model = self._activate(command.model_id)
        if not model.tokens:
            raise RequestRefused("optim_step without a gradient: call forward_backward first")
        tokens, total = model.tokens, model.gradient
        model.tokens, model.gradient = 0, None
        metrics: dict[str, float] = {}
        if self._model is not None:
            is_in_buffers = self._gradient_owner == command.model_id
            if not is_in_buffers:
                self._park_gradient()
            with self._model.trained_state():  # on the device
                for buffer, part in zip(self._model.grad_tensors(), total or (), strict=False):
                    buffer.copy_(part.to(buffer.device) + (buffer if is_in_buffers else 0))
            self._gradient_owner = ""
            metrics = self._model.update(tokens, command.adam)
            if metrics["actor/skipped"]:
                raise RequestRefused("the gradient is not finite; it is dropped, and the weights are unchanged")
            metrics = {
                "grad_norm:mean": metrics["actor/grad_norm"],
                "learning_rate:mean": command.adam.lr,
                "tokens:sum": float(tokens),
            }
        model.changes += 1
        return metrics

    # --- checkpoints

    def save(self, command: SaveModel) -> None:
        """Write a checkpoint. Its folder appears once it is complete. Raises OSError on all ranks."""
        model = self._activate(command.model_id)
        folder, slot = Path(command.folder), self._save_slots[command.for_sampler]
        partial_folder = folder.with_name(f"{folder.name}.tmp")
        if self._model is not None:
            staged = StagedCheckpoint(self._model, partial_folder, slot, is_reference=command.for_sampler)
            ranks.run_on_all(lambda: staged.write(WRITERS) and None, group=self._model.ranks.host_group)
            staged.finish()
        ranks.run_on_all(lambda: None if partial_folder.rename(folder) else None, rank_zero_only=True)
        if command.for_sampler:
            self._sampler_sources[command.folder] = command.model_id, model.changes
            self._synced = "" if self._synced == command.folder else self._synced

    def load(self, command: LoadModel) -> None:
        """Load a checkpoint, and drop the model's gradient. Raises ConfigError on all ranks if it does not fit."""
        self._load(self._activate(command.model_id), command.folder, command.has_optimizer)

    def _load(self, model: ClientModel, folder: str, has_optimizer: bool) -> None:
        model.tokens, model.gradient = 0, None
        if self._gradient_owner and self.models.get(self._gradient_owner) is model:
            self._gradient_owner = ""
        model.changes += 1
        loaded = self._model
        ranks.run_on_all(partial(restore_model, loaded, Path(folder)) if loaded is not None else lambda: None)
        if loaded is not None and not has_optimizer:
            loaded.reset_optimizer()

    # --- sampling

    def begin_sampling(self, folder: str) -> int:
        """Give the engines the weights of a sampler's checkpoint, and wake them. Returns the version of the weights."""
        engines = self._engines
        engines.recovery.exchange_losses(should_check=True)
        self._park_gradient()  # the model may be offloaded, and its buffers with it
        if self._synced != folder:
            self._num_syncs += 1
            source, changes = self._sampler_sources.get(folder, ("", 0))
            if source in self.models and self.models[source].changes == changes:
                self._activate(source)
                self._sync()
            elif self._model is None:
                ranks.run_on_all(lambda: None)
                self._sync()
            else:
                self._sync_from_disk(self._model, Path(folder))
            self._synced = folder
        engines.wait_for_engine(lambda: None)
        engines.offload_models()
        engines.wake()
        return self._num_syncs

    def end_sampling(self) -> None:
        self._engines.sleep()

    def _sync(self) -> None:
        self._engines.offload_models(self._actor)
        self._engines.sync_weights(self._actor, self._num_syncs)

    def _sync_from_disk(self, model: MegatronModel, folder: Path) -> None:
        """Sync a checkpoint's weights, which take the place of the model's own meanwhile."""
        if self._spare is None:
            self._spare = model.host_copy()
        with model.swap_weights(self._spare):
            ranks.run_on_all(partial(restore_model, model, folder, is_reference=True))
            self._sync()


def _format_result(request: ForwardBackward, logprobs: torch.Tensor, loss: float, models: int) -> Passed:
    """Return a request's result. models: number of models whose requests were executed together."""
    num_targets = sum(len(example.tokens) for example in request.examples)
    metrics = {"loss:sum": loss, "tokens:sum": float(num_targets), "models_in_batch:max": float(models)}
    return split_targets(logprobs, request.examples), metrics


def _copy_state(model: MegatronModel) -> HostCopy:
    with model.trained_state() as tensors:
        copy = HostCopy(sum(tensor.nbytes for tensor in tensors))
        copy.copy_from(map(tensor_bytes, tensors))
    return copy
