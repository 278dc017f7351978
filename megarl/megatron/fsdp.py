"""Megatron-FSDP: weights, gradients and optimizer states sharded over data parallel ranks (ZeRO-3).

Each rank keeps a range of the rows of every parameter. A layer's weights are gathered for its forward and its backward
pass and then dropped, and its gradients are reduced and scattered in the backward pass. What is outside of layers
(embedding, final norm, output layer, vision tower) is gathered for a whole pass, but for adapters, each of which is
gathered for its own. Between passes nothing is gathered: a parameter has its whole shape, but no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import (
    FullyShardedDataParallel,
    MambaLayer,
    MoETransformerLayer,
    TransformerLayer,
)
from megatron.core.distributed.fsdp.src.megatron_fsdp import FSDPDistributedIndex, param_and_grad_buffer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.device_mesh import DeviceMesh

from megarl.parallel import device


class ShardedModel(FullyShardedDataParallel):  # type: ignore[misc]
    """A model chunk in Megatron's FullyShardedDataParallel, on some ranks of the job.

    Megatron's mesh has all ranks of the job, and no pipeline stages; this one has those of the chunk's stage.

    settings: of the model, whose `params_dtype` decides whether there are fp32 masters beside the weights.
    ddp: of `fsdp_config`.
    chunk: the model with arbitrary weights.
    units: classes of modules outside of its layers that are gathered for their own passes, too, and do not fetch ahead:
        Megatron fetches in the order of parameters, in which these come after all layers, and a backward pass would so
        fetch layers that it has passed.
    """

    def __init__(
        self,
        settings: TransformerConfig,
        ddp: DistributedDataParallelConfig,
        chunk: torch.nn.Module,
        units: Sequence[type[torch.nn.Module]] = (),
    ) -> None:
        classes = [TransformerLayer, MoETransformerLayer, MambaLayer, *units]
        modules = [module for module in chunk.modules() if isinstance(module, tuple(units))]
        alone = {param for module in modules for param in module.parameters()}
        with _unchecked_dtensors():
            super().__init__(settings, ddp, chunk, device=device.device(), fsdp_unit_modules=classes)
        gather = self.module.all_gather_and_wait_parameters_ready

        def gather_ahead(params: list[torch.nn.Parameter], prefetch: bool = True, **options: Any) -> None:
            gather(params, prefetch=prefetch and alone.isdisjoint(params), **options)

        self.module.all_gather_and_wait_parameters_ready = gather_ahead
        for module in self.module.modules():
            # Megatron's last hook swaps in the optimizer's DTensors, which no state dict of ours has.
            module._state_dict_pre_hooks.popitem()

    def _init_dist_index(self, pg_collection: None) -> FSDPDistributedIndex:
        """Return Megatron's index of process groups. It calls this on construction."""
        data = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        experts = None
        if self.num_moe_experts is not None:
            expert_data = parallel_state.get_expert_data_parallel_group()
            experts = _make_mesh(expert_data, parallel_state.get_expert_tensor_parallel_group())
        return FSDPDistributedIndex(
            device_mesh=_make_mesh(data, self.tp_group), dp_shard_dim="dp_cp", tp_dim="tp", expt_device_mesh=experts
        )

    def forward(self, *inputs: Any, **arguments: Any) -> Any:
        """Run the model, after gathering what is outside of its layers on all ranks alike.

        Log-probs use the output layer's weight without calling its module, and a vision tower runs only where there are
        images.
        """
        outside = [param for group in self._groups if group.fsdp_unit_id is None for param in group.params]
        self.module.all_gather_and_wait_parameters_ready(outside, prefetch=False)
        return super().forward(*inputs, **arguments)

    @property
    def _groups(self) -> list[Any]:
        groups: list[Any] = self.param_and_grad_buffer.parameter_groups
        return groups

    def gather(self) -> None:
        """Gather all parameters over the data parallel ranks, to which this is collective, until `release`."""
        self.module.start_param_sync(force_sync=True)
        self.module._replace_param_with_raw_if_needed()

    def release(self) -> None:
        """Free all gathered parameters. The module's parameters are then the whole ones, without memory.

        Call it after every pass, and after writing into `weight_buffers`: the next pass gathers everything again.
        """
        self.module.all_gather_pipeline.reset(preserve_non_fsdp_units=False)
        self.module._replace_param_with_raw_if_needed()

    def owns(self, param: torch.Tensor) -> bool:
        """Return whether `param` is a parameter of this chunk; buffers such as an expert bias are not sharded."""
        return param in self.param_and_grad_buffer.param_to_param_group

    def shard(self, param: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return this rank's weights of a parameter, flat and in place, and the number of the first of them."""
        buffer, item = self._locate(param).model_weight_buffer, self._item(param)
        return buffer.get_item(item, only_shard=True), buffer._get_item_slice_in_shard(item)[0]

    def set_param(self, param: torch.Tensor, value: torch.Tensor) -> None:
        """Set this rank's part of a parameter, and of its fp32 master, from the whole value."""
        group, item, rounded = self._locate(param), self._item(param), value.to(self.device, param.dtype)
        for buffer in (group.model_weight_buffer, group.main_weight_buffer):
            if buffer is not None:
                buffer.set_item(item, rounded)

    def weight_buffers(self) -> list[torch.Tensor]:
        """Return this rank's weights, one flat tensor per bucket. In fp32 they are the masters, too."""
        return [group.model_weight_buffer.data for group in self._groups]

    def grad_buffers(self) -> list[torch.Tensor]:
        """Return this rank's gradients, one flat tensor per trained bucket."""
        return [group.main_grad_buffer.data for group in self._groups if group.main_grad_buffer is not None]

    def masters(self) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter, int]]:
        """Iterate over (whole parameter, the optimizer's DTensor of this rank's rows, number of its first element)."""
        for _, master in self.param_and_grad_buffer.optimizer_named_parameters:
            if master.requires_grad:
                yield master.orig_param, master, master.megatron_fsdp_slice.start

    def begin_backward_with(self, outputs: Sequence[torch.Tensor]) -> None:
        """Prepare the backward pass as soon as one of `outputs` has a gradient.

        For tensors computed outside of the model from its output and its parameters, as log-probs are from the weight
        of the output layer. Megatron prepares it only when the model's output has a gradient, after that weight's was
        handled, which it then takes for missing.
        """

        def begin(gradient: torch.Tensor) -> None:
            if not self.module._root_pre_backward_hook_issued:
                self.module.pre_backward()
                torch.autograd.Variable._execution_engine.queue_callback(self.module.post_backward)

        outputs = [output for output in outputs if output.requires_grad]
        if outputs:
            torch.autograd.graph.register_multi_grad_hook(outputs, begin, mode="any")

    def _locate(self, param: torch.Tensor) -> Any:
        return self._groups[self.param_and_grad_buffer.param_to_param_group[param]]

    def _item(self, param: torch.Tensor) -> int:
        return int(self._locate(param).model_weight_buffer.param_idx[param])


