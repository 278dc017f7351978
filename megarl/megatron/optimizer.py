"""Megatron's distributed optimizers and learning-rate schedule, with a step that skips non-finite gradients.

For a distributed checkpoint each rank writes its own shard of the optimizer state, and nothing is gathered. A data
parallel rank holds a contiguous range of the flat parameter buffer, so it holds a row-major range of a parameter's
elements, which may start anywhere. Checkpoints are read as rectangular chunks of tensors, in any layout. Such a range
is a few chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from typing import Any

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import HAVE_EMERGING_OPTIMIZERS, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.tensor import DTensor

from megarl.config import ConfigError, OptimizerConfig
from megarl.megatron import fsdp
from megarl.megatron.host_optimizer import HostAdamW
from megarl.megatron.layer_wise import LayerWiseOptimizer
from megarl.megatron.parameter_names import unwrap
from megarl.models.layout_algebra import range_chunks
from megarl.parallel.ranks import use_member_world
from megarl.types.adam_settings import AdamSettings


def local_state_shards(part: Any, model_state: dict[str, Any], is_loading: bool = False) -> list[ShardedTensor]:
    """Return this rank's masters and moments in one of Megatron's optimizers as sharded tensors.

    The data are views, which a load fills in place, and the next update changes.

    model_state: the model's sharded state dict.
    is_loading: include those that a save leaves to another rank, which has the same elements.
    """
    sharded_by_param = _sharded_by_param(model_state)
    return [
        shard
        for param, start, states in _iter_states(part)
        for name, flat in states.items()
        for shard in _shard_flat_range(sharded_by_param[param], f"optimizer.state.{name}.", flat, start, is_loading)
    ]


def _iter_states(part: Any) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, torch.Tensor]]]:
    """Iterate over (parameter, number of this rank's first element, flat master and moments of these in place)."""
    if isinstance(part, LayerWiseOptimizer):
        for param, states in part.states():
            yield param, 0, {name: value.view(-1) for name, value in states.items()}
    elif part.ddp_config.use_megatron_fsdp:
        for chunk in part.model_chunks:
            for param, master, start in chunk.masters():
                yield param, start, _flat_states({"param": master, **part.optimizer.state[master]})
    else:
        for buffer in part.gbuf_ranges:
            for bucket in (bucket for buckets in buffer.values() for bucket in buckets):
                for param, ranges in bucket["param_map"].items():
                    states = part._get_main_param_and_optimizer_states(param)
                    yield param, ranges["param"].start, _flat_states(states)


def _flat_states(states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _local(states[name]).detach().view(-1) for name in ("param", "exp_avg", "exp_avg_sq")}


def shard_weights(chunk: fsdp.ShardedModel, model_state: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    """Return a chunk's sharded state dict with this rank's rows of each parameter, as `load_weights` takes them.

    In the checkpoint, the parameters are as without FSDP.
    """
    state = {}
    for name, sharded in model_state.items():
        if isinstance(sharded, ShardedTensor | ShardedTensorFactory) and chunk.owns(sharded.data):
            pieces = _shard_flat_range(sharded, "", *chunk.shard(sharded.data), with_replicas=is_loading)
            sharded = _numbered(pieces)
        if sharded != {}:  # Megatron would save an empty dict with what all ranks have
            state[name] = sharded
    return state


@torch.no_grad()
def load_weights(chunk: fsdp.ShardedModel, model_state: dict[str, Any], strict: bool = True) -> None:
    """Load what was read for `shard_weights`. `load_state` sets the fp32 masters.

    strict: every parameter must be in it; a reference with LoRA has adapters alone.
    """
    model = unwrap(chunk)
    for name, param in model.named_parameters():
        if strict or name in model_state:
            _fill(chunk.shard(param)[0], model_state.pop(name, {}))  # a rank may have no row of it
    model.load_state_dict(model_state, strict=False)  # buffers


def _numbered(pieces: Iterable[ShardedTensor]) -> dict[str, ShardedTensor]:
    """Return the pieces by number: Megatron merges dicts of what ranks have, but no lists of different lengths."""
    return {str(number): piece for number, piece in enumerate(pieces)}


def _fill(flat: torch.Tensor, pieces: Mapping[str, torch.Tensor]) -> None:
    """Copy the tensors that were read for a `_shard_flat_range`, by number, to `flat`."""
    if len(flat):
        flat.copy_(torch.cat([pieces[str(number)].flatten() for number in range(len(pieces))]))


def _sharded_by_param(model_state: dict[str, Any]) -> dict[torch.Tensor, Any]:
    """Return the model's sharded tensors, and factories of them, by parameter."""
    sharded_tensors, _ = extract_sharded_tensors_and_factories(model_state)
    return {sharded.data: sharded for sharded in nested_values(sharded_tensors)}


def _shard_flat_range(
    sharded: Any, prefix: str, flat: torch.Tensor, start: int, with_replicas: bool = False
) -> Iterator[ShardedTensor]:
    """Split `flat`, a parameter's elements from `start` on, into sharded tensors, one per rectangular box.

    with_replicas: also for a tensor parallel rank whose elements another one writes.
    """
    meta_tensor = torch.empty(sharded.data.shape, dtype=flat.dtype, device="meta")
    if isinstance(sharded, ShardedTensorFactory):
        pieces = list(nested_values(replace(sharded, key=prefix + sharded.key, data=meta_tensor).build()))
    else:
        pieces = [replace(sharded, key=prefix + sharded.key, data=meta_tensor, dtype=flat.dtype)]
    memory = meta_tensor.untyped_storage()._cdata
    for piece in pieces:
        view = piece.data
        if view.untyped_storage()._cdata != memory or not view.is_contiguous():
            raise NotImplementedError(f"{sharded.key} is stored in pieces that are not contiguous")
        piece_start = view.storage_offset()
        position, stop = max(start, piece_start), min(start + len(flat), piece_start + view.numel())
        prepended_axes = piece.prepend_axis_num
        # The last entry is the data parallel rank. It makes no replicas, since each holds other elements.
        is_replica = not with_replicas and any(piece.replica_id[:-1])
        for offset, sizes in () if is_replica else range_chunks(view.shape, position - piece_start, stop - piece_start):
            chunk = flat[position - start : position - start + prod(sizes)]
            position += prod(sizes)
            local_shape = (1,) * prepended_axes + sizes
            starts = zip(piece.global_offset[prepended_axes:], offset, strict=True)
            yield ShardedTensor(
                key=piece.key,
                data=chunk.view(local_shape),
                dtype=chunk.dtype,
                local_shape=local_shape,
                allow_shape_mismatch=piece.allow_shape_mismatch,  # of a vocabulary, which is padded for each tp
                global_shape=piece.global_shape,
                global_offset=(*piece.global_offset[:prepended_axes], *(first + skipped for first, skipped in starts)),
                axis_fragmentations=None,  # no regular grid
            )


_get_param_groups = core_optimizer._get_param_groups


def _model_param_groups(*arguments: Any) -> Any:
    """Restrict Megatron's gather of parameter groups to the model's ranks; other ranks of the job may have no model."""
    with use_member_world():
        return _get_param_groups(*arguments)


core_optimizer._get_param_groups = _model_param_groups


def build_optimizer(config: OptimizerConfig, chunks: Sequence[torch.nn.Module], dtype: torch.dtype) -> Any:
    """Build AdamW with fp32 masters and states, sharded over data parallel ranks. Biases and norms do not decay.

    With `offload_fraction` above 0, the distributed optimizers' own optimizers are `HostAdamW`. With the type `muon`,
    matrices have a `LayerWiseOptimizer` instead; `layer_wise.lay_out` must have laid out the buffers of `chunks`.
    """
    is_offloaded, is_muon = config.offload_fraction > 0, config.type == "muon"
    if is_muon and not HAVE_EMERGING_OPTIMIZERS:
        raise ConfigError(
            "optimizer type muon: the package emerging-optimizers is not installed; run launch/install.sh"
        )
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer=config.type,
            use_layer_wise_distributed_optimizer=is_muon,
            **{f"muon_{name}": value for name, value in asdict(config.muon).items()},
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.max_grad_norm,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=not is_muon,  # which would hold for matrices, too
            use_precision_aware_optimizer=is_offloaded,  # without it, masters would be on the device in addition
            optimizer_cpu_offload=is_offloaded,
            optimizer_offload_fraction=config.offload_fraction,
            overlap_cpu_optimizer_d2h_h2d=is_offloaded,
        ),
        list(chunks),
    )
    if type(optimizer) is not ChainedOptimizer:  # Muon's if there is nothing but matrices, or FSDP's only one
        optimizer = ChainedOptimizer([optimizer])
    for _, part in _dist_optimizers(optimizer):
        for buffer in () if part.ddp_config.use_megatron_fsdp else part.buffers:
            # On saving, Megatron drops the padding behind each bucket but still indexes parameters with it. That is
            # wrong from the second bucket on, and an embedding tied across two stages creates a second bucket. So
            # count the padding as data. None of it is saved, since parameters are cut out one by one.
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()
    for _, part in _dist_optimizers(optimizer):
        for group in part.optimizer.param_groups if isinstance(part.optimizer, torch.optim.AdamW) else ():
            for parameter in group["params"]:
                # torch does this in its first step, but Megatron's state_dict needs a step count before that.
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                part.optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
    return optimizer


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Iterate over this rank's masters and moments."""
    for inner in _inner_optimizers(optimizer):
        yield from _masters_and_moments(inner)


