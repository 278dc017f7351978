"""A policy, critic or reward model on Megatron-Core: forward pass, training step, weights and state.

All ranks call every method with the same batch, of which each rank holds its own sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config import Config, ConfigError
from megarl.data.images import ImageProcessor
from megarl.data.packing import MicroBatchPlan
from megarl.megatron import fsdp, lora, optimizer, routing_replay, sparse_attention
from megarl.megatron.adapter_slots import AdapterSlots, reason_against_slots
from megarl.megatron.build import Role, build_chunks
from megarl.megatron.context_switch import ContextSwitch
from megarl.megatron.distribution import (
    BatchDispatcher,
    LocalRows,
    MicroBatchOutput,
    ModelRank,
    make_model_rank,
    row_budget,
)
from megarl.megatron.logprobs import OutputReader
from megarl.megatron.micro_batch import MicroBatch, explain_hidden_columns, make_micro_batch
from megarl.megatron.offload import MemoryOffload, WeightSnapshot, distinct_storages
from megarl.megatron.oom_retry import OOMRetry
from megarl.megatron.parameter_names import named_params, unwrap
from megarl.megatron.sparse_attention import collect_indexer_loss
from megarl.models import int4
from megarl.models.family import VALUE_HEAD
from megarl.models.flops import quadratic_cost
from megarl.models.layout_algebra import Param, shard
from megarl.models.lora_tables import MergedWeights, adapter_params
from megarl.models.memory import critic_params
from megarl.models.prefix_sharing import reason_against
from megarl.models.registry import family_of, num_trained_mtp
from megarl.models.routing import RoutingShape, routing_shape
from megarl.models.sparse_indices import index_shape
from megarl.models.step_time import context_costs
from megarl.parallel import device
from megarl.parallel.context_parallel import context_sizes
from megarl.parallel.host_copy import DeferredCopy, HostCopy, tensor_bytes
from megarl.parallel.placement import optimizer_key
from megarl.parallel.ranks import Ranks, all_gather_objects, use_layout
from megarl.parallel.wait_listeners import track_progress
from megarl.types import ModelOutput, TokenLoss, TrainBatch
from megarl.types.adam_settings import AdamSettings
from megarl.types.batch import select_columns


def sum_metrics(parts: Iterable[Mapping[str, SupportsFloat]]) -> dict[str, float]:
    """Sum metrics by name, in the order of `parts`, so that ranks with equal parts get bitwise equal sums."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + float(value)
    return total


