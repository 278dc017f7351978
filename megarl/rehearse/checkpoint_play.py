"""Saving and resuming in a rehearsal: what a rank would write, and the template that it would load into.

The sharded state dicts are the model's own, with their collectives on the device. Megatron's planner, which gathers the
plans of all ranks, is left out: every rank plans for itself, and writes the shards of which it has the main replica.
Nothing is written or read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

from megarl.megatron.trainer_model import MegatronModel
from megarl.parallel import ranks
from megarl.parallel.host_copy import ALIGNMENT


def play_save(models: Iterable[MegatronModel], is_async: bool) -> dict[str, int]:
    """Plan a save of the trained models on this rank, like `StagedCheckpoint`.

    Collective over the ranks of each model. is_async: the tensors are copied first (`run.save_async`).

    Returns `checkpoint`, the bytes that this rank writes, and `snapshot`, the bytes of their copies in host memory.
    """
    written = snapshot = 0
    for model in models:
        with ranks.use_layout(model.ranks), ranks.use_member_world():
            shards = list_written(model.sharded_state_dict())
        written += sum(shard.nbytes for shard in shards)
        if is_async:
            snapshot += sum(-(-shard.nbytes // ALIGNMENT) * ALIGNMENT for shard in shards)
        ranks.run_on_all(lambda: None, group=model.ranks.host_group)  # whether the plan is still valid
    return {"checkpoint": written, "snapshot": snapshot}


def list_written(state: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a sharded state dict that this rank writes, as Megatron's planner assigns them."""
    sharded, _ = save_preprocess(dict(state), validate_access_integrity=False)
    return [
        item.data
        for item in nested_values(sharded)
        if isinstance(item, ShardedTensor) and is_main_replica(item.replica_id) and item.data is not None
    ]


def play_resume(models: Iterable[MegatronModel]) -> dict[str, int]:
    """Build what a checkpoint is loaded into, like `restore_model`. Collective over the ranks of each model.

    Returns `resume`, the bytes that this rank reads, replicas included. They are read into tensors that exist already.
    """
    read = 0
    for model in models:
        with ranks.use_layout(model.ranks):
            template = model.sharded_state_dict(is_loading=True)
        sharded, _ = save_preprocess(template, validate_access_integrity=False)
        tensors = [item for item in nested_values(sharded) if isinstance(item, ShardedTensor)]
        read += sum(item.dtype.itemsize * torch.Size(item.local_shape).numel() for item in tensors)
    return {"resume": read}
