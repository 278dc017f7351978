"""Save and load a Megatron model with its optimizer and scheduler, as a Megatron distributed checkpoint."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    DEFAULT_SUFFIX,
    FileSystemReader,
    SerializationFormat,
    _write_item,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from megarl.checkpoint.dist_checkpoint_reader import METADATA_FILE
from megarl.checkpoint.manifest import Entry, HashingFile, write_content, write_hashed
from megarl.config import ConfigError
from megarl.megatron.optimizer import state_tensors
from megarl.megatron.trainer_model import MegatronModel  # first: it patches Megatron-Core for machines without a GPU
from megarl.parallel import ranks
from megarl.parallel.host_copy import DeferredCopy, StagingBuffer

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig  # isort: skip
from megatron.core.dist_checkpointing.dict_utils import nested_values  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica  # isort: skip
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess  # isort: skip
from megatron.core.dist_checkpointing.strategies import filesystem_async  # isort: skip
from megatron.core.dist_checkpointing.strategies import torch as strategies  # isort: skip

# Its warnings are advice for users of Megatron's own trainer.
logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.ERROR)

WRITERS = 2
"""Writer threads per rank in a synchronous save, one file each."""


class SavePlan(NamedTuple):
    """Megatron's plan of a save, which holds for all saves of the same shards.

    shards: a description of each of this rank's shards. files: (name, items that are objects, items that are tensors)
    by file. metadata: the table of all ranks' shards, on the model's first rank.
    """

    shards: Sequence[Any]
    files: Sequence[tuple[str, Sequence[WriteItem], Sequence[WriteItem]]]
    transforms: Any
    metadata: Metadata | None


class SaveSlot:
    """Plan and host memory that the saves of a model reuse."""

    def __init__(self) -> None:
        self.plan: SavePlan | None = None
        self.staging = StagingBuffer()


class StagedCheckpoint:
    """A planned save of a model; `copy` and `write` copy and write this rank's part, and `finish` the metadata.

    Planning and finishing are collective. The plan is that of the slot's last save if no rank has other shards.

    copies: whether tensors are copied, so that training may continue while this is written: not; at once; or `later`,
        by `copy` in a thread. Those that only updates change are then copied by `copy`, or before the model next
        changes them, and others at once.
    is_reference: save only the weights of `MegatronModel.sharded_reference`.
    waiting: context of a model's wait for `copy`.
    """

    def __init__(
        self,
        model: MegatronModel,
        folder: Path,
        slot: SaveSlot | None = None,
        copies: Literal["none", "now", "later"] = "none",
        is_reference: bool = False,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._ranks, self._folder = model.ranks, folder
        slot = slot or SaveSlot()
        state = model.sharded_reference() if is_reference else model.sharded_state_dict()
        is_lead = ranks.is_lead(self._ranks.host_group)
        tensors, objects = _list_shards(state, is_lead)
        shards = [*map(_describe, tensors), *objects]

        def prepare() -> bool:
            if is_lead:
                folder.mkdir(parents=True, exist_ok=True)
            return slot.plan is not None and slot.plan.shards == shards

        if not all(ranks.run_on_all(prepare, group=self._ranks.host_group)):
            with self._activate_ranks():
                slot.plan = _make_plan(shards, state, folder)
        assert slot.plan is not None
        self._plan, self._results = slot.plan, list[Any]()
        self._objects = {key: _serialize(contents) for key, contents in objects.items()}
        sources = {(shard.key, tuple(shard.global_offset)): _data(shard) for shard in tensors}
        self._tensors = [
            sources[item.index.fqn, tuple(item.index.offset or ())] for file in self._plan.files for item in file[2]
        ]
        self._copy = DeferredCopy(())
        if copies != "none":
            pairs = list(zip(self._tensors, slot.staging.allocate(self._tensors), strict=True))
            self._tensors = [target for _, target in pairs]
            stable = model.stable_storages() if copies == "later" else ()
            # A quantized tensor has no plain memory.
            later = [type(source) is torch.Tensor and source.untyped_storage()._cdata in stable for source, _ in pairs]
            for (source, target), is_later in zip(pairs, later, strict=True):
                if not is_later:
                    target.copy_(source)
            if any(later):
                self._copy = DeferredCopy(itertools.compress(pairs, later), waiting)
                model.protect_until_copied(self._copy)

    def copy(self) -> None:
        """Make the copies that were left for later. Not collective; may run in any thread."""
        self._copy.complete()

    def write(self, threads: int = 1, ended: Callable[[], bool] = lambda: False) -> dict[Path, Entry]:
        """Write, hash and sync this rank's files, after `copy`, and return their manifest entries.

        Not collective; may run in any thread. Raises OSError.

        ended: polled before each tensor; if it returns True, the write raises InterruptedError.
        """
        self.copy()
        written: dict[Path, Entry] = {}
        tensors = iter(self._tensors)
        files = [(*file, [next(tensors) for _ in file[2]]) for file in self._plan.files]

        def write_file(file: tuple[str, Sequence[WriteItem], Sequence[WriteItem], list[torch.Tensor]]) -> list[Any]:
            name, objects, tensor_items, tensors = file
            pairs: list[tuple[WriteItem, Any]] = [(item, self._objects[item.index.fqn]) for item in objects]
            pairs += zip(tensor_items, tensors, strict=True)

            def write_items(stream: HashingFile) -> list[Any]:
                results, serialization = [], SerializationFormat.TORCH_SAVE
                for item, data in pairs:
                    if ended():
                        raise InterruptedError("the run has ended")
                    if isinstance(data, torch.Tensor):  # torch saves the whole storage behind a tensor
                        data = data.cpu()
                        data = data if data.untyped_storage().nbytes() == data.nbytes else data.clone()
                    results.append(_write_item(self._plan.transforms, stream, data, item, name, serialization))  # type: ignore[arg-type]
                return results

            results, written[self._folder / name] = write_hashed(self._folder / name, write_items)
            return results

        if threads == 1:
            results = list(map(write_file, files))
        else:
            with ThreadPoolExecutor(threads) as pool:
                results = list(pool.map(write_file, files))
        self._results = [result for file_results in results for result in file_results]
        self._tensors = []
        return written

    def finish(self) -> dict[Path, Entry]:
        """Write the checkpoint's metadata, and return the manifest entries of its files, on the model's first rank.

        Collective, after all ranks have written. Raises OSError on all ranks.
        """
        group = self._ranks.host_group
        gathered: list[Any] | None = [None] * group.size() if ranks.is_lead(group) else None
        dist.gather_object(self._results, gathered, group=group, group_dst=0)
        entries: dict[Path, Entry] = {}

        def write_metadata() -> None:
            assert self._plan.metadata is not None and gathered is not None
            metadata = dataclasses.replace(
                self._plan.metadata,
                storage_data={result.index: result.storage_data for results in gathered for result in results},
                storage_meta=StorageMeta(checkpoint_id=str(self._folder)),
                version=CURRENT_DCP_VERSION,
            )
            file_format = dataclasses.asdict(CheckpointingConfig("torch_dist", 1))
            contents = {METADATA_FILE: pickle.dumps(metadata), CONFIG_FNAME: json.dumps(file_format).encode()}
            for name, content in contents.items():
                entries[self._folder / name] = write_content(self._folder / name, content)

        ranks.run_on_all(write_metadata, rank_zero_only=True, group=group)
        return entries

    @contextmanager
    def _activate_ranks(self) -> Iterator[None]:
        with ranks.use_layout(self._ranks), ranks.use_member_world():
            try:
                yield
            except CheckpointException as error:  # on all ranks
                raise OSError(" ".join(str(error).split())[-300:]) from None


def _list_shards(state: dict[str, Any], is_lead: bool) -> tuple[list[ShardedTensor], dict[str, list[Any]]]:
    """Return what this rank writes of a sharded state dict: tensors, and the contents of objects by key.

    Replaces the factories in `state` by what they build. is_lead: whether this is the first of the model's ranks.
    """
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    written = [item for item in nested_values(sharded) if is_main_replica(item.replica_id)]
    if is_lead:
        written.append(ShardedObject("common_state", common, (1,), (0,)))  # as `dist_checkpointing.save` calls it
    objects: dict[str, list[Any]] = {}
    for item in written:
        if isinstance(item, ShardedObject):
            objects.setdefault(item.unique_key, []).append(item.data)
    return [item for item in written if isinstance(item, ShardedTensor)], objects


def _describe(shard: ShardedTensor) -> tuple[Any, ...]:
    """Return all that a plan depends on."""
    shapes = shard.local_shape, shard.global_shape, shard.global_offset
    return shard.key, shard.dtype, shard.data.shape, *shapes, shard.axis_fragmentations, shard.prepend_axis_num


def _data(shard: ShardedTensor) -> torch.Tensor:
    """Return a shard's tensor as it is stored."""
    data: torch.Tensor = shard.data.detach()
    if not shard.prepend_axis_num:
        return data
    return data.contiguous().view((1,) * shard.prepend_axis_num + tuple(shard.local_shape))


