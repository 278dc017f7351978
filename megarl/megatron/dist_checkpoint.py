"""A Megatron model with its optimizer and scheduler, to and from a folder: Megatron's distributed checkpoints.

A save has three parts. `StagedCheckpoint` plans it and takes the tensors, `Staged.write` writes and hashes this rank's files,
`Staged.finish` says what is where. The first and the last are collective; between them, in a thread if one likes, each
rank is on its own.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import pickle
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, SerializationFormat, _write_item
from torch.distributed.checkpoint.planner import WriteItemType

from megarl.checkpoint.manifest import Entry, HashingFile, write_hashed
from megarl.config import ConfigError
from megarl.megatron.optimizer import state_tensors
from megarl.megatron.trainer_model import MegatronModel  # first: it fits Megatron-Core to a machine without GPU
from megarl.parallel import device, ranks
from megarl.parallel.host_copy import StagingBuffer
from megarl.parallel.rank_subset import use_member_world

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing import serialization  # isort: skip
from megatron.core.dist_checkpointing.strategies import common, filesystem_async  # isort: skip

# Its advice is for users of Megatron's own trainer.
logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.ERROR)

Bucket = tuple[str, str, tuple[list[Any], list[Any]]]
"""What goes into a file: its path, its name in the checkpoint, and (item, content) of objects and of tensors."""

WRITERS = 2
"""Threads in which a rank writes when nothing else goes on, each a file."""

_failures: list[Exception] = []
"""What rank 0 could not write between two collectives."""


class StagedCheckpoint:
    """A model's part of a checkpoint: planned, and with `staging` copied, so that the model may go on changing."""

    def __init__(self, model: MegatronModel, folder: Path, staging: StagingBuffer | None = None) -> None:
        self._ranks = model.ranks
        ranks.run_on_all(lambda: folder.mkdir(parents=True, exist_ok=True), lead=True, group=self._ranks.host_group)
        _failures.clear()
        with self._activate_ranks():
            request = dist_checkpointing.save(model.sharded_state_dict(), str(folder), async_sharded_save=True)
        self._finish = request.finalize_fns
        self._buckets: list[Bucket] = []
        if request.async_fn is not None:  # there is something to write on this rank
            _, self._buckets, self._results = request.async_fn_args
            self._transforms = request.async_fn.args[0][0]
        if staging is not None:
            self._copy_tensors(staging)
        self._raise_failures()

    def _copy_tensors(self, staging: StagingBuffer) -> None:
        """Have copies of the tensors instead of themselves, which then are nobody's but the model's."""
        tensors = [tensor for _, _, (_, items) in self._buckets for _, tensor in items]
        copies = iter(staging.copy_to_host(tensors))
        for _, _, (_, items) in self._buckets:
            items[:] = [(item, next(copies)) for item, _ in items]

    def write(self, threads: int = 1, ended: Callable[[], bool] = lambda: False) -> dict[Path, Entry]:
        """Write this rank's files, hashed on the way, and return them: they are on the disk. Not collective; in any
        thread. ended: asked between two tensors whether to leave it. Raises OSError."""
        written: dict[Path, Entry] = {}

        def write_file(bucket: Bucket) -> list[Any]:
            path, key, (objects, tensors) = bucket

            def all_items(stream: HashingFile) -> list[Any]:
                found, kind = [], SerializationFormat.TORCH_SAVE
                for item, data in [*objects, *tensors]:
                    if ended():
                        raise InterruptedError("the run has ended")
                    found.append(_write_item(self._transforms, stream, _compact_on_host(data), item, key, kind))  # type: ignore[arg-type]
                return found

            found, written[Path(path)] = write_hashed(Path(path), all_items)
            return found

        if not self._buckets:
            return {}
        if threads == 1:
            results = list(map(write_file, self._buckets))
        else:
            with ThreadPoolExecutor(threads) as pool:
                results = list(pool.map(write_file, self._buckets))
        self._results.put(dict(enumerate(results)))
        for _, _, items in self._buckets:
            items[1].clear()
        return written

    def finish(self) -> None:
        """Write what the others need to find their parts again. Collective, after all ranks have written. Raises
        OSError on all of them."""
        with self._activate_ranks():
            for finish in self._finish:
                finish()
        self._raise_failures()

    @contextmanager
    def _activate_ranks(self) -> Iterator[None]:
        with ranks.use_layout(self._ranks), use_member_world():
            try:
                yield
            except CheckpointException as error:  # on all ranks
                raise OSError(" ".join(str(error).split())[-300:]) from None

    def _raise_failures(self) -> None:
        def failed() -> None:
            if _failures:
                first = _failures[0]
                raise first if isinstance(first, OSError) else OSError(f"{type(first).__name__}: {first}")

        ranks.run_on_all(failed, group=self._ranks.host_group)


