"""Values that Megatron reads from device tensors, in a rehearsal, whose tensors have none.

Every expert gets as many tokens as any other, up to one, and every expert parallel rank exactly as many. All
micro-batches have the same number of tokens, so what a pipeline stage receives has the shape of what it would send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megarl.rehearse.host_reads import set_expert_rows, tokens_per_expert


def balance_experts() -> None:
    """Make Megatron's dispatchers of this process see balanced routing, as if all ranks had as many tokens."""
    preprocess = MoEAlltoAllTokenDispatcher.preprocess

    def preprocess_balanced(self: Any, routing_map: torch.Tensor) -> Any:
        result = preprocess(self, routing_map)  # with its collectives
        if self.drop_and_pad:
            return result
        multiple = (
            get_align_size_for_quantization(self.config) if self.config.moe_router_padding_for_quantization else 1
        )
        tokens, topk = routing_map.size(0), self.config.moe_router_topk
        counts = tokens_per_expert(tokens, topk, self.num_experts, multiple, self.ep_size)
        local = counts[self.local_expert_indices]
        self.num_out_tokens = int(counts.sum())
        set_expert_rows(self.num_out_tokens)
        if self.ep_size > 1 or self.tp_size > 1:
            self.input_splits = counts.view(self.ep_size, -1).sum(1)
            self.output_splits = local.sum().repeat(self.ep_size)
            self.output_splits_tp = self.ep_size * local.sum().repeat(self.tp_size)
        if self.num_local_experts > 1:
            self.num_global_tokens_per_local_expert = local.expand(self.tp_size * self.ep_size, -1).contiguous()
        return self.tp_size * self.ep_size * local

    MoEAlltoAllTokenDispatcher.preprocess = preprocess_balanced
    token_dispatcher.maybe_move_tensor_to_cpu = _as_host_value


def _as_host_value(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def align_param_groups(trains_experts: bool) -> None:
    """Give optimizers of stages without experts the empty group of experts' parameters that they have beside others.

    Ranks ask each other for the kinds of their parameters, and reduce gradient norms once more for experts.

    trains_experts: whether experts have trained parameters in models that have experts.
    """
    param_groups = core_optimizer._get_param_groups

    def get_aligned_groups(chunks: Any, *arguments: Any) -> Any:
        groups = param_groups(chunks, *arguments)
        has_experts = any(group["is_expert_parallel"] for group in groups)
        if trains_experts and not has_experts and chunks[0].config.num_moe_experts:
            groups.append({**groups[0], "params": [], "is_expert_parallel": True})
        return groups

    core_optimizer._get_param_groups = get_aligned_groups


def set_stage_shape(shape: Sequence[int]) -> None:
    """Set the shape of what pipeline stages send each other, [rows, 1, hidden]."""
    communicate = _communicate_shapes

    def communicate_shapes(self: Any, *arguments: Any) -> tuple[list[int], list[int]]:
        communicate(self, *arguments)
        return list(shape), list(shape)

    P2PCommunicator._communicate_shapes = communicate_shapes


_communicate_shapes = P2PCommunicator._communicate_shapes
