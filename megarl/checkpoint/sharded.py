"""A Megatron model with its optimizer and scheduler, to and from a folder: Megatron's distributed checkpoints."""

from __future__ import annotations

import functools
import logging
import pickle
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item

from megarl.checkpoint import plain_pickles as plain_pickles  # what is read is data, and no code
from megarl.checkpoint.manifest import Entry, HashingFile, write_hashed
from megarl.config import ConfigError
from megarl.megatron.model import MegatronModel  # first: it fits Megatron-Core to a machine without GPU
from megarl.parallel import ranks
from megarl.parallel.subset import own_world

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing import serialization  # isort: skip
from megatron.core.dist_checkpointing.strategies import common, filesystem_async  # isort: skip

# Its advice is for users of Megatron's own trainer.
logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.ERROR)

_written: dict[Path, Entry] = {}
_failures: list[Exception] = []
"""What this rank has written since the save began, and what it could not write."""


def save_model(model: MegatronModel, folder: Path) -> dict[Path, Entry]:
    """Write weights, fp32 masters, optimizer and scheduler. The ranks that the model is on take part, others may be at
    something else; raises OSError on all of them where writing fails on one. Returns the files that this rank has
    written and synced, hashed on the way."""
    host = model.ranks.host
    ranks.together(lambda: folder.mkdir(parents=True, exist_ok=True), lead=True, group=host)
    _written.clear()
    _failures.clear()
    with ranks.active(model.ranks):
        state, refused = model.sharded_state_dict(), None
        try:
            with own_world():
                dist_checkpointing.save(state, str(folder))
        except CheckpointException as error:  # on all ranks
            refused = OSError(" ".join(str(error).split())[-300:])

    def failed() -> None:
        if _failures:
            first = _failures[0]
            raise first if isinstance(first, OSError) else OSError(f"{type(first).__name__}: {first}")

    ranks.together(failed, group=host)  # who failed knows best why
    if refused is not None:
        raise refused
    return dict(_written)


def restore_model(model: MegatronModel, folder: Path) -> None:
    """Read what `save_model` wrote into a model that was built in the same way, in this layout or another. The
    ranks that the model is on take part. Raises ConfigError where the checkpoint is of another model."""
    with ranks.active(model.ranks):
        try:
            wanted = model.sharded_state_dict(is_loading=True)
            with own_world():
                state = dist_checkpointing.load(wanted, str(folder))
        except (
            *(CheckpointException, dist_checkpointing.core.CheckpointingException),
            *(pickle.UnpicklingError, KeyError, ValueError),
        ) as error:
            causes = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
            raise ConfigError(
                f"checkpoint {folder} does not fit this model ({' '.join(str(causes[0]).split())[:300]}); "
                "resume with the model's settings of the run that wrote it"
            ) from None
        model.load_state_dict(state)


# --- what Megatron-Core does otherwise -------------------------------------------------------------------------------


def _write_buckets(
    transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]
) -> None:
    """Write this rank's files, each in a thread, hashed as they are written. Megatron's own forks a process for each,
    and waits for ever where one is killed, as for want of memory; it saves so that training can go on meanwhile, and
    here it waits."""

    def write(bucket: Any) -> list[Any]:
        path, key, (objects, tensors) = bucket
        items = [*objects, *tensors]

        def all_items(stream: HashingFile) -> list[Any]:
            kind = SerializationFormat.TORCH_SAVE
            return [_write_item(transforms[0], stream, data, item, key, kind) for item, data in items]  # type: ignore[arg-type]

        found, _written[Path(path)] = write_hashed(Path(path), all_items)
        return found

    try:
        with ThreadPoolExecutor(len(buckets)) as pool:
            results.put(dict(enumerate(pool.map(write, buckets))))
    except Exception as error:  # noqa: BLE001  Megatron raises it on all ranks
        _failures.append(error)
        results.put(RuntimeError(str(error)))


def _not_alone(write: Callable[..., Any]) -> Callable[..., Any]:
    """For what rank 0 writes between two collectives: raising there would leave the others waiting in the second."""

    @functools.wraps(write)
    def noted(*arguments: Any, **named: Any) -> Any:
        try:
            return write(*arguments, **named)
        except Exception as error:  # noqa: BLE001  torch makes a RuntimeError of a full disk
            _failures.append(error)
            return None

    return noted


filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write_buckets)
filesystem_async.FileSystemWriterAsync.finish = _not_alone(filesystem_async.FileSystemWriterAsync.finish)
common.TorchCommonSaveStrategy.save_common = _not_alone(common.TorchCommonSaveStrategy.save_common)
serialization.save_config = _not_alone(serialization.save_config)
# The writers report through a queue. Megatron's default is one of a manager process, which imports the user's script
# anew: a script without `if __name__ == "__main__"` would train in it.
filesystem_async._results_queue = queue.Queue()
