"""A policy, critic or reward model on Megatron-Core: forward over a batch, training step, weights and state.

All ranks call every method with the same batch, of which each rank has its own sequences. The batch is split here: over
data parallel ranks, into micro-batches, and over Megatron's pipeline schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl.config import Config, ConfigError
from megarl.megatron import lora, optimizer, routing_replay
from megarl.megatron.build import Role, build_chunks
from megarl.megatron.distribution import BatchDispatcher, LocalRows, MicroBatchPlan, make_model_rank
from megarl.megatron.logprobs import OutputReader
from megarl.megatron.micro_batch import MicroBatch, make_micro_batch
from megarl.megatron.offload import MemoryOffload, WeightSnapshot
from megarl.megatron.oom_retry import OOMRetry
from megarl.megatron.parameter_names import named_params, unwrap
from megarl.megatron.router import collect_aux_losses
from megarl.models.flops import quadratic_cost
from megarl.models.layout_algebra import Param
from megarl.models.lora_tables import adapter_params
from megarl.models.memory import critic_params
from megarl.models.registry import family_of, num_trained_mtp
from megarl.models.routing import RoutingShape, routing_shape
from megarl.models.scalar_head import VALUE_HEAD
from megarl.parallel import device, wait_listeners
from megarl.parallel.ranks import Ranks, all_gather_objects, use_layout
from megarl.types import ModelOutput, TokenLoss, TrainBatch
from megarl.types.batch import select_columns


def sum_metrics(parts: Iterable[Mapping[str, SupportsFloat]]) -> dict[str, float]:
    """Figures by name, in the order of the parts, so that all who have the same parts have the same bits."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + float(value)
    return total


LossFn = Callable[[ModelOutput, TrainBatch], TokenLoss]
ShardLoader = Callable[[Param, int, int], torch.Tensor]
FP8_ROWS = 32
"""Transformer Engine multiplies in FP8 only matrices with multiples of 16 rows, in blocks with scales, of 32."""
OUTPUT_NAMES = {"actor": ("logprobs",), "critic": ("values",), "reward_model": ("scores",)}
"""Which fields of ModelOutput a forward pass of each role is for."""