def _serialize(contents: list[Any]) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(contents, stream)
    return stream


class _PlanningStrategy(strategies.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's strategy; keeps the writer with its plan of files, and the metadata."""

    def _get_save_and_finalize_callbacks(self, writer: Any, plan: Any, async_strategy: str) -> Any:
        self.writer, self.metadata = writer, plan[1]
        return super()._get_save_and_finalize_callbacks(writer, plan, async_strategy)


def _make_plan(shards: Sequence[Any], state: dict[str, Any], folder: Path) -> SavePlan:
    """Have Megatron check and plan the save of a sharded state dict. Collective."""
    strategy = _PlanningStrategy(thread_count=WRITERS)
    dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=True, async_strategy="mcore")
    metadata = strategy.metadata
    if metadata is not None:
        metadata = dataclasses.replace(metadata)  # without the plans of all ranks, which Megatron adds
    return SavePlan(shards, strategy.writer.files, strategy.writer.transforms, metadata)


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


@contextmanager
def fetch_before_reading(fetch: Callable[[Path], None]) -> Iterator[None]:
    """Call `fetch` with the path of each file of a checkpoint before it is read within the block, to provide it."""
    read_data = FileSystemReader.read_data

    def wrapper(self: Any, plan: Any, planner: Any) -> Any:
        for name in dict.fromkeys(self.storage_data[item.storage_index].relative_path for item in plan.items):
            fetch(Path(self.path, name))
        return read_data(self, plan, planner)

    FileSystemReader.read_data = wrapper  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileSystemReader.read_data = read_data  # type: ignore[method-assign]


# --- patches of Megatron-Core ----------------------------------------------------------------------------------------


def _prepare_write_data(self: Any, plan: Any, planner: Any) -> None:
    """Assign items to files, without their contents. Megatron's version copies views into newly allocated memory."""
    self.files, self.write_buckets, self.results_queue = [], [], None
    for items in filter(None, filesystem_async._split_by_size_and_type(self.thread_count, plan.items)):
        is_object = [item.type == WriteItemType.BYTE_IO for item in items]
        name = f"{plan.storage_data.prefix}{len(self.files)}{DEFAULT_SUFFIX}"
        tensors = [item for item, is_bytes in zip(items, is_object, strict=True) if not is_bytes]
        self.files.append((name, list(itertools.compress(items, is_object)), tensors))


filesystem_async.FileSystemWriterAsync.prepare_write_data = _prepare_write_data
