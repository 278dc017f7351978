"""A policy or a critic on Megatron-Core: forward over a batch, a training step, its weights, its state.

Every method is called by all ranks with the same global batch and returns the same values on all of them. The batch
is cut here: over data parallel ranks, into micro-batches, and over Megatron's pipeline schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl.config import Config, ConfigError
from megarl.data.packing import plan_micro_batches
from megarl.megatron import optimizer, routing
from megarl.megatron.aux_losses import collect_aux_losses
from megarl.megatron.build import Role, build_chunks
from megarl.megatron.logprobs import vocab_parallel_logprobs
from megarl.megatron.micro_batch import MicroBatch, make_micro_batch
from megarl.megatron.names import named_params, unwrap
from megarl.models.cost import quadratic_cost
from megarl.models.layout import HFTensor, Param, Replicated
from megarl.models.registry import family_of
from megarl.models.routing import RoutingShape, routing_shape
from megarl.parallel import device
from megarl.parallel.ranks import Ranks, all_gather_objects
from megarl.types import ModelOutput, TokenLoss, TrainBatch

LossFn = Callable[[ModelOutput, TrainBatch], TokenLoss]
Get = Callable[[Param, int, int], torch.Tensor]
VALUE_HEAD = "score.weight"
"""HF name of a critic's head, that of a sequence classifier with one label."""