class MegatronModel:
    """`total_updates`: optimizer steps of the whole run, for the schedule. Weights are arbitrary until loaded.

    With `trains=False` there are no gradients and no optimizer: forward only, from weights that are loaded once.
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        config: Config,
        ranks: Ranks,
        role: Role,
        total_updates: int = 1,
        trains: bool = True,
    ) -> None:
        self.hf_config = hf_config
        self.config = config
        self.ranks = ranks
        self.role = role
        self.mtp_layers = num_trained_mtp(hf_config, config) if role == "actor" and trains else 0
        self.optimizer: Any = None
        self.replay_shape: RoutingShape | None = None
        self._weight_offload, self._optimizer_offload, self._rollback_snapshot = (
            MemoryOffload(),
            MemoryOffload(),
            WeightSnapshot(),
        )
        settings = config.actor_optimizer if role == "actor" else config.critic.optimizer
        with self._on_device():
            self.chunks = build_chunks(hf_config, config, role, self.mtp_layers, trains)
            family, last = family_of(hf_config), unwrap(self.chunks[-1])
            vocab_size, cap = int(family.gpt_kwargs(hf_config)["vocab_size"]), family.extras(hf_config).logit_cap
            self._reader = OutputReader(last, role, vocab_size, config.train.logits_at_once, cap)
            if role == "actor" and config.train.replay_routing:
                self.replay_shape = routing_shape(hf_config, config.model.megatron)
                routing_replay.install(self.chunks, self.replay_shape)
            layers = routing_replay.replayed_layers(self.chunks) if self.replay_shape is not None else ()
            self.dispatcher = BatchDispatcher(
                model_ranks=dict(
                    all_gather_objects((ranks.job.rank, make_model_rank(ranks, layers)), ranks.host_group)
                ),
                dp=ranks.dp,
                token_budget=config.train.token_budget * ranks.cp,
                quadratic_cost=quadratic_cost(hf_config),
                # Megatron's interleaved schedule takes micro-batches by the pipeline's length.
                multiple=ranks.pp if ranks.vpp > 1 else 1,
                should_keep_groups=role == "reward_model",  # whose loss compares the scores of a group
                routing_shape=self.replay_shape,
                has_logits=role == "actor",
            )
            self.oom_retry = OOMRetry(hf_config, config, ranks, role, self.chunks, self.dispatcher)
            if not trains:
                return
            self.optimizer = optimizer.build_optimizer(settings, self.chunks, getattr(torch, config.model.dtype))
        self.scheduler = optimizer.build_scheduler(settings, self.optimizer, total_updates)

    # ---- weights

    def params(self) -> list[Param]:
        """The table of all parameters of this model, on whatever ranks they are."""
        table = family_of(self.hf_config).params(self.hf_config, self.ranks.tp, self.ranks.etp, bool(self.mtp_layers))
        if self.role == "actor":
            return table
        return critic_params(table, int(self.hf_config["hidden_size"]))

    def local_params(self) -> dict[str, torch.Tensor]:
        """This rank's parameters, in place, by canonical name (see `parameter_names.py`). With LoRA they are the base
        model's."""
        self._weight_offload.onload()
        return {name: tensor.detach() for name, tensor in named_params(self.chunks, self.ranks.ep_rank).items()}

    def local_adapters(self) -> dict[str, torch.Tensor]:
        """This rank's factors of `adapter_params`, in place, by canonical name; none without LoRA."""
        self._weight_offload.onload()
        return lora.local_adapters(self.chunks)

    def adapter_params(self) -> list[Param]:
        """The table of all adapters of this model."""
        return adapter_params(self.params(), self.config.lora) if self.config.lora.rank else []

    def merged_params(self) -> Mapping[str, torch.Tensor]:
        """What the model computes with: `local_params`, with LoRA each with its adapter added as it is asked for."""
        settings = self.config.lora
        if not settings.rank:
            return self.local_params()
        return lora.MergedWeights(self.local_params(), self.local_adapters(), settings.alpha / settings.rank)

    def load_shards(self, get: ShardLoader) -> None:
        """Fill every local parameter with `get(param, parts, part)`, the shard as `models.layout_algebra.pieces` cuts
        it.

        Raises ConfigError on all ranks, naming the first tensor, where some are not finite.
        """
        table = {param.megatron: param for param in self.params()}
        not_finite = []
        local = self.local_params()
        for number, (name, tensor) in enumerate(local.items()):
            wait_listeners.report_progress(number, len(local))
            value = get(table[name], *self.ranks.tp_size_and_rank(table[name].expert is not None))
            if value.shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)} here, not {tuple(value.shape)}")
            tensor.copy_(value)
            if not bool(torch.isfinite(tensor).all()):
                not_finite.append(" or ".join(item.name for item in table[name].hf))
        if found := [name for names in all_gather_objects(not_finite, self.ranks.host_group) for name in names]:
            raise ConfigError(f"{found[0]} has elements that are not finite; these weights cannot be trained")
        if self.optimizer is not None:
            self.optimizer.reload_model_params()  # the fp32 masters

    def load_hf(self, folder: str | Path) -> None:
        """Load an HF folder; a value head stays zero unless the folder has one. Raises ConfigError."""
        from megarl.models.hf_folder import open_hf

        weights = open_hf(folder)
        heads = (VALUE_HEAD, "lm_head.weight") if self.role != "actor" else ()
        weights.check(dict(self.hf_config), optional=heads, mtp=bool(self.mtp_layers))
        has_head = VALUE_HEAD in weights.names()

        def get(param: Param, parts: int, part: int) -> torch.Tensor:
            tensor = param.hf[0]
            if tensor.name != VALUE_HEAD:
                return weights.get_shard(param, parts, part)
            if has_head and weights.shape(VALUE_HEAD) != tensor.shape:
                raise ConfigError(f"{VALUE_HEAD} in {folder} has shape {weights.shape(VALUE_HEAD)}, not {tensor.shape}")
            return weights.get(VALUE_HEAD) if has_head else torch.zeros(tensor.shape)

        self.load_shards(get)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Host copies of the local parameters."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.local_params().items()}

    def without_adapters(self) -> AbstractContextManager[None]:
        """Within the block the model is the base model, which with LoRA is what it was at first."""
        return lora.disable_adapters(self.chunks)

    @contextmanager
    def swap_weights(self, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
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

    # ---- the device's memory

    def offload(self, weights: bool = True) -> int:
        """Give the device's memory to others: optimizer states, and weights if they are wanted there too, go to the
        host, gradients are dropped. Returns how many bytes. Whatever is asked of the model next takes back what it
        needs."""
        params = [param for chunk in self.chunks for param in chunk.parameters()]
        freed = 0
        if self.optimizer is not None:
            buffers = (buffer for chunk in self.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers)
            grads = [buffer.grad_data for buffer in buffers]
            freed += self._optimizer_offload.offload(optimizer.state_tensors(self.optimizer), drop=grads, but=params)
        return freed + (self._weight_offload.offload(params) if weights else 0)

    @contextmanager
    def _on_device(self, states: bool = True) -> Iterator[None]:
        """Within the block Megatron is in this model's layout, and the model's weights are on the device, and its
        optimizer states if they are wanted too."""
        self._weight_offload.onload()
        if states:
            self._optimizer_offload.onload()
        with use_layout(self.ranks):
            yield

    # ---- computing

    @torch.no_grad()
    def forward(
        self, batch: TrainBatch, temperature: float = 1.0, names: Sequence[str] = ()
    ) -> dict[str, torch.Tensor]:
        """What the model says of each token: `logprobs` of a policy, `values` of a critic, `scores` of a reward model.

        Returns [T] fp32 host tensors in the batch's order. `temperature` divides a policy's logits. names: which fields
        of `ModelOutput` else, such as a policy's `entropy`.
        """
        names = names or OUTPUT_NAMES[self.role]

        def consume(micro: MicroBatch, emitted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            output = self._reader.read(micro, emitted, temperature, "entropy" in names)
            found = {name: getattr(output, name).float().cpu() for name in names}
            return emitted.new_zeros(()), torch.zeros((), dtype=torch.int), (micro.indices, found)

        for chunk in self.chunks:
            chunk.eval()
        plan = self.dispatcher.plan(batch, forward_only=True)
        rows = self.dispatcher.dispatch(batch, plan, ("tokens",))
        with self._on_device(states=False):
            done, _ = self.oom_retry.run(
                batch, plan, lambda cut: self._schedule(rows, cut, consume, True), trains=False
            )
        return self.dispatcher.collect(batch, plan, done, names)()

    def train_step(self, batch: TrainBatch, loss_fn: LossFn, temperature: float = 1.0) -> dict[str, float]:
        """One optimizer step on sum(loss_weights * loss) over `batch`.

        Returns `loss`, `grad_norm` (before clipping), `lr`, `tokens`, `skipped` (1 when the gradient was not finite and
        nothing was changed), `mtp_loss` where MTP layers are trained, and the aux losses that are on, all under the
        role's name, and the metrics of `loss_fn` under their own names. A reward model's loss gets all sequences of a
        group in one micro-batch. Raises ConfigError on all ranks where the step has made weights that are not finite.
        """
        if batch.loss_weights is None:
            raise ValueError("a training batch needs loss_weights")
        # Megatron divides gradients by the global number of tokens, its aux losses being scaled up by the local one.
        # Our loss is scaled up by the global one, and is what it says after the division.
        total_tokens = int(batch.lengths.sum())
        plan = self.dispatcher.plan(batch, forward_only=False)
        rows = self.dispatcher.dispatch(batch, plan, select_columns(loss_fn, batch))

        def consume(micro: MicroBatch, emitted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            own = 0 if self.ranks.cp_rank else len(micro.unpadded_indices)  # each token is counted once
            tokens = torch.tensor(own, dtype=torch.int, device=emitted.device)
            if not micro.indices:  # padding, so that this rank takes part in its peers' collectives
                return emitted.float().sum() * 0.0, tokens, {}
            result = loss_fn(self._reader.read(micro, emitted, temperature), micro.batch.for_loss(loss_fn))
            weights = micro.batch.loss_weights
            assert weights is not None
            loss = (weights * result.loss).sum()
            figures = {f"{self.role}/loss": loss.detach()} | result.reduce_metrics(micro.batch)
            if self.mtp_layers:
                ahead = self._reader.mtp_loss(micro, emitted)
                figures[f"{self.role}/mtp_loss"] = ahead.detach()
                loss = loss + self.config.train.mtp * ahead
            return loss * total_tokens, tokens, figures

        def gradients(cut: MicroBatchPlan) -> list[Any]:
            for chunk in self.chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            return self._schedule(rows, cut, consume, forward_only=False)

        with self._on_device():
            done, plan = self.oom_retry.run(batch, plan, gradients, trains=True)
            aux_losses = collect_aux_losses(unwrap(self.chunks[0]).config, self.ranks, len(plan[0]))
            norm, taken = optimizer.take_step(self.optimizer, self.scheduler)
        figures = sum_metrics(done) if self.dispatcher.is_reporter else {}
        everyone = all_gather_objects((figures, optimizer.has_finite_weights(self.chunks)), self.ranks.host_group)
        if broken := [rank for rank, (_, finite) in enumerate(everyone) if not finite]:
            name = "actor_optimizer" if self.role == "actor" else "critic.optimizer"
            raise ConfigError(
                f"an update of the {self.role.replace('_', ' ')} has made weights that are not finite (on rank "
                f"{self.ranks.members[broken[0]]}; the gradient's norm was {norm:g}); nothing is saved of it: lower "
                f"{name}.lr"
            )
        metrics = sum_metrics(figures for figures, _ in everyone)
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

    def _schedule(
        self, rows: LocalRows, plan: MicroBatchPlan, consume: Callable[..., Any], forward_only: bool
    ) -> list[Any]:
        """Run this rank's micro-batches through Megatron's schedule. The last stage gets `consume`'s third results.

        A chunk's micro-batch is made when the schedule comes to it, and what autograd does not keep of it is gone when
        the chunk is done: of many, the device has those in flight.
        """
        mine, noted = plan[self.ranks.dp_rank], self.oom_retry.track_current
        place = device.device()
        # Megatron's bf16 wrapper would make an fp32 copy of what the last stage emits.
        keep_type = {"fp32_output": False} if self.config.model.dtype == "bfloat16" else {}
        fp8 = self.config.model.megatron.get("fp8")
        at = self.ranks.tp * (FP8_ROWS if fp8 else 1), self.ranks.cp, self.ranks.cp_rank
        foresees = 0 if forward_only else self.mtp_layers

        def made_for(chunk: torch.nn.Module) -> Iterator[MicroBatch]:
            replayed = None
            if self.replay_shape is not None:
                replayed = routing_replay.make_replay_shard(chunk, self.ranks.tp, self.ranks.tp_rank, rows.layers)
            return (make_micro_batch(rows.select(some), some, place, *at, foresees, replayed) for some in noted(mine))

        sources = [made_for(chunk) for chunk in self.chunks]

        def forward_step(source: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            micro = next(source)
            if self.replay_shape is not None:
                routing_replay.start_micro_batch(model, micro.routing, self.replay_shape)
            ahead = bool(foresees) and unwrap(model).post_process
            embeds = ahead or unwrap(model).pre_process
            output = model(
                input_ids=micro.tokens if embeds else None,
                position_ids=micro.positions if embeds else None,
                attention_mask=None,
                packed_seq_params=micro.packed,
                labels=micro.next_tokens if ahead else None,
                **keep_type,
            )
            return output, partial(consume, micro)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=sources if len(sources) > 1 else sources[0],
            model=self.chunks,
            num_microbatches=len(mine),
            seq_length=1,  # ignored: stages tell each other the length of each micro-batch
            micro_batch_size=1,
            forward_only=forward_only,
        )

    # ---- state

    def save_snapshot(self) -> None:
        """Remember the model as it is, for `rollback`."""
        with self._on_device():
            self._rollback_snapshot.capture(self.chunks, self.optimizer, self.scheduler)

    def rollback(self) -> None:
        """To what it was at the last `keep`; the learning rate's schedule begins anew, with its warm-up."""
        with self._on_device():
            self._rollback_snapshot.restore(self.chunks, self.optimizer)
        optimizer.set_schedule_step(self.scheduler, 0)

    def sharded_state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """Weights, optimizer and scheduler for `megatron.core.dist_checkpointing.save` and `load`."""
        with self._on_device():
            metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
            model = {
                f"chunk{i}": unwrap(chunk).sharded_state_dict(metadata=metadata) for i, chunk in enumerate(self.chunks)
            }
            return {
                "model": model,
                "optimizer": optimizer.sharded_state(self.optimizer, model, is_loading),
                "scheduler": self.scheduler.state_dict(),
                "guards": {"before": self._rollback_snapshot.previous_updates, **self.oom_retry.state_dict()},
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `dist_checkpointing.load(model.sharded_state_dict(is_loading=True), folder)` returned."""
        with self._on_device():
            for i, chunk in enumerate(self.chunks):
                unwrap(chunk).load_state_dict(state["model"][f"chunk{i}"])
            updates = int(state["scheduler"]["num_steps"])
            guards = state.get("guards", {})
            self._rollback_snapshot.previous_updates = int(guards.get("before", 0))
            self.oom_retry.load_state_dict(guards)
            optimizer.load_state(
                self.optimizer, state.get("optimizer", {}), updates + self._rollback_snapshot.previous_updates
            )
            optimizer.set_schedule_step(self.scheduler, updates)