def device_state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Iterate over those masters and moments of this rank that are on the device."""
    for inner in _inner_optimizers(optimizer, on_host=False):
        yield from _masters_and_moments(inner)


def _masters_and_moments(inner: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in inner.param_groups:
        yield from map(_local, group["params"])
    for values in inner.state.values():  # "master_param" repeats a parameter of the groups
        yield from (
            _local(value) for name, value in values.items() if name != "master_param" and torch.is_tensor(value)
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, as Megatron-FSDP's masters and moments are, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # `to_local` makes a new view each time


def reload_masters(optimizer: Any) -> None:
    """Set fp32 masters to the weights. Those of FSDP are set with the weights."""
    if not any(part.ddp_config.use_megatron_fsdp for _, part in _dist_optimizers(optimizer)):
        optimizer.reload_model_params()


def create_states(optimizer: Any) -> None:
    """Create this rank's moments, which Transformer Engine's optimizer does not have before its first step."""
    for _, part in _dist_optimizers(optimizer):
        if not part.optimizer.state:
            part._init_optimizer_states_with_dummy_values()


def iter_step_holders(optimizer: Any) -> Iterator[dict[str, Any]]:
    """Iterate over the dicts with AdamW's step count under "step": per parameter in torch, per group in TE."""
    for inner in _inner_optimizers(optimizer):
        for holder in (*inner.param_groups, *inner.state.values()):
            if "step" in holder:
                yield holder


