"""Megatron's distributed optimizer and learning-rate schedule, with a step that skips non-finite gradients.

For a distributed checkpoint each rank writes its own share of the optimizer state, and nothing is gathered. A data
parallel rank holds a contiguous range of the flat parameter buffer, so of a parameter it holds a range of elements in
row-major order, which may start anywhere. Checkpoints are read in rectangular boxes of a tensor, in any layout: such a
range is a few boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from megatron.core import optimizer as core_optimizer
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.config import OptimizerConfig
from megarl.models.flat_runs import boxes
from megarl.parallel.rank_subset import use_member_world

STATES = ("param", "exp_avg", "exp_avg_sq")


def local_state_shards(part: Any, model_state: dict[str, Any]) -> list[ShardedTensor]:
    """This rank's masters and moments in one of Megatron's distributed optimizers, as parts of the tensors that
    `sharded_param_state_fully_reshardable` asks for when it loads. Views: they change with the next update.

    model_state: the model's sharded state.
    """
    found, _ = extract_sharded_tensors_and_factories(model_state)
    of_param = {sharded.data: sharded for sharded in nested_values(found)}
    shares: list[ShardedTensor] = []
    for buffer in part.gbuf_ranges:
        for bucket in (bucket for buckets in buffer.values() for bucket in buckets):
            for param, ranges in bucket["param_map"].items():
                values, run = part._get_main_param_and_optimizer_states(param), ranges["param"]
                for state in STATES:
                    flat = values[state].detach().view(-1).float()
                    shares += _shard_flat_range(of_param[param], f"optimizer.state.{state}.", flat, run.start)
    return shares


def _shard_flat_range(sharded: Any, prefix: str, flat: torch.Tensor, start: int) -> Iterator[ShardedTensor]:
    """flat: the elements from `start` on of what `sharded` describes, which Megatron may store as several tensors."""
    whole = torch.empty(sharded.data.shape, dtype=flat.dtype, device="meta")
    if isinstance(sharded, ShardedTensorFactory):
        pieces = list(nested_values(replace(sharded, key=prefix + sharded.key, data=whole).build()))
    else:
        pieces = [replace(sharded, key=prefix + sharded.key, data=whole, dtype=flat.dtype)]
    memory = whole.untyped_storage()._cdata
    for piece in pieces:
        view = piece.data
        if view.untyped_storage()._cdata != memory or not view.is_contiguous():
            raise NotImplementedError(f"{sharded.key} is stored in pieces that are no runs of it")
        at = view.storage_offset()
        first, last = max(start, at), min(start + len(flat), at + view.numel())
        ahead = piece.prepend_axis_num
        # The last number says which of the data parallel ranks, of whom each has other elements here.
        others = piece.replica_id[:-1]
        for offset, sizes in boxes(view.shape, first - at, last - at) if not any(others) else ():
            here = flat[first - start : first - start + prod(sizes)]
            first += prod(sizes)
            local = (1,) * ahead + sizes
            base = piece.global_offset
            yield ShardedTensor(
                key=piece.key,
                data=here.view(local),
                dtype=here.dtype,
                local_shape=local,
                global_shape=piece.global_shape,
                global_offset=(
                    *base[:ahead],
                    *(low + more for low, more in zip(base[ahead:], offset, strict=True)),
                ),
                axis_fragmentations=None,  # no regular grid
            )


_get_param_groups = core_optimizer._get_param_groups


def _model_param_groups(*arguments: Any) -> Any:
    """Megatron asks all ranks of the job which sorts of parameters they have; the others may have no model."""
    with use_member_world():
        return _get_param_groups(*arguments)


core_optimizer._get_param_groups = _model_param_groups


def build_optimizer(config: OptimizerConfig, chunks: Sequence[torch.nn.Module], dtype: torch.dtype) -> Any:
    """AdamW with fp32 master weights and states, sharded over data parallel ranks. Biases and norms do not decay."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.max_grad_norm,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        ),
        list(chunks),
    )
    for _, part in _dist_optimizers(optimizer):
        for buffer in part.buffers:
            # For a checkpoint Megatron drops the padding behind each bucket, and then looks for parameters where they
            # were with it: wrong from the second bucket on, which a tied embedding over two stages makes. Call it no
            # padding. Nothing of it is saved, since parameters are cut out one by one.
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()
    for inner in _torch_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                # torch would do this in its first step, but Megatron's state_dict wants a step count before that.
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                inner.state[parameter] = {"step": torch.tensor(0.0), **zeros}
    return optimizer


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """This rank's masters and moments."""
    for _, part in _dist_optimizers(optimizer):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for values in part.optimizer.state.values():
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def iter_step_holders(optimizer: Any) -> Iterator[dict[str, Any]]:
    """What has a count of AdamW's steps under "step": torch keeps one a parameter, Transformer Engine one a group."""
    for _, part in _dist_optimizers(optimizer):
        for holder in (*part.optimizer.param_groups, *part.optimizer.state.values()):
            if "step" in holder:
                yield holder