class MegatronModel:
    """`total_updates`: optimizer steps of the whole run, for the schedule. Weights are arbitrary until loaded."""

    def __init__(
        self, hf_config: Mapping[str, Any], config: Config, ranks: Ranks, role: Role, total_updates: int = 1
    ) -> None:
        self.hf_config = hf_config
        self.config = config
        self.ranks = ranks
        self.role = role
        self.vocab_size = int(family_of(hf_config).gpt_kwargs(hf_config)["vocab_size"])
        self.quadratic_cost = quadratic_cost(hf_config)
        self.chunks = build_chunks(hf_config, config, role)
        self.replays: RoutingShape | None = None
        if role == "actor" and config.train.replay_routing:
            self.replays = routing_shape(hf_config, config.model.megatron)
            routing.install(self.chunks, self.replays)
        settings = config.actor_optimizer if role == "actor" else config.critic.optimizer
        self.optimizer = optimizer.build_optimizer(settings, self.chunks, getattr(torch, config.model.dtype))
        self.scheduler = optimizer.build_scheduler(settings, self.optimizer, total_updates)

    # ---- weights

    def params(self) -> list[Param]:
        """The table of all parameters of this model, on whatever ranks they are."""
        table = family_of(self.hf_config).params(self.hf_config, self.ranks.tp)
        if self.role == "actor":
            return table
        head = Param(
            "output_layer.weight", (HFTensor(VALUE_HEAD, (1, int(self.hf_config["hidden_size"]))),), Replicated()
        )
        return [param for param in table if param.megatron != head.megatron] + [head]

    def local_params(self) -> dict[str, torch.Tensor]:
        """This rank's parameters, in place, by canonical name (see `names.py`)."""
        return {name: tensor.detach() for name, tensor in named_params(self.chunks, self.ranks.ep_rank).items()}

    def load(self, get: Get) -> None:
        """Fill every local parameter with `get(param, tp, tp_rank)`, the shard as `models.layout.pieces` cuts it."""
        table = {param.megatron: param for param in self.params()}
        for name, tensor in self.local_params().items():
            value = get(table[name], self.ranks.tp, self.ranks.tp_rank)
            if value.shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)} here, not {tuple(value.shape)}")
            tensor.copy_(value)
        self.optimizer.reload_model_params()  # the fp32 masters

    def load_hf(self, folder: str | Path) -> None:
        """Load an HF folder; a critic's head stays zero unless the folder has one. Raises ConfigError."""
        from megarl.checkpoint.hf import open_hf

        weights = open_hf(folder)
        heads = (VALUE_HEAD, "lm_head.weight") if self.role == "critic" else ()
        weights.check(dict(self.hf_config), optional=heads)
        has_head = VALUE_HEAD in weights.names()

        def get(param: Param, tp: int, rank: int) -> torch.Tensor:
            tensor = param.hf[0]
            if tensor.name != VALUE_HEAD:
                return weights.shard(param, tp, rank)
            if has_head and weights.shape(VALUE_HEAD) != tensor.shape:
                raise ConfigError(f"{VALUE_HEAD} in {folder} has shape {weights.shape(VALUE_HEAD)}, not {tensor.shape}")
            return weights.get(VALUE_HEAD) if has_head else torch.zeros(tensor.shape)

        self.load(get)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Host copies of the local parameters."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.local_params().items()}

    @contextmanager
    def swapped(self, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
        """Within the block the model has the weights of `tensors`, a `snapshot`, which meanwhile holds the model's own:
        the two are exchanged tensor by tensor, there and back. No update may happen inside."""
        self._exchange(tensors)
        try:
            yield
        finally:
            self._exchange(tensors)

    def _exchange(self, tensors: dict[str, torch.Tensor]) -> None:
        local = self.local_params()
        if tensors.keys() != local.keys():
            raise ValueError(f"these are not this model's weights: {sorted(tensors.keys() ^ local.keys())[:5]} differ")
        for name, tensor in local.items():
            own = tensor.to("cpu", copy=True)
            tensor.copy_(tensors[name])
            tensors[name].copy_(own)

    # ---- computing

    @torch.no_grad()
    def forward(self, batch: TrainBatch, temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """What the model says of each token: `logprobs` and `entropy` of a policy, `values` of a critic.

        Returns [T] fp32 host tensors in the batch's order. `temperature` divides a policy's logits.
        """

        def consume(micro: MicroBatch, emitted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            output = self._read(micro, emitted, temperature)
            names = ("logprobs", "entropy") if self.role == "actor" else ("values",)
            found = {name: getattr(output, name).cpu() for name in names}
            return emitted.new_zeros(()), torch.zeros((), dtype=torch.int), (micro.indices, found)

        for chunk in self.chunks:
            chunk.eval()
        done = self._schedule(batch, consume, forward_only=True)
        return _assemble(batch, all_gather_objects(done if self._speaks() else []))

    def train_step(self, batch: TrainBatch, loss_fn: LossFn, temperature: float = 1.0) -> dict[str, float]:
        """One optimizer step on sum(loss_weights * loss) over `batch`.

        Returns `loss`, `grad_norm` (before clipping), `lr`, `tokens`, `skipped` (1 when the gradient was not finite and
        nothing was changed) and the aux losses that are on, all under actor/ or critic/, and the metrics of `loss_fn`
        under their own names.
        """
        if batch.loss_weights is None:
            raise ValueError("a training batch needs loss_weights")
        # Megatron divides gradients by the global number of tokens, its aux losses being scaled up by the local one.
        # Our loss is scaled up by the global one, and is what it says after the division.
        total_tokens = len(batch.tokens)

        def consume(micro: MicroBatch, emitted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            tokens = torch.tensor(len(micro.batch.tokens), dtype=torch.int, device=emitted.device)
            if not micro.indices:  # padding, so that this rank takes part in its peers' collectives
                return emitted.float().sum() * 0.0, tokens, {}
            result = loss_fn(self._read(micro, emitted, temperature), micro.batch)
            weights = micro.batch.loss_weights
            assert weights is not None
            loss = (weights * result.loss).sum()
            figures = {f"{self.role}/loss": loss.detach()}
            for name, metric in result.metrics.items():
                figures[name] = (weights * metric).sum().detach()
            return loss * total_tokens, tokens, figures

        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        done = self._schedule(batch, consume, forward_only=False)
        aux_losses = collect_aux_losses(unwrap(self.chunks[0]).config, self.ranks, len(self._plan(batch)[0]))
        norm, taken = optimizer.take_step(self.optimizer, self.scheduler)
        metrics = _sum_figures(all_gather_objects(_to_floats(done) if self._speaks() else {}))
        metrics.update({f"{self.role}/{name}": value for name, value in aux_losses.items()})
        metrics.update(
            {
                f"{self.role}/grad_norm": norm,
                f"{self.role}/lr": float(self.scheduler.get_lr({})),
                f"{self.role}/tokens": float(total_tokens),
                f"{self.role}/skipped": float(not taken),
            }
        )
        return metrics

    def _plan(self, batch: TrainBatch) -> list[list[list[int]]]:
        lengths, budget = batch.lengths.tolist(), self.config.train.token_budget
        return plan_micro_batches(lengths, self.ranks.dp, budget, self.quadratic_cost)

    def _schedule(self, batch: TrainBatch, consume: Callable[..., Any], forward_only: bool) -> list[Any]:
        """Run this rank's micro-batches through Megatron's schedule. The last stage gets `consume`'s third results."""
        mine = self._plan(batch)[self.ranks.dp_rank]
        place = device.device()
        # Megatron's bf16 wrapper would make an fp32 copy of what the last stage emits.
        keep_type = {"fp32_output": False} if self.config.model.dtype == "bfloat16" else {}
        micro_batches = iter([make_micro_batch(batch, indices, self.ranks.tp, place) for indices in mine])

        def forward_step(source: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            micro = next(source)
            if self.replays is not None:
                routing.begin(model, micro.routing, self.replays, self.ranks.tp, self.ranks.tp_rank)
            output = model(
                input_ids=micro.tokens,
                position_ids=micro.positions,
                attention_mask=None,
                packed_seq_params=micro.packed,
                **keep_type,
            )
            return output, partial(consume, micro)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=micro_batches,
            model=self.chunks,
            num_microbatches=len(mine),
            seq_length=1,  # ignored: stages tell each other the length of each micro-batch
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _read(self, micro: MicroBatch, emitted: torch.Tensor, temperature: float) -> ModelOutput:
        """[1, P, hidden] states or [1, P, 1] values, as emitted -> [T], shifted."""
        if self.role == "critic":
            return ModelOutput(values=micro.align(emitted[0, :, 0].float()))
        model = unwrap(self.chunks[0])
        tied = model.share_embeddings_and_output_weights
        logprobs, entropy = vocab_parallel_logprobs(
            emitted[0],
            model.shared_embedding_or_output_weight() if tied else model.output_layer.weight,
            micro.targets,
            self.vocab_size,
            parallel_state.get_tensor_model_parallel_group(),
            temperature,
            self.config.train.logits_at_once,
        )
        return ModelOutput(logprobs=micro.align(logprobs), entropy=micro.align(entropy))

    def _speaks(self) -> bool:
        """One rank of each data parallel replica reports what its last stage computed."""
        return self.ranks.pp_rank == self.ranks.pp - 1 and self.ranks.tp_rank == 0

    # ---- state

    def sharded_state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """Weights, optimizer and scheduler for `megatron.core.dist_checkpointing.save` and `load`."""
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        model = unwrap(self.chunks[0]).sharded_state_dict(metadata=metadata)
        return {
            "model": model,
            "optimizer": optimizer.sharded_state(self.optimizer, model, is_loading),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `dist_checkpointing.load(model.sharded_state_dict(is_loading=True), folder)` returned."""
        unwrap(self.chunks[0]).load_state_dict(state["model"])
        self.scheduler.load_state_dict(state["scheduler"])
        optimizer.load_state(self.optimizer, state.get("optimizer", {}), self.scheduler.num_steps)


def _assemble(
    batch: TrainBatch, gathered: list[list[tuple[list[int], dict[str, torch.Tensor]]]]
) -> dict[str, torch.Tensor]:
    """Per-micro-batch results of all replicas -> [T] in the order of the batch."""
    result: dict[str, torch.Tensor] = {}
    for indices, found in (item for share in gathered for item in share):
        spans = [torch.arange(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])) for i in indices]
        for name, values in found.items():
            full = result.setdefault(name, torch.zeros(len(batch.tokens)))
            if spans:
                full[torch.cat(spans)] = values
    return result


def _to_floats(done: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    return _sum_figures([{name: float(value) for name, value in figures.items()} for figures in done])


def _sum_figures(parts: list[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
