"""Several adapters in one pass: each token of a packed batch is computed with the adapter of its sequence.

The adapters take the place of the trained one, each in a slot. Those of a layer are stacked, A [slots * rank, in] and B
[out, slots * rank]: A x has the products of all adapters, of which all but those of the token's adapter are set to zero
before B is applied (`lora.Adapter`). So a token's gradient, too, reaches its adapter alone. All tokens go through the
frozen weights together, which is where the time of small requests goes.

    tokens of a layer                    their slots
    dense, tp = 1                        the micro-batch's on this context parallel rank
    dense, with sequence parallelism     this rank's part of them, before the gather (column) or after the scatter (row)
    routed experts                       sent through Megatron's dispatcher as the tokens are

The stacks are no parameters of the model, so that Megatron neither reduces nor updates them: `AdapterSlots.reduce` sums
their gradients over the groups over which Megatron sums the trained adapter's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config import Config
from megarl.megatron import lora
from megarl.megatron.parameter_names import unwrap
from megarl.megatron.routing_replay import RecordedRows


def reason_against_slots(config: Config, settings: TransformerConfig) -> str:
    """Return why the clients' adapters of this model cannot share a pass; empty if they can."""
    reasons = {
        "lora.rank is 0": not config.lora.rank,
        "train.fsdp is set": config.train.fsdp,
        "parallel.dynamic_cp is set": config.parallel.dynamic_cp,
        "train.ddp.overlap_grad_reduce is set": bool(config.train.ddp.get("overlap_grad_reduce")),
        "the model is trained in FP8": bool(settings.fp8),
        "multi-token prediction layers are trained": bool(settings.mtp_num_layers),
        "an auxiliary loss depends on all tokens of a batch": bool(
            settings.num_moe_experts and (settings.moe_aux_loss_coeff or settings.moe_z_loss_coeff)
        ),
        "experts have a capacity": settings.moe_expert_capacity_factor is not None,
        "its dispatcher is not alltoall": bool(settings.num_moe_experts)
        and settings.moe_token_dispatcher_type != "alltoall",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class StackedFactor:
    """A factor of several adapters. param: the trained factor, whose shape and place each of `values` has."""

    def __init__(self, param: torch.nn.Parameter, values: Sequence[torch.Tensor], dim: int) -> None:
        self.param, self.dim, self.count = param, dim, len(values)
        self.weight = torch.cat(list(values), dim).requires_grad_()
        self.grad = torch.zeros_like(self.weight, dtype=torch.float32, requires_grad=False)
        """The sum over micro-batches, fp32 as in Megatron's buffers."""
        self.weight.register_post_accumulate_grad_hook(self._accumulate)

    def _accumulate(self, weight: torch.Tensor) -> None:
        assert weight.grad is not None
        self.grad += weight.grad
        weight.grad = None

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups over which the gradient is summed, as Megatron does by the parameter's attributes."""
        if not self.param.allreduce:  # type: ignore[attr-defined]
            return [parallel_state.get_expert_data_parallel_group()]
        data_parallel = parallel_state.get_data_parallel_group(with_context_parallel=True)
        is_summed = self.param.sequence_parallel  # type: ignore[attr-defined]
        return [parallel_state.get_tensor_model_parallel_group(), data_parallel] if is_summed else [data_parallel]


class ExpertSlots:
    """The slots of the tokens that this rank's experts of one layer compute in the current pass."""

    def __init__(self, layer: MoELayer) -> None:
        self.layer, self.recorded = layer, RecordedRows()
        self.all_slots = torch.zeros(0, dtype=torch.int64)
        self.by_expert: Sequence[torch.Tensor] = ()

    def hook(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook of the experts, whose inputs are the tokens by expert and their numbers."""
        slots = self.recorded.for_pass()
        assert slots is not None
        self.all_slots = dispatch_slots(self.layer.token_dispatcher, slots)
        self.by_expert = self.all_slots.split(inputs[1].tolist())


@torch.no_grad()
def dispatch_slots(dispatcher: MoEAlltoAllTokenDispatcher, slots: torch.Tensor) -> torch.Tensor:
    """Send slots the way that the dispatcher has just sent the tokens. Collective over its ranks.

    slots: [this rank's tokens] int64. Returns [the tokens of this rank's experts], in the order of these.
    """
    fused = dispatcher.config.moe_permute_fusion
    rows = slots[:, None].float()
    rows = permute(rows, dispatcher.routing_map, num_out_tokens=dispatcher.num_out_tokens, fused=fused)[0]
    rows = all_to_all(dispatcher.ep_group, rows, dispatcher.output_splits, dispatcher.input_splits)
    if dispatcher.tp_size > 1:
        sizes = dispatcher.output_splits_tp
        sizes = None if sizes is None else sizes.tolist()
        rows = gather_from_sequence_parallel_region(rows, group=dispatcher.tp_group, output_split_sizes=sizes)
    if dispatcher.num_local_experts > 1:
        sizes, order = dispatcher.num_global_tokens_per_local_expert.ravel(), dispatcher.sort_input_by_local_experts
        rows = sort_chunks_by_idxs(rows, sizes, order, fused=fused)[0]
    return rows[:, 0].long()


class AdapterSlots:
    """Adapters that take the place of the trained one within `use`. Their gradients add up from pass to pass.

    adapters: this rank's factors of each, in the order of `lora.named_adapters`.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], adapters: Sequence[Sequence[torch.Tensor]]) -> None:
        self._chunks = chunks
        params = lora.named_adapters(chunks).values()
        values = {id(param): factors for param, *factors in zip(params, *adapters, strict=True)}
        self._factors: list[StackedFactor] = []
        self._recorded: dict[torch.nn.Module, list[RecordedRows]] = {chunk: [] for chunk in chunks}
        self._experts: list[ExpertSlots] = []
        self._slots: list[tuple[lora.Adapter, lora.LayerSlots]] = []
        for chunk in chunks:
            experts = self._expert_sources(chunk)
            for layer in lora.adapter_layers([chunk]):
                stacks = [
                    [StackedFactor(param, values[id(param)], dim) for param in params]
                    for dim, params in enumerate((layer.lora_a, layer.lora_b))
                ]
                self._factors += [*stacks[0], *stacks[1]]
                lora_a, lora_b = ([factor.weight for factor in stack] for stack in stacks)
                source = experts.get(layer.linear())
                if source is None:
                    recorded = RecordedRows()
                    self._recorded[chunk].append(recorded)
                    source = partial(_recorded_slots, recorded)
                self._slots.append((layer, lora.LayerSlots(lora_a, lora_b, source)))

    def _expert_sources(self, chunk: torch.nn.Module) -> dict[Any, Any]:
        """Return what gives the slots of the tokens of each linear layer of routed experts."""
        sources: dict[Any, Any] = {}
        for module in unwrap(chunk).modules():
            if not isinstance(module, MoELayer):
                continue
            slots = ExpertSlots(module)
            self._experts.append(slots)
            self._recorded[chunk].append(slots.recorded)
            local_experts = getattr(module.experts, "local_experts", None)
            if local_experts is None:  # grouped: a layer computes all experts
                sources |= {linear: partial(getattr, slots, "all_slots") for linear in module.experts.modules()}
            for index, expert in enumerate(local_experts or ()):
                sources |= {linear: partial(_slots_of_expert, slots, index) for linear in expert.modules()}
        return sources

    @contextmanager
    def use(self) -> Iterator[None]:
        """Compute with these adapters within the block."""
        handles = [item.layer.experts.register_forward_pre_hook(item.hook) for item in self._experts]
        for layer, slots in self._slots:
            layer.slots = slots
        try:
            yield
        finally:
            for layer, _ in self._slots:
                layer.slots = None
            for handle in handles:
                handle.remove()

    def start_micro_batch(self, chunk: torch.nn.Module, slots: torch.Tensor) -> None:
        """Set the slots of the tokens of the chunk's next forward pass, [P / cp] int64, -1 for padding."""
        tp, part = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        for recorded in self._recorded[chunk]:
            recorded.set_recorded(slots.chunk(tp)[part], chunk.training)

    def reset(self) -> None:
        """Discard the gradients, and the state of an aborted pass."""
        for factor in self._factors:
            factor.grad.zero_()
        for recorded in (item for items in self._recorded.values() for item in items):
            recorded.reset()

    def reduce(self, tokens: int) -> bool:
        """Sum the gradients over ranks and divide them by a number of tokens; return whether this rank's are finite.

        Collective over the model's ranks.
        """
        by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
        for factor in self._factors:
            by_groups.setdefault(tuple(factor.groups), []).append(factor.grad)
        is_finite = True
        for groups, grads in by_groups.items():
            flat = torch.cat([grad.flatten() for grad in grads])
            for group in groups:
                dist.all_reduce(flat, group=group)
            flat /= tokens
            is_finite = is_finite and bool(torch.isfinite(flat).all())
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        return is_finite

    def write_gradient(self, slot: int) -> None:
        """Write the gradient of an adapter into the buffers of the model's gradient."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        for factor in self._factors:
            factor.param.main_grad.copy_(factor.grad.chunk(factor.count, factor.dim)[slot])  # type: ignore[attr-defined]


def _recorded_slots(recorded: RecordedRows) -> torch.Tensor:
    slots = recorded.for_pass()
    assert slots is not None
    return slots


def _slots_of_expert(slots: ExpertSlots, index: int) -> torch.Tensor:
    return slots.by_expert[index]