def async_copy_bytes(model: MegatronModel) -> int:
    """What this rank copies of it for an asynchronous save, at most: of weights that data parallel ranks have in common
    one of them writes each."""
    copied = [*model.local_params().values(), *model.local_adapters().values()]
    if model.optimizer is not None:
        copied += [tensor for tensor in state_tensors(model.optimizer) if tensor.dim()]
    return sum(tensor.nbytes for tensor in copied)


def save_model(model: MegatronModel, folder: Path) -> dict[Path, Entry]:
    """Write weights, fp32 masters, optimizer and scheduler. The ranks that the model is on take part, others may be at
    something else; raises OSError on all of them where writing fails on one. Returns the files that this rank has
    written and synced, hashed on the way."""
    staged = StagedCheckpoint(model, folder)
    written: dict[Path, Entry] = {}
    ranks.run_on_all(lambda: written.update(staged.write(threads=WRITERS)), group=model.ranks.host_group)
    staged.finish()
    return written


def restore_model(model: MegatronModel, folder: Path) -> None:
    """Read what `save_model` wrote into a model that was built in the same way, in this layout or another. The
    ranks that the model is on take part. Raises ConfigError where the checkpoint is of another model."""
    with ranks.use_layout(model.ranks):
        try:
            wanted = model.sharded_state_dict(is_loading=True)
            with use_member_world():
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


def _compact_on_host(data: io.BytesIO | torch.Tensor) -> io.BytesIO | torch.Tensor:
    """A tensor on the host that has its memory for itself: torch writes the whole of what is behind one."""
    if not isinstance(data, torch.Tensor):
        return data
    data = data.to(device.host())
    return data if data.untyped_storage().nbytes() == data.nbytes else data.clone()


def _prepare_write_data(self: Any, plan: Any, planner: Any) -> None:
    """Which tensors go into which file. Megatron's own also copies views, one by one, into new memory each time."""
    sorts = filesystem_async._split_by_size_and_type(self.thread_count, plan.items)
    self.write_buckets, self.results_queue = [], queue.Queue()
    for items in filter(None, sorts):
        contents: tuple[list[Any], list[Any]] = [], []
        for item in items:
            content = planner.resolve_data(item)
            contents[item.type != WriteItemType.BYTE_IO].append(
                (item, content.detach() if isinstance(content, torch.Tensor) else content)
            )
        name = f"{plan.storage_data.prefix}{len(self.write_buckets)}{DEFAULT_SUFFIX}"
        self.write_buckets.append((os.path.join(self.checkpoint_dir, name), name, contents))


def _defer_failure(write: Callable[..., Any]) -> Callable[..., Any]:
    """For what rank 0 writes between two collectives: raising there would leave the others waiting in the second."""

    @functools.wraps(write)
    def noted(*arguments: Any, **named: Any) -> Any:
        try:
            return write(*arguments, **named)
        except Exception as error:  # noqa: BLE001  torch makes a RuntimeError of a full disk
            _failures.append(error)
            return None

    return noted


filesystem_async.FileSystemWriterAsync.prepare_write_data = _prepare_write_data
filesystem_async.FileSystemWriterAsync.finish = _defer_failure(filesystem_async.FileSystemWriterAsync.finish)
common.TorchCommonSaveStrategy.save_common = _defer_failure(common.TorchCommonSaveStrategy.save_common)
serialization.save_config = _defer_failure(serialization.save_config)
