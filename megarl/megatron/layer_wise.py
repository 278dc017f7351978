"""Muon by Megatron's layer-wise distributed optimizer: each matrix is updated, whole, by one data parallel rank.

Gradients are reduce-scattered and weights gathered as with AdamW, by buffers that are laid out so that no matrix
crosses the border between two ranks' shards. A rank has fp32 masters and momentum of its matrices alone. Other
parameters are in buffers of their own, with Megatron's distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer, tag_params_for_buffer_routing
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer


class LayerWiseOptimizer(LayerWiseDistributedOptimizer):  # type: ignore[misc]
    """LayerWiseDistributedOptimizer for models of any dtype, on some ranks of the job.

    Differences from Megatron-Core 0.19.2, whose class

    - wraps Muon for bf16 models alone: with an fp32 model its methods lack an optimizer of Megatron's,
    - lets all ranks update all experts if one rank has all dense gradients, whatever the ranks that share the experts',
    - sums gradient norms over all ranks of the job, of which some have no model,
    - creates momentum in the first step.
    """

    def __init__(self, optimizers: list[Any], config: Any, *args: Any, **kwargs: Any) -> None:
        self._megatron_config = config
        super().__init__(optimizers, config, *args, **kwargs)
        for part in self.chained_optimizers:
            part.grad_stats_parallel_group = parallel_state.get_intra_distributed_optimizer_instance_group()
            for group in part.optimizer.param_groups:
                part.optimizer._init_group(group, skip_non_grad_params=False)

    def shard_params(self, optimizers: list[Any], full_param_layouts: Any = None) -> None:
        """Keep this rank's matrices in each of Muon's optimizers, and wrap these for an fp32 model."""
        self._shard_params_from_layout(optimizers, full_param_layouts, self.dp_cp.size(), self.expt_dp.size())
        self.params = [param for part in optimizers for group in part.param_groups for param in group["params"]]
        if not self._megatron_config.bf16:
            optimizers[:] = [FP32Optimizer(part, self._megatron_config, None) for part in optimizers]

    # These reduce over the group that each optimizer has for it.
    get_grad_norm = ChainedOptimizer.get_grad_norm
    has_grad_norm_group = ChainedOptimizer.has_grad_norm_group
    _get_grad_norm_for_group = ChainedOptimizer._get_grad_norm_for_group

    def states(self) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
        """Iterate over this rank's matrices with their fp32 master and momentum, by the names of a checkpoint."""
        momentum = {param: state for part in self.chained_optimizers for param, state in part.optimizer.state.items()}
        for param in self.params:
            master = getattr(param, "main_param", param)
            yield param, {"param": master.detach(), "momentum_buffer": momentum[master]["momentum_buffer"]}


core_optimizer.LayerWiseDistributedOptimizer = LayerWiseOptimizer


def lay_out(chunks: Sequence[torch.nn.Module], ddp: DistributedDataParallelConfig) -> list[Any]:
    """Choose the parameters that Muon updates and return the layout of each chunk's buffers.

    As Megatron does, all matrices but those of embeddings and output layers. Call it before `DistributedDataParallel`.
    """
    dp = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    bucket_size = (ddp.bucket_size or max(40_000_000, 1_000_000 * dp)) if ddp.overlap_grad_reduce and is_first else None
    for module in (module for chunk in chunks for module in chunk.modules() if isinstance(module, torch.nn.Embedding)):
        module.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]  # of a vision tower; Megatron marks its own
    tag_params_for_buffer_routing(chunks)
    return [
        LayerWiseDistributedOptimizer.compute_full_param_layout(
            [param for param in chunk.parameters() if param.requires_grad],
            bucket_size,
            dp,
            ddp,
            parallel_state.get_expert_data_parallel_world_size(),
        )
        for chunk in chunks
    ]