def collect_aux_losses(config: TransformerConfig, ranks: Ranks, plan: MicroBatchPlan) -> dict[str, float]:
    """Return each enabled auxiliary loss without its coefficient: the mean over layers, micro-batches and replicas.

    Collective over the model's ranks, after each step; resets Megatron's tracker. Empty if no aux loss is enabled, the
    default in RL. Megatron's own reduction fails on a pipeline stage without MoE layers, which has tracked nothing.
    """
    num_micro_batches, per_rank = sum(len(plan) // width for width in plan.widths), len(plan.widths)
    num_full_copies = {
        # name in Megatron -> number of full values, by micro-batch; other ranks hold partial values to be summed
        "load_balancing_loss": num_micro_batches,
        "seq_load_balancing_loss": num_micro_batches,
        "global_load_balancing_loss": per_rank,
        "z_loss": ranks.dp * ranks.tp * ranks.cp * per_rank,
    }
    if config.num_moe_experts is None:
        return {}
    balancing_types, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(balancing_types, str):
        balancing_types, weights = [balancing_types], [weights]
    tracked_names = {
        "aux_loss": "load_balancing_loss",
        "seq_aux_loss": "seq_load_balancing_loss",
        "global_aux_loss": "global_load_balancing_loss",
    }
    weights_by_type = zip(balancing_types, weights, strict=True)
    names = [tracked_names[kind] for kind, weight in weights_by_type if kind in tracked_names and weight]
    names += ["z_loss"] if config.moe_z_loss_coeff else []
    if not names:
        return {}
    tracked = get_moe_metrics_tracker().metrics
    local_sums = {name: float(tracked[name].values.sum()) if name in tracked else 0.0 for name in names}
    destroy_moe_metrics_tracker()  # its `clear` would keep the number of layers, and the next model may have more
    gathered = all_gather_objects(local_sums, ranks.host_group)
    pattern = config.moe_layer_freq
    layers = sum(pattern) if isinstance(pattern, list) else -(-config.num_layers // pattern)
    layers += config.mtp_num_layers or 0
    return {f"moe_{name}": sum(sums[name] for sums in gathered) / (num_full_copies[name] * layers) for name in names}


def make_dispatcher(
    hf: Mapping[str, Any], config: Config, layout: Ranks, role: Role, model_ranks: Mapping[int, ModelRank]
) -> BatchDispatcher:
    """Return the dispatcher of a model in this layout. model_ranks: see `BatchDispatcher`."""
    is_actor = role == "actor"
    is_interleaved = layout.vpp > 1
    ranks_per_row, sizes = (1, context_sizes(layout.cp)) if layout.dynamic_cp else (layout.cp, (1,))
    return BatchDispatcher(
        model_ranks=model_ranks,
        rows=layout.dp * layout.cp // ranks_per_row,
        token_budget=row_budget(config, layout),
        quadratic_cost=quadratic_cost(hf),
        # Megatron's interleaved schedule needs a multiple of the pipeline size. With exactly as many in training, four
        # stages or more wait for each other: some still warm up, and exchange shapes in another order.
        multiple=layout.pp if is_interleaved else 1,
        min_trained=2 * layout.pp if is_interleaved and layout.pp > 3 else 1,
        routing_shape=replayed_routing(hf, config, role),
        index_shape=index_shape(hf, config) if is_actor else None,
        has_logits=is_actor,
        # Ranks that exchange tokens or weights in each layer.
        is_lockstep=config.train.fsdp or layout.ep * layout.etp > layout.tp * ranks_per_row,
        shares_prefixes=reason_against(hf, config, device.has_cuda()) is None,
        repeated_tokens=1 + (num_trained_mtp(hf, config) if is_actor else 0),
        widths=context_costs(hf, sizes, layout.tp, config.parallel.ranks_per_node),
    )


def replayed_routing(hf: Mapping[str, Any], config: Config, role: Role) -> RoutingShape | None:
    """Return the shape of the routing records that a model replays; None if it does not."""
    return routing_shape(hf, config.model.megatron) if role == "actor" and config.train.routing_replay else None


class BackwardPass(NamedTuple):
    """Result of a forward and a backward pass on this rank; the gradient is in the model's buffers."""

    local_metrics: dict[str, float]
    aux_losses: dict[str, float]
    tokens: int
    plan: MicroBatchPlan
    outputs: list[MicroBatchOutput]


LossFn = Callable[[ModelOutput, TrainBatch], TokenLoss]
ShardLoader = Callable[[Param, int, int], torch.Tensor]
FP8_ROWS = 32
"""Row multiple for FP8: Transformer Engine requires multiples of 16 rows, or of 32 with block scales."""
OUTPUT_NAMES = {"actor": ("logprobs",), "critic": ("values",), "reward_model": ("scores",)}
"""The fields of `ModelOutput` that a forward pass computes by default, by role."""


class MegatronModel:
    """A model on Megatron-Core with its optimizer and schedule. Weights are arbitrary until loaded.

    total_updates: optimizer steps of the whole run, for the learning-rate schedule.
    trains: if False, the model has neither gradients nor an optimizer and is forward-only.
    name: of the role in the flow, such as actor_b; `role` by default.
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        config: Config,
        ranks: Ranks,
        role: Role,
        total_updates: int = 1,
        trains: bool = True,
        name: str = "",
    ) -> None:
        self.hf_config, self.config, self.ranks, self.role = hf_config, config, ranks, role
        self.name = name or role
        self.mtp_layers = num_trained_mtp(hf_config, config) if role == "actor" and trains else 0
        self.rounds_experts = role == "actor" and int4.is_int4(hf_config)
        self.optimizer: Any = None
        self.replay_shape: RoutingShape | None = None
        self._weight_offload, self._optimizer_offload = MemoryOffload(), MemoryOffload()
        self._rollback_snapshot = WeightSnapshot()
        self._pending_copy: DeferredCopy | None = None
        """A checkpoint's copy of the state, which has to be complete before the state changes."""
        settings = config.actor_optimizer if role == "actor" else config.critic.optimizer
        with self._on_device():
            self.chunks = build_chunks(hf_config, config, role, self.mtp_layers, trains)
            family, last = family_of(hf_config), unwrap(self.chunks[-1])
            self._merge, self._pixels = 0, lambda data: self.image_processor.pixels(data)
            if family.vision is not None:
                self._merge = int(family.vision.config(hf_config)["spatial_merge_size"])
            vocab_size, cap = int(family.gpt_kwargs(hf_config)["vocab_size"]), family.extras(hf_config).logit_cap
            sharded = next(iter(fsdp.sharded_chunks(self.chunks[-1:])), None)
            self._reader = OutputReader(last, role, vocab_size, config.train.logits_chunk_size, cap, sharded)
            self.replay_shape = replayed_routing(hf_config, config, role)
            if self.replay_shape is not None:
                routing_replay.install(self.chunks, self.replay_shape)
            layers = routing_replay.replayed_layers(self.chunks) if self.replay_shape is not None else ()
            self.index_shape = index_shape(hf_config, config) if role == "actor" else None
            indexed = (
                () if self.index_shape is None else sparse_attention.recorded_layers(self.chunks, self.index_shape)
            )
            positions = all_gather_objects(make_model_rank(ranks, layers, indexed), ranks.host_group)
            self.dispatcher = make_dispatcher(
                hf_config, config, ranks, role, dict(zip(ranks.members, positions, strict=True))
            )
            self._context = ContextSwitch(self.chunks, ranks)
            self.oom_retry = OOMRetry(hf_config, config, ranks, role, self.chunks, self.dispatcher)
            if not trains:
                return
            self.optimizer = optimizer.build_optimizer(settings, self.chunks, getattr(torch, config.model.dtype))
        self.scheduler = optimizer.build_scheduler(settings, self.optimizer, total_updates)

    @cached_property
    def image_processor(self) -> ImageProcessor:
        return ImageProcessor.load(self.config.model.path, self._merge)

    # ---- weights

    def params(self) -> list[Param]:
        """Return the table of all parameters of this model, across all ranks."""
        table = family_of(self.hf_config).params(self.hf_config, self.ranks.tp, self.ranks.etp, bool(self.mtp_layers))
        if self.role == "actor":
            return table
        return critic_params(table, int(self.hf_config["hidden_size"]))

    def local_params(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters, in place, by canonical name (see `parameter_names.py`).

        With LoRA these are the base model's parameters. With `train.fsdp` they have values in `gathered_params` alone.
        """
        return {name: tensor.detach() for name, tensor in self._named_params().items()}

    def _named_params(self) -> dict[str, torch.Tensor]:
        self._weight_offload.onload()
        return named_params(self.chunks, self.ranks.ep_rank)

    def local_shards(self) -> dict[str, torch.Tensor]:
        """Return what this rank stores of `local_params`, in place: all, or with `train.fsdp` its rows of each."""
        return {name: fsdp.stored_rows(self.chunks, param) for name, param in self._named_params().items()}

    def gathered_params(self) -> AbstractContextManager[None]:
        """Give `local_params` their values within the block.

        With `train.fsdp` this gathers all weights, which is collective over the model's ranks.
        """
        self._weight_offload.onload()
        return fsdp.gathered(self.chunks)

    def local_adapters(self) -> dict[str, torch.Tensor]:
        """Return this rank's factors of `adapter_params`, in place, by canonical name; empty without LoRA.

        With `train.fsdp` they have values in `gathered_params` alone.
        """
        return {name: factor.detach() for name, factor in self._named_adapters().items()}

    def _named_adapters(self) -> dict[str, torch.nn.Parameter]:
        self._weight_offload.onload()
        return lora.named_adapters(self.chunks)

    def adapter_shards(self) -> dict[str, torch.Tensor]:
        """Return what this rank stores of `local_adapters`, in place: all, or with `train.fsdp` its rows of each."""
        return {name: fsdp.stored_rows(self.chunks, factor) for name, factor in self._named_adapters().items()}

    def adapter_params(self) -> list[Param]:
        """Return the table of all adapters of this model."""
        return adapter_params(self.params(), self.config.lora) if self.config.lora.rank else []

    def merged_params(self) -> Mapping[str, torch.Tensor]:
        """Return the effective weights: `local_params`, with LoRA adapters merged lazily on each lookup."""
        settings = self.config.lora
        if not settings.rank:
            return self.local_params()
        return MergedWeights(self.local_params(), self.local_adapters(), settings.scale)

    def load_shards(self, get: ShardLoader) -> None:
        """Fill every local parameter with the shard `get(param, parts, part)`, cut as by `layout_algebra.split_param`.

        Raises ConfigError on all ranks, naming the first such tensor, if any element is not finite.
        """
        table = {param.megatron: param for param in self.params()}
        not_finite = []
        self._wait_for_copy()
        local = self._named_params()
        for name, tensor in track_progress(local.items(), len(local)):
            value = get(table[name], *self.ranks.tp_size_and_rank(table[name].expert is not None))
            if value.shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)} here, not {tuple(value.shape)}")
            fsdp.set_param(self.chunks, tensor, value)
            if not bool(torch.isfinite(value.to(tensor.dtype)).all()):
                not_finite.append(" or ".join(item.name for item in table[name].hf))
        if bad_names := [name for names in all_gather_objects(not_finite, self.ranks.host_group) for name in names]:
            raise ConfigError(f"{bad_names[0]} has elements that are not finite; these weights cannot be trained")
        if self.optimizer is not None:
            optimizer.reload_masters(self.optimizer)
        self._round_int4_experts()

    def load_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace every local parameter by its shard of full HF tensors, the (name, tensor) of `gather_hf`.

        Those that this rank does not hold are skipped. Raises ValueError if a local parameter is missing.
        """
        self._wait_for_copy()
        local = self._named_params()
        params = {item.name: param for param in self.params() if param.megatron in local for item in param.hf}
        received: dict[str, dict[str, torch.Tensor]] = {}
        missing = set(local)
        for name, tensor in tensors:
            if (param := params.get(name)) is None:
                continue
            full = received.setdefault(param.megatron, {})
            full[name] = tensor
            if len(full) == len(param.hf):
                sizes = self.ranks.tp_size_and_rank(param.expert is not None)
                fsdp.set_param(self.chunks, local[param.megatron], shard(param, received.pop(param.megatron), *sizes))
                missing.discard(param.megatron)
        if missing:
            raise ValueError(f"no tensors of {min(missing)} ({len(missing)} such)")
        self._round_int4_experts()

    @torch.no_grad()
    def _round_int4_experts(self) -> None:
        """Round the routed experts of an INT4 checkpoint's policy to the values that the engine computes with.

        Quantisation-aware training: the bf16 weights are the INT4 values nearest to the optimizer's fp32 masters, which
        keep what an update adds, and gradients pass straight through to them. Compared with rounding in each forward
        pass, the result is the same, and it costs no memory and one pass over the weights per update.
        """
        if not self.rounds_experts:
            return
        for name, rows in self.local_shards().items():
            if ".mlp.experts." in name:
                int4.round_to_grid(rows)

    def load_hf(self, folder: str | Path) -> None:
        """Load weights from an HF folder. A value head stays zero unless the folder has one. Raises ConfigError."""
        from megarl.models.hf_folder import open_hf

        if device.is_rehearsal():  # there may be no weights
            local = self._named_params()
            self.load_shards(lambda param, parts, part: torch.empty_like(local[param.megatron]))
            return
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

    def without_adapters(self) -> AbstractContextManager[None]:
        """Disable the adapters within the block, so that a LoRA model equals its initial weights."""
        return lora.disable_adapters(self.chunks)

    def host_copy(self) -> HostCopy:
        """Return a copy of the local weights for `swap_weights`: all parameters, or with LoRA the adapters."""
        copy = HostCopy(sum(tensor.nbytes for tensor in self._swapped_tensors()))
        self.update_host_copy(copy)
        return copy

    def update_host_copy(self, copy: HostCopy) -> None:
        """Copy the current weights into `copy`, a `host_copy`."""
        copy.copy_from(map(tensor_bytes, self._swapped_tensors()))

    def _swapped_tensors(self) -> list[torch.Tensor]:
        return list((self.adapter_shards() if self.config.lora.rank else self.local_shards()).values())

    @contextmanager
    def swap_weights(self, copy: HostCopy) -> Iterator[None]:
        """Use the weights in `copy`, a `host_copy`, within the block.

        Weights are exchanged in place, so `copy` holds the model's own weights within the block. No update may happen
        inside.
        """
        self._wait_for_copy()
        weights = [tensor_bytes(tensor) for tensor in self._swapped_tensors()]
        copy.exchange(weights)
        try:
            yield
        finally:
            copy.exchange(weights)

    # ---- device memory

    def offload(self, weights: bool = True) -> int:
        """Move optimizer states, and weights if set, to the host until needed; drop gradients; return bytes freed."""
        self._wait_for_copy()
        params = fsdp.weight_tensors(self.chunks)
        freed = 0
        if self.optimizer is not None:
            states, grads = optimizer.device_state_tensors(self.optimizer), fsdp.grad_tensors(self.chunks)
            freed += self._optimizer_offload.offload(states, drop=grads, exclude=params)
        return freed + (self._weight_offload.offload(params) if weights else 0)

    @contextmanager
    def _on_device(self, states: bool = True) -> Iterator[None]:
        """Onload the weights, and optimizer states if `states` is set, and activate this model's layout in Megatron.

        Weights that `train.fsdp` has gathered are freed at the end.
        """
        self._weight_offload.onload()
        if states:
            self._optimizer_offload.onload()
        with use_layout(self.ranks):
            yield
            fsdp.release(self.chunks)

    # ---- computation

    @torch.no_grad()
    def forward(
        self, batch: TrainBatch, temperature: float = 1.0, names: Sequence[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Compute per-token `logprobs` of a policy, `values` of a critic or `scores` of a reward model.

        Returns [T] fp32 host tensors in the batch's order.

        temperature: divides a policy's logits.
        names: the fields of `ModelOutput` to return instead of the role's default, such as a policy's `entropy`.
        """
        names = names or OUTPUT_NAMES[self.role]

        def read_outputs(micro: MicroBatch, emitted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            output = self._reader.read(micro, emitted, temperature, "entropy" in names)
            outputs = {name: getattr(output, name).float().cpu() for name in names}
            return emitted.new_zeros(()), torch.zeros((), dtype=torch.int), (micro.indices, outputs)

        for chunk in self.chunks:
            chunk.eval()
        plan = self.dispatcher.plan(batch, forward_only=True)
        rows = self.dispatcher.dispatch(
            batch, plan, ("tokens", "targets") if batch.targets is not None else ("tokens",)
        )
        with self._on_device(states=False):
            for retried_plan in self.oom_retry.plans(batch, plan, trains=False):
                with self.oom_retry.catch_oom():
                    results = self._schedule(rows, retried_plan, read_outputs, forward_only=True)
        return self.dispatcher.collect(batch, plan, results, names)()

    def train_step(self, batch: TrainBatch, loss_fn: LossFn, temperature: float = 1.0) -> dict[str, float]:
        """Take one optimizer step on sum(loss_weights * loss) over `batch` and return its metrics.

        Metrics prefixed with the role: `loss`, `grad_norm` (before clipping), `lr`, `tokens`, `skipped` (1 if the
        gradient was not finite and nothing changed), `mtp_loss` if MTP layers are trained, and each enabled aux loss,
        `indexer_loss` among them.
        Metrics of `loss_fn` keep their own names. With `batch.keeps_groups` the loss gets all sequences of a group in
        one micro-batch. Raises ConfigError on all ranks if the step produces non-finite weights.
        """
        passed = self._backward(batch, loss_fn, temperature)
        return self._update(passed.tokens, passed.local_metrics, passed.aux_losses)

    def forward_backward(
        self, batch: TrainBatch, loss_fn: LossFn, temperature: float = 1.0
    ) -> tuple[dict[str, float], torch.Tensor]:
        """Compute the gradient of sum(loss_weights * loss) over `batch`, as `train_step` does, without an update.

        The gradient is in `grad_tensors` until the next pass, or until `offload`. Returns the metrics of the loss and
        `<role>/loss`, and the log-probs of this pass, [T] fp32 on the host in the batch's order.
        """
        passed = self._backward(batch, loss_fn, temperature, ("logprobs",))
        gathered = all_gather_objects(passed.local_metrics, self.ranks.host_group)
        outputs = self.dispatcher.collect(batch, passed.plan, passed.outputs, ("logprobs",))()
        return sum_metrics(gathered), outputs["logprobs"]

    def forward_backward_adapters(
        self, batch: TrainBatch, loss_fn: LossFn, adapters: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[dict[str, float], torch.Tensor, AdapterSlots]:
        """Compute the gradients of several adapters at once, as `forward_backward` does of the trained one.

        Returns the metrics, the log-probs, and the adapters with their gradients, for `AdapterSlots.write_gradient`.
        The metric `not_finite` is above 0 if a gradient is not finite, which may have reached the others.

        batch: with `adapter`. adapters: this rank's tensors of each, in the order of `adapter_shards`.
        """
        with self._on_device():
            slots = AdapterSlots(self.chunks, adapters)
        # Sequences of different adapters share no prefix.
        passed = self._backward(batch.with_(prefixes=None), loss_fn, 1.0, ("logprobs",), slots)
        with self._on_device():
            is_finite = slots.reduce(passed.tokens)
        local_metrics = {**passed.local_metrics, "not_finite": float(not is_finite)}
        gathered = all_gather_objects(local_metrics, self.ranks.host_group)
        outputs = self.dispatcher.collect(batch, passed.plan, passed.outputs, ("logprobs",))()
        return sum_metrics(gathered), outputs["logprobs"], slots

    def reason_against_slots(self) -> str:
        """Return why several adapters cannot share a pass; empty if they can."""
        return reason_against_slots(self.config, unwrap(self.chunks[0]).config)

    def grad_tensors(self) -> list[torch.Tensor]:
        """Return the memory of this rank's gradients, in place."""
        return fsdp.grad_tensors(self.chunks)

    def update(self, tokens: int, adam: AdamSettings) -> dict[str, float]:
        """Take one optimizer step on the gradient in `grad_tensors`, with these settings, not the configuration's.

        tokens: of the batches that the gradient is of. Returns the metrics of `train_step`, without those of a loss.
        """
        return self._update(tokens, {}, {}, adam)

    def _backward(
        self,
        batch: TrainBatch,
        loss_fn: LossFn,
        temperature: float,
        names: Sequence[str] = (),
        slots: AdapterSlots | None = None,
    ) -> BackwardPass:
        """Compute the gradient of a batch, and the per-token outputs `names`, which are fields of `ModelOutput`.

        slots: the adapters that `batch.adapter` counts; None for the trained one.
        """
        if batch.loss_weights is None:
            raise ValueError("a training batch needs loss_weights")
        # Megatron scales its aux losses by the local token count and divides gradients by the global one. Scale our
        # loss by the global token count, so that the division cancels.
        total_tokens = int(batch.lengths.sum())
        plan = self.dispatcher.plan(batch, forward_only=False)
        rows = self.dispatcher.dispatch(batch, plan, select_columns(loss_fn, batch))

        def compute_loss(micro: MicroBatch, emitted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            is_first = parallel_state.get_context_parallel_rank() == 0  # of the ranks of this micro-batch
            token_count = len(micro.unpadded_indices) if is_first else 0  # each token is counted once
            tokens = torch.tensor(token_count, dtype=torch.int, device=emitted.device)
            if not micro.indices:  # an empty micro-batch, so that this rank joins its peers' collectives
                return self._reader.empty_loss(emitted), tokens, ({}, ([], {name: torch.zeros(0) for name in names}))
            part = micro.loss_batch(loss_fn)
            assert part.loss_weights is not None
            output = self._reader.read(micro, emitted, temperature)
            with explain_hidden_columns(loss_fn):
                result = loss_fn(output, part)
            loss = (part.loss_weights * result.loss).sum()
            local_metrics = {f"{self.role}/loss": loss.detach()} | result.reduce_metrics(part)
            if self.mtp_layers:
                mtp_loss = self._reader.mtp_loss(micro, emitted, part.loss_weights)
                local_metrics[f"{self.role}/mtp_loss"] = mtp_loss.detach()
                loss = loss + self.config.train.mtp_loss_coef * mtp_loss
            outputs = {name: getattr(output, name).detach().float().cpu() for name in names}
            return loss * total_tokens, tokens, (local_metrics, (micro.indices, outputs))

        with self._on_device():
            for retried_plan in self.oom_retry.plans(batch, plan, trains=True):
                for chunk in self.chunks:
                    chunk.train()
                    chunk.zero_grad_buffer()
                self.optimizer.zero_grad()
                if slots is not None:
                    slots.reset()
                with self.oom_retry.catch_oom(), nullcontext() if slots is None else slots.use():
                    results = self._schedule(rows, retried_plan, compute_loss, forward_only=False, slots=slots)
            aux_losses = collect_aux_losses(unwrap(self.chunks[0]).config, self.ranks, retried_plan)
            coef = unwrap(self.chunks[0]).config.dsa_indexer_loss_coeff
            if coef:
                aux_losses |= collect_indexer_loss(self.ranks, coef, total_tokens)
        local_metrics = sum_metrics(metrics for metrics, _ in results) if self.dispatcher.is_reporter else {}
        return BackwardPass(local_metrics, aux_losses, total_tokens, plan, [outputs for _, outputs in results])

    def _update(
        self,
        tokens: int,
        local_metrics: Mapping[str, float],
        aux_losses: Mapping[str, float],
        adam: AdamSettings | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step on the gradient; return its metrics and the sums of all ranks' `local_metrics`."""
        with self._on_device():
            self._wait_for_copy()
            norm, is_taken = optimizer.take_step(self.optimizer, self.scheduler, adam)
            if is_taken:
                self._round_int4_experts()
        gathered = all_gather_objects((local_metrics, optimizer.has_finite_weights(self.chunks)), self.ranks.host_group)
        if bad_ranks := [rank for rank, (_, finite) in enumerate(gathered) if not finite]:
            raise ConfigError(
                f"an update of the {self.name.replace('_', ' ')} produced weights that are not finite (on rank "
                f"{self.ranks.members[bad_ranks[0]]}; the gradient's norm was {norm:g}); they are not saved: lower "
                f"{optimizer_key(self.name)}.lr"
            )
        metrics = sum_metrics(local_metrics for local_metrics, _ in gathered)
        lr = adam.lr if adam is not None else float(self.scheduler.get_lr({}))
        step_metrics = {"grad_norm": norm, "lr": lr, "tokens": float(tokens), "skipped": float(not is_taken)}
        return metrics | {f"{self.role}/{name}": value for name, value in ({**aux_losses} | step_metrics).items()}

    def _schedule(
        self,
        rows: LocalRows,
        plan: MicroBatchPlan,
        loss_func: Callable[..., Any],
        forward_only: bool,
        slots: AdapterSlots | None = None,
    ) -> list[Any]:
        """Run Megatron's schedule; the last stage returns the third results of `loss_func(micro_batch, output)`.

        Of a micro-batch of several rows, only ranks of the first one return the result.

        A chunk's micro-batch is built when the schedule reaches it, and released after the chunk's pass except for what
        autograd saves. So the device holds only the micro-batches in flight.
        """
        assert self.dispatcher.this_rank is not None
        row, ranks_per_row = self.dispatcher.this_rank.row, 1 if self.ranks.dynamic_cp else self.ranks.cp
        target_device = device.device()
        # Without this, Megatron's bf16 wrapper makes an fp32 copy of the last stage's output.
        output_kwargs = {"fp32_output": False} if self.config.model.dtype == "bfloat16" else {}
        fp8 = self.config.model.megatron.get("fp8")
        padding = self.ranks.tp * (FP8_ROWS if fp8 else 1)
        mtp_layers = 0 if forward_only else self.mtp_layers

        def iter_micro_batches(chunk: torch.nn.Module) -> Iterator[MicroBatch]:
            replay_shard = None
            if self.replay_shape is not None:
                layers = tuple(rows.layers.index(layer) for layer in routing_replay.replayed_layers([chunk]))
                replay_shard = routing_replay.ReplayShard(layers, self.ranks.tp, self.ranks.tp_rank)
            indexed = None
            if self.index_shape is not None:
                local = sparse_attention.recorded_layers([chunk], self.index_shape)
                indexed = tuple(rows.indexed_layers.index(layer) for layer in local)
            options = mtp_layers, replay_shard, indexed
            keywords: dict[str, Any] = {
                "merge": self._merge,
                "shares_prefixes": self.dispatcher.shares_prefixes,
                "repeated": self.dispatcher.repeated_tokens,
            }
            for indices, width in self.oom_retry.track_current(plan):
                cp = width * ranks_per_row
                place = target_device, padding, cp, self.ranks.cp_rank % cp
                yield make_micro_batch(rows.select(indices), indices, *place, *options, **keywords)

        sources = [iter_micro_batches(chunk) for chunk in self.chunks]

        def forward_step(source: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            micro = next(source)
            self._context.set_size(len(micro.context_indices))
            if self.replay_shape is not None:
                routing_replay.start_micro_batch(
                    model, None if micro.routing is None else micro.on_device("routing"), self.replay_shape
                )
            if self.index_shape is not None:
                keys = None if micro.sparse_indices is None else micro.on_device("sparse_indices")
                sparse_attention.start_micro_batch(model, keys)
            if slots is not None:
                slots.start_micro_batch(model, micro.on_device("adapter"))
            runs_mtp = bool(mtp_layers) and unwrap(model).post_process
            needs_tokens = runs_mtp or unwrap(model).pre_process
            positions = micro.on_device("positions") if needs_tokens else None
            image_kwargs: dict[str, Any] = {}
            if micro.vision is not None:
                positions = micro.on_device("mrope")
                image_kwargs = {"vision": micro.vision, "read_pixels": self._pixels}
            output = model(
                input_ids=micro.on_device("tokens") if needs_tokens else None,
                position_ids=positions,
                attention_mask=None,
                packed_seq_params=micro.packed,
                labels=micro.on_device("next_tokens") if runs_mtp else None,
                **output_kwargs,
                **image_kwargs,
            )
            self._context.restore_in_backward(output)
            return output, partial(loss_func, micro)

        with self._context.restore():
            results: list[Any] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=sources if len(sources) > 1 else sources[0],
                model=self.chunks,
                num_microbatches=len(plan.widths),
                seq_length=1,  # ignored: stages send each other the length of each micro-batch
                micro_batch_size=1,
                forward_only=forward_only,
            )
        widths = plan.widths if results else ()  # only the last stage has results
        return [result for result, width in zip(results, widths, strict=True) if row % width == 0]

    def set_peak_lr(self, lr: float) -> None:
        """Set the peak of the learning-rate schedule, whose position stays."""
        optimizer.set_peak_lr(self.scheduler, lr)

    def set_dispatcher(self, dispatcher: BatchDispatcher) -> None:
        """Use another budget of micro-batches; what `guards.oom_retry` has lowered starts anew."""
        self.dispatcher = dispatcher
        self.oom_retry.set_dispatcher(dispatcher)

    # ---- state

    def stable_storages(self) -> Collection[int]:
        """Return the storages that only updates, loads, swaps and offloading change, as keys of `distinct_storages`:
        those of weights, masters and moments, not of buffers."""
        states = optimizer.state_tensors(self.optimizer) if self.optimizer is not None else ()
        return distinct_storages([*fsdp.weight_tensors(self.chunks), *states]).keys()

    def protect_until_copied(self, copy: DeferredCopy) -> None:
        """Have everything that changes or frees `stable_storages` wait for this copy of them."""
        self._wait_for_copy()
        self._pending_copy = copy

    def _wait_for_copy(self) -> None:
        """Call before any change of `stable_storages`."""
        if self._pending_copy is not None:
            self._pending_copy.wait()
            self._pending_copy = None

    @contextmanager
    def trained_state(self) -> Iterator[list[torch.Tensor]]:
        """Give what updates change on this rank, in place and on the device: weights, or with LoRA adapters, then
        masters and moments. `set_update_count` completes the state that is written into it.

        No two tensors share memory: in fp32, the weights are the masters.
        """
        self._wait_for_copy()
        with self._on_device():
            optimizer.create_states(self.optimizer)
            weights = self._swapped_tensors()
            storages = {tensor.untyped_storage()._cdata for tensor in weights}
            states = optimizer.state_tensors(self.optimizer)
            yield [*weights, *(state for state in states if state.untyped_storage()._cdata not in storages)]

    @property
    def update_count(self) -> int:
        """Number of updates so far, skipped ones excluded."""
        return int(self.scheduler.num_steps)

    def set_update_count(self, updates: int) -> None:
        """Set the number of updates so far, for the optimizer and the learning-rate schedule."""
        with self._on_device():
            optimizer.set_step_count(self.optimizer, updates)
            optimizer.set_schedule_step(self.scheduler, updates)

    def reset_optimizer(self) -> None:
        """Set the moments and the number of updates to zero; the weights stay."""
        self._wait_for_copy()
        with self._on_device():
            optimizer.reset_moments(self.optimizer)
        self.set_update_count(0)

    def save_snapshot(self) -> None:
        """Take the snapshot that `rollback` restores."""
        with self._on_device():
            self._rollback_snapshot.capture(self.chunks, self.optimizer, self.scheduler)

    def rollback(self) -> None:
        """Restore the last `save_snapshot` and restart the learning-rate schedule, warm-up included."""
        self._wait_for_copy()
        with self._on_device():
            self._rollback_snapshot.restore(self.chunks, self.optimizer)
        optimizer.set_schedule_step(self.scheduler, 0)

    def sharded_state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """Return weights, optimizer and scheduler for `megatron.core.dist_checkpointing.save` and `load`."""
        if is_loading:  # into the tensors of the template
            self._wait_for_copy()
        with self._on_device():
            metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
            model = self._sharded_weights(metadata)
            return {
                "model": self._stored_weights(model, is_loading),
                "optimizer": optimizer.sharded_state(self.optimizer, model, is_loading),
                "scheduler": self.scheduler.state_dict(),
                "guards": {"before": self._rollback_snapshot.previous_updates, **self.oom_retry.state_dict()},
            }

    def _sharded_weights(self, metadata: dict[str, Any]) -> dict[str, Any]:
        return {f"chunk{i}": unwrap(chunk).sharded_state_dict(metadata=metadata) for i, chunk in enumerate(self.chunks)}

    def _stored_weights(self, weights: dict[str, Any], is_loading: bool) -> dict[str, Any]:
        """Restrict `_sharded_weights` to what this rank stores of them."""
        return {
            name: optimizer.shard_weights(chunk, state, is_loading) if isinstance(chunk, fsdp.ShardedModel) else state
            for chunk, (name, state) in zip(self.chunks, weights.items(), strict=True)
        }

    def _load_weights(self, weights: dict[str, Any], strict: bool = True) -> None:
        for chunk, state in zip(self.chunks, weights.values(), strict=True):
            if isinstance(chunk, fsdp.ShardedModel):
                optimizer.load_weights(chunk, state, strict)
            else:
                unwrap(chunk).load_state_dict(state, strict=strict)

    def sharded_reference(self, is_loading: bool = False) -> dict[str, Any]:
        """Return the weights of `swap_weights` alone, like `sharded_state_dict`."""
        if is_loading:
            self._wait_for_copy()
        with self._on_device(states=False):
            metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
            weights = self._sharded_weights(metadata)
            if self.config.lora.rank:
                weights = {
                    chunk: {name: value for name, value in state.items() if name.startswith(lora.STATE_PREFIX)}
                    for chunk, state in weights.items()
                }
            return {"model": self._stored_weights(weights, is_loading)}

    def load_reference(self, state: dict[str, Any]) -> None:
        """Load the result of `dist_checkpointing.load(model.sharded_reference(is_loading=True), folder)`."""
        with self._on_device(states=False):
            self._load_weights(state["model"], strict=not self.config.lora.rank)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `dist_checkpointing.load(model.sharded_state_dict(is_loading=True), folder)`."""
        with self._on_device():
            self._load_weights(state["model"])
            updates = int(state["scheduler"]["num_steps"])
            guards = state.get("guards", {})
            self._rollback_snapshot.previous_updates = int(guards.get("before", 0))
            self.oom_retry.load_state_dict(guards)
            optimizer.set_step_count(self.optimizer, updates + self._rollback_snapshot.previous_updates)
            optimizer.set_schedule_step(self.scheduler, updates)