def sharded_state(optimizer: Any, model_state: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    """Masters and states for Megatron's distributed checkpoint, loadable in any layout; see `load_state`. To be saved
    it is this rank's own part, as views.

    Settings such as betas are not among them, because they are the configuration's, nor is the step count, because the
    scheduler has it. Megatron's own version of this fails where a pipeline stage has no experts, and where a rank's
    share has no parameter, keeps of the settings those of rank 0, and gathers all on the first data parallel rank.
    """
    if not is_loading:
        return {name: local_state_shards(part, model_state) for name, part in _dist_optimizers(optimizer)}
    return {
        name: part.sharded_param_state_fully_reshardable(model_state, True, {})
        for name, part in _dist_optimizers(optimizer)
    }


def load_state(optimizer: Any, state: dict[str, Any], steps: int) -> None:
    """Take what was loaded for `sharded_state`; `steps` is the number of updates made until then."""
    for name, part in _dist_optimizers(optimizer):
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "step": steps}
            for group in part.optimizer.param_groups
        ]
        found = {"param_state": state[name], "param_state_sharding_type": "fully_reshardable"}
        part.load_state_dict({"optimizer": {"param_groups": groups}, **found})
    for inner in _torch_optimizers(optimizer):
        for values in inner.state.values():
            # Megatron gives all parameters one tensor, which AdamW would then increment once for each of them.
            values["step"] = values["step"].clone()


def _dist_optimizers(optimizer: Any) -> list[tuple[str, Any]]:
    """Megatron has one optimizer for dense parameters and one for experts; a rank may have none of the latter, and
    where no parameter of a kind is trained (LoRA), its optimizer is a stub."""
    parts = enumerate(optimizer.chained_optimizers)
    return [(f"part{i}", part) for i, part in parts if not part.is_stub_optimizer and part.buffers]


def _torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The AdamW inside Megatron's wrappers where that is torch's; with Transformer Engine it is not."""
    inner = [part.optimizer for _, part in _dist_optimizers(optimizer)]
    return [one for one in inner if isinstance(one, torch.optim.AdamW)]


def build_scheduler(config: OptimizerConfig, optimizer: Any, total_updates: int) -> OptimizerParamScheduler:
    """Linear warm-up over `warmup_fraction` of all updates, then the decay.

    `take_step` advances it before the update, so that update k of 1..n has the rate of point k on a line that ends at
    n + 1: neither the first update nor the last has a rate of zero.
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
    """Set the schedule to where it is after so many updates. It is the configuration's, whichever a checkpoint was
    written under: Megatron's own `load_state_dict` would go on with the peak, the length and the end of the old one."""
    scheduler.num_steps = updates
    scheduler.step(0)


def take_step(optimizer: Any, scheduler: OptimizerParamScheduler) -> tuple[float, bool]:
    """One update from the finished gradients. Returns the gradient's norm before clipping, and whether it was taken.

    Megatron looks for non-finite gradients only where it scales the loss (fp16). Here a non-finite norm, which is the
    same on all ranks because it is reduced over all of them, leaves weights, states and schedule as they are.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm() or 0.0)
    if not math.isfinite(norm):
        return norm, False
    scheduler.step(1)
    optimizer.step()
    return norm, True


def has_finite_weights(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether all weights that are trained here are."""
    trained = [param.detach() for chunk in chunks for param in chunk.parameters() if param.requires_grad]
    return bool(torch.isfinite(torch.nn.utils.get_total_norm(trained, math.inf)))