@contextmanager
def _unchecked_dtensors() -> Iterator[None]:
    """Keep Megatron from checking new DTensors within the block: torch's check is collective over all ranks of the job,
    of which some have no model or another stage."""
    make = param_and_grad_buffer.make_fsdp_dtensor
    param_and_grad_buffer.make_fsdp_dtensor = lambda **arguments: make(**{**arguments, "run_check": False})
    try:
        yield
    finally:
        param_and_grad_buffer.make_fsdp_dtensor = make


def _make_mesh(data: dist.ProcessGroup, tensor: dist.ProcessGroup) -> DeviceMesh:
    """Return the mesh of data parallel by tensor parallel ranks. Collective over the ranks of `data`."""
    local = torch.tensor(dist.get_process_group_ranks(tensor), device=device.device())
    rows = [torch.empty_like(local) for _ in range(data.size())]
    dist.all_gather(rows, local, group=data)
    mesh = torch.stack(rows).tolist()
    return DeviceMesh.from_group(
        [data, tensor], device_type=device.device().type, mesh=mesh, mesh_dim_names=("dp_cp", "tp")
    )


def fsdp_config(options: dict[str, Any], dtype: torch.dtype) -> DistributedDataParallelConfig:
    """Return Megatron's configuration. options: of `train.ddp`. dtype: of the weights."""
    return DistributedDataParallelConfig(
        **options,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        fsdp_all_gather_in_start_param_sync=False,  # a step would leave the first layer gathered
        megatron_fsdp_main_params_dtype=None if dtype == torch.float32 else torch.float32,
        megatron_fsdp_main_grads_dtype=torch.float32,
        megatron_fsdp_grad_comm_dtype=torch.float32,
    )


def sharded_chunks(chunks: Sequence[torch.nn.Module]) -> list[ShardedModel]:
    """Return the chunks with FSDP: all of a trained model, or none."""
    return [chunk for chunk in chunks if isinstance(chunk, ShardedModel)]


def release(chunks: Sequence[torch.nn.Module]) -> None:
    """Free the gathered parameters of chunks with FSDP."""
    for chunk in sharded_chunks(chunks):
        chunk.release()


@contextmanager
def gathered(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Gather the parameters of chunks with FSDP within the block, which is collective over data parallel ranks."""
    with ExitStack() as stack:
        for chunk in sharded_chunks(chunks):
            chunk.gather()
            stack.callback(chunk.release)
        yield


def stored_rows(chunks: Sequence[torch.nn.Module], param: torch.Tensor) -> torch.Tensor:
    """Return what this rank stores of a parameter or buffer, in place: all of it, or with FSDP its rows."""
    for chunk in sharded_chunks(chunks):
        if chunk.owns(param):
            return chunk.shard(param)[0].view(-1, *param.shape[1:])
    return param.detach()


@torch.no_grad()
def set_param(chunks: Sequence[torch.nn.Module], param: torch.Tensor, value: torch.Tensor) -> None:
    """Set what this rank stores of a parameter or buffer from the whole value, with FSDP its fp32 master, too."""
    for chunk in sharded_chunks(chunks):
        if chunk.owns(param):
            chunk.set_param(param, value)
            return
    param.copy_(value)


def weight_tensors(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the memory of this rank's weights: parameters, or with FSDP its shards of them."""
    if sharded := sharded_chunks(chunks):
        return [buffer for chunk in sharded for buffer in chunk.weight_buffers()]
    return [param for chunk in chunks for param in chunk.parameters()]


def grad_tensors(chunks: Sequence[Any]) -> list[torch.Tensor]:
    """Return the memory of this rank's gradients."""
    if sharded := sharded_chunks(chunks):
        return [buffer for chunk in sharded for buffer in chunk.grad_buffers()]
    return [buffer.grad_data for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def trained_weights(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Return what this rank stores of the trained parameters."""
    params = (param for chunk in chunks for param in chunk.parameters() if param.requires_grad)
    return [stored_rows(chunks, param) for param in params]