def sharded_state(optimizer: Any, model_state: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    """Return masters and moments for Megatron's distributed checkpoint, which may be loaded in any layout.

    A load fills them in place, so that it needs no memory for a second copy; `set_step_count` is to follow. The
    configuration owns settings such as betas, and the scheduler has the step count. Megatron's own version fails if a
    pipeline stage has no experts or a rank's shard has no parameters, gathers everything on the first data parallel
    rank, and loads whole parameters into new host memory on each of them.
    """
    parts = {**dict(_dist_optimizers(optimizer)), **_layer_wise_optimizers(optimizer)}
    if not is_loading:
        return {name: local_state_shards(part, model_state) for name, part in parts.items()}
    for _, part in _dist_optimizers(optimizer):
        if not part.ddp_config.use_megatron_fsdp and not part.optimizer.state:
            _allocate_states(part)
    return {name: _numbered(local_state_shards(part, model_state, is_loading=True)) for name, part in parts.items()}


def _allocate_states(part: Any) -> None:
    """Allocate moments in Transformer Engine's optimizer, which has none before its first step."""
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "step": 0}
        for group in part.optimizer.param_groups
    ]
    part.load_state_dict({"optimizer": {"param_groups": groups}})


def set_step_count(optimizer: Any, steps: int) -> None:
    """Set AdamW's number of updates: per parameter in torch, per group in Transformer Engine."""
    for inner in _inner_adams(optimizer):
        states = (values for master, values in inner.state.items() if _local(master).numel())  # torch skips empty ones
        for holder in (*inner.param_groups, *states):
            if isinstance(holder.get("step"), torch.Tensor):
                holder["step"].fill_(steps)
            elif "step" in holder:
                holder["step"] = steps


def _dist_optimizers(optimizer: Any) -> list[tuple[str, Any]]:
    """Return the distributed optimizers of dense parameters and of experts, those that have parameters, by name."""
    parts = [part for part in optimizer.chained_optimizers if not isinstance(part, LayerWiseOptimizer)]
    return [
        (f"part{i}", part)
        for i, part in enumerate(parts)
        if not part.is_stub_optimizer and (part.ddp_config.use_megatron_fsdp or part.buffers)
    ]


