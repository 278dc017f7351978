"""Save and load a Megatron model with its optimizer and scheduler, as a Megatron distributed checkpoint."""

from __future__ import annotations

import functools
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
from megarl.megatron.trainer_model import MegatronModel  # first: it patches Megatron-Core for machines without a GPU
from megarl.parallel import ranks
from megarl.parallel.host_copy import StagingBuffer

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing import serialization  # isort: skip
from megatron.core.dist_checkpointing.strategies import filesystem_async  # isort: skip
from megatron.core.dist_checkpointing.strategies import torch as strategies  # isort: skip

# Its warnings are advice for users of Megatron's own trainer.
logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.ERROR)

Bucket = tuple[str, str, tuple[list[Any], list[Any]]]
"""A file to write: its path, its name in the checkpoint, and the (item, content) pairs of objects and of tensors."""

WRITERS = 2
"""Writer threads per rank in a synchronous save, one file each."""

_failures: list[Exception] = []
"""Write errors of rank 0 between two collectives, to be raised after the second."""


class StagedCheckpoint:
    """A planned save of a model; `write` writes this rank's files and `finish` the metadata.

    Planning and finishing are collective. With `staging`, tensors are copied, so that training may continue meanwhile.
    is_reference: save only the weights of `MegatronModel.sharded_reference`.
    """

    def __init__(
        self, model: MegatronModel, folder: Path, staging: StagingBuffer | None = None, is_reference: bool = False
    ) -> None:
        self._ranks = model.ranks
        ranks.run_on_all(
            lambda: folder.mkdir(parents=True, exist_ok=True), rank_zero_only=True, group=self._ranks.host_group
        )
        _failures.clear()
        with self._activate_ranks():
            request = dist_checkpointing.save(
                model.sharded_reference() if is_reference else model.sharded_state_dict(),
                str(folder),
                strategies.TorchDistSaveShardedStrategy(thread_count=WRITERS),
                async_sharded_save=True,
                async_strategy="mcore",
            )
        self._finish = request.finalize_fns
        self._buckets: list[Bucket] = []
        if request.async_fn is not None:  # this rank has something to write
            _, self._buckets, self._results = request.async_fn_args
            self._transforms = request.async_fn.args[0][0]
        if staging is not None:  # replace the tensors, so that this save no longer refers to the model's memory
            copies = iter(staging.copy_to_host([tensor for _, _, (_, items) in self._buckets for _, tensor in items]))
            for _, _, (_, items) in self._buckets:
                items[:] = [(item, next(copies)) for item, _ in items]
        self._raise_failures()

    def write(self, threads: int = 1, ended: Callable[[], bool] = lambda: False) -> dict[Path, Entry]:
        """Write, hash and sync this rank's files, and return their manifest entries.

        Not collective; may run in any thread. Raises OSError.

        ended: polled before each tensor; if it returns True, the write raises InterruptedError.
        """
        written: dict[Path, Entry] = {}

        def write_file(bucket: Bucket) -> list[Any]:
            path, key, (objects, tensors) = bucket

            def write_items(stream: HashingFile) -> list[Any]:
                results, serialization = [], SerializationFormat.TORCH_SAVE
                for item, data in [*objects, *tensors]:
                    if ended():
                        raise InterruptedError("the run has ended")
                    if isinstance(data, torch.Tensor):  # torch saves the whole storage behind a tensor
                        data = data.cpu()
                        data = data if data.untyped_storage().nbytes() == data.nbytes else data.clone()
                    results.append(_write_item(self._transforms, stream, data, item, key, serialization))  # type: ignore[arg-type]
                return results

            results, written[Path(path)] = write_hashed(Path(path), write_items)
            return results

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
        """Write the checkpoint's metadata. Collective, after all ranks have written. Raises OSError on all ranks."""
        with self._activate_ranks():
            for finish in self._finish:
                finish()
        self._raise_failures()

    @contextmanager
    def _activate_ranks(self) -> Iterator[None]:
        with ranks.use_layout(self._ranks), ranks.use_member_world():
            try:
                yield
            except CheckpointException as error:  # on all ranks
                raise OSError(" ".join(str(error).split())[-300:]) from None

    def _raise_failures(self) -> None:
        def raise_first() -> None:
            if _failures:
                error = _failures[0]
                raise error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")

        ranks.run_on_all(raise_first, group=self._ranks.host_group)


def async_copy_bytes(model: MegatronModel) -> int:
    """Return an upper bound on the bytes that this rank copies for an asynchronous save."""
    copied = [*model.local_shards().values(), *model.adapter_shards().values()]
    if model.optimizer is not None:
        copied += [tensor for tensor in state_tensors(model.optimizer) if tensor.dim()]
    return sum(tensor.nbytes for tensor in copied)


def restore_model(model: MegatronModel, folder: Path, is_reference: bool = False) -> None:
    """Load a `StagedCheckpoint` into a model built with the same settings, in the same or another layout.

    Collective over the model's ranks. Raises ConfigError if the checkpoint does not fit the model.
    """
    with ranks.use_layout(model.ranks):
        try:
            get_template = model.sharded_reference if is_reference else model.sharded_state_dict
            template = get_template(is_loading=True)
            with ranks.use_member_world():
                state = dist_checkpointing.load(template, str(folder))
        except (
            *(CheckpointException, dist_checkpointing.core.CheckpointingException),
            *(pickle.UnpicklingError, KeyError, ValueError),
        ) as error:
            causes = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
            raise ConfigError(
                f"checkpoint {folder} does not fit this model ({' '.join(str(causes[0]).split())[:300]}); "
                "resume with the model's settings of the run that wrote it"
            ) from None
        if is_reference:
            model.load_reference(state)
        else:
            model.load_state_dict(state)


# --- patches of Megatron-Core ----------------------------------------------------------------------------------------


def _prepare_write_data(self: Any, plan: Any, planner: Any) -> None:
    """Assign tensors to files. Unlike Megatron's version, do not copy views into newly allocated memory."""
    buckets = filesystem_async._split_by_size_and_type(self.thread_count, plan.items)
    self.write_buckets = []
    for items in filter(None, buckets):
        contents: tuple[list[Any], list[Any]] = [], []
        for item in items:
            content = planner.resolve_data(item)
            contents[item.type != WriteItemType.BYTE_IO].append(
                (item, content.detach() if isinstance(content, torch.Tensor) else content)
            )
        name = f"{plan.storage_data.prefix}{len(self.write_buckets)}{DEFAULT_SUFFIX}"
        self.write_buckets.append((os.path.join(self.checkpoint_dir, name), name, contents))
    self.results_queue = queue.Queue() if self.write_buckets else None  # None: nothing to write, no results to wait for


def _defer_failure(write: Callable[..., Any]) -> Callable[..., Any]:
    """Record the errors of `write`, which rank 0 calls between two collectives, instead of raising."""

    @functools.wraps(write)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        try:
            return write(*arguments, **named)
        except Exception as error:  # noqa: BLE001  torch raises RuntimeError for a full disk
            _failures.append(error)
            return None

    return wrapper


filesystem_async.FileSystemWriterAsync.prepare_write_data = _prepare_write_data
filesystem_async.FileSystemWriterAsync.finish = _defer_failure(filesystem_async.FileSystemWriterAsync.finish)
serialization.save_config = _defer_failure(serialization.save_config)