def _layer_wise_optimizers(optimizer: Any) -> dict[str, LayerWiseOptimizer]:
    """Return the layer-wise optimizer of matrices by name; empty with AdamW alone."""
    parts = (part for part in optimizer.chained_optimizers if isinstance(part, LayerWiseOptimizer))
    return dict(zip(["muon"], parts, strict=False))


def _inner_optimizers(optimizer: Any, on_host: bool = True) -> list[torch.optim.Optimizer]:
    """Return the optimizers inside Megatron's wrappers, with those on the host or without."""
    layer_wise = _layer_wise_optimizers(optimizer).values()
    return [
        *(part.optimizer for parts in layer_wise for part in parts.chained_optimizers),
        *_inner_adams(optimizer, on_host),
    ]


def _inner_adams(optimizer: Any, on_host: bool = True) -> list[torch.optim.Optimizer]:
    """Return those of `_inner_optimizers` that are AdamW."""
    inner = list[torch.optim.Optimizer]()
    for _, part in _dist_optimizers(optimizer):
        if not isinstance(part.optimizer, HostAdamW):
            inner.append(part.optimizer)
        elif on_host:
            inner += part.optimizer.sub_optimizers
        elif part.optimizer.gpu_optimizer is not None:
            inner.append(part.optimizer.gpu_optimizer)
    return inner


def build_scheduler(config: OptimizerConfig, optimizer: Any, total_updates: int) -> OptimizerParamScheduler:
    """Build a schedule with linear warm-up over `warmup_fraction` of all updates, then decay.

    `take_step` advances it before the update, so update k of 1..n uses point k of a schedule that ends at n + 1.
    Neither the first nor the last update has a learning rate of zero.
    """
    total = max(1, total_updates)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=min(total, round(config.warmup_fraction * total)),
        lr_decay_steps=total + 1,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def set_schedule_step(scheduler: OptimizerParamScheduler, updates: int) -> None:
    """Set the schedule to its state after `updates` updates.

    Peak, length and end stay those of the current configuration. Megatron's own `load_state_dict` would restore those
    of the checkpoint.
    """
    scheduler.num_steps = updates
    scheduler.step(0)


def set_peak_lr(scheduler: OptimizerParamScheduler, lr: float) -> None:
    """Set the schedule's peak; its position and its shape stay."""
    scheduler.max_lr = lr
    for group in scheduler.optimizer.param_groups:
        group["max_lr"] = lr
    scheduler.step(0)


def apply_settings(optimizer: Any, adam: AdamSettings) -> None:
    """Use these settings in the next update. Biases and norms do not decay."""
    for part in optimizer.chained_optimizers:
        part.config.clip_grad = adam.max_grad_norm
    for inner in _inner_adams(optimizer):
        for group in inner.param_groups:
            group["lr"], group["betas"], group["eps"] = adam.lr, (adam.beta1, adam.beta2), adam.eps
            group["weight_decay"] = adam.weight_decay * group.get("wd_mult", 1.0)


@torch.no_grad()
def reset_moments(optimizer: Any) -> None:
    """Set this rank's moments to zero."""
    for inner in _inner_optimizers(optimizer):
        for values in inner.state.values():
            for name, value in values.items():
                if name != "master_param" and torch.is_tensor(value):
                    _local(value).zero_()


def take_step(
    optimizer: Any, scheduler: OptimizerParamScheduler, adam: AdamSettings | None = None
) -> tuple[float, bool]:
    """Take one update from reduced gradients. Return the gradient norm before clipping and whether it was taken.

    adam: settings of this update, instead of those of the configuration and the schedule.

    A non-finite norm leaves weights, states and schedule unchanged. The norm is equal on all ranks, being reduced over
    all of them. Megatron itself checks for non-finite gradients only with loss scaling (fp16).
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm() or 0.0)
    if not math.isfinite(norm):
        return norm, False
    scheduler.step(1)
    if adam is not None:
        apply_settings(optimizer, adam)
    optimizer.step()
    return norm, True


def has_finite_weights(chunks: Sequence[torch.nn.Module]) -> bool:
    """Return whether all trained weights on this rank are finite."""
    trained = [tensor.detach() for tensor in fsdp.trained_weights(chunks) if tensor.numel()]
    return bool(torch.isfinite(torch.nn.utils.get_total_norm(trained, math.inf)))
