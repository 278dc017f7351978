"""Checkpoints on disk: written to a temporary name, renamed when complete; loading finds the newest valid one.

`README.md` lists a folder's files. The rank that writes a file hashes it; on loading each rank verifies its share.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megarl.checkpoint import disk_space, manifest
from megarl.checkpoint.manifest import Entry, sync
from megarl.checkpoint.provenance import describe_changes
from megarl.config import ConfigError
from megarl.parallel import ranks

NICENESS = 10
"""Niceness added to the thread: training waits for its ranks, and nothing waits for a checkpoint."""
CANCEL_TIMEOUT_S = 30.0
"""Seconds that a run waits at its end for the thread to stop."""

WriteTask = Callable[[Callable[[], bool]], Mapping[Path, Entry]]
"""Takes a function that returns whether to stop; returns the files that it wrote."""


class BackgroundWrite:
    """A write task on a daemon thread, which a run that dies does not wait for."""

    def __init__(self, work: WriteTask) -> None:
        self._work, self._cancelled = work, threading.Event()
        self._written: Future[Mapping[Path, Entry]] = Future()
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._written.set_result(self._work(self._cancelled.is_set))
        except BaseException as error:  # noqa: B036  raised by `result`
            self._written.set_exception(error)

    def is_done(self) -> bool:
        """Return whether the task has completed or failed."""
        return self._written.done()

    def result(self) -> Mapping[Path, Entry]:
        """Wait and return the files written. Raises OSError if the task failed."""
        if (error := self._written.exception()) is not None:
            raise error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")
        return self._written.result()

    def cancel(self) -> None:
        """Ask the task to stop, and wait for at most `CANCEL_TIMEOUT_S`."""
        self._cancelled.set()
        self._thread.join(CANCEL_TIMEOUT_S)


def lower_priority() -> None:
    """Let this thread's work take less of the cores than training. Not for work that an update may wait for."""
    thread_id = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread_id, min(19, os.getpriority(os.PRIO_PROCESS, thread_id) + NICENESS))


def rng_file_name() -> str:
    """Return the file name of this rank's random states in a checkpoint."""
    return f"rng_{torch.distributed.get_rank():05d}.pt"


def capture_rng_state() -> dict[str, Any]:
    """Return the current random states in a form that `torch.load(weights_only=True)` reads."""
    from megatron.core import tensor_parallel

    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Restore what `capture_rng_state` returned."""
    from megatron.core import tensor_parallel

    name, keys, position, has_gauss, cached = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])


def reseed(step: int) -> None:
    """Seed all generators from `step`: equal on all ranks, except for Megatron's, which must differ between some."""
    from megatron.core import tensor_parallel

    random.seed(step)
    np.random.seed(step % 2**32)
    torch.manual_seed(step)
    if tensor_parallel.get_cuda_rng_tracker().get_states():  # a rank without a model has none
        tensor_parallel.model_parallel_cuda_manual_seed(step + 1)


def capture_state(host: dict[str, Any]) -> Callable[[Path], dict[Path, Entry]]:
    """Capture this rank's random states and the loop's state; return a function that writes them into a folder.

    The function returns the entries of the files, and raises OSError. The first rank alone writes `host`.
    """
    text, states = json.dumps(host), io.BytesIO()
    torch.save(capture_rng_state(), states)

    def write(folder: Path) -> dict[Path, Entry]:
        contents = {folder / rng_file_name(): states.getbuffer()}
        if ranks.is_lead():
            contents[folder / "host.json"] = memoryview(text.encode())
        return {path: manifest.write_content(path, content) for path, content in contents.items()}

    return write


class StorageError(ConfigError):
    """A checkpoint could not be written. Earlier ones are intact, and training can continue."""


class RankWrite(NamedTuple):
    """One rank's part of a checkpoint, captured when this was created. write: writes the rank's files in a thread,
    without communication. finish: called by all ranks after all have written; returns further files that this rank has
    written, with hashes. Both raise OSError."""

    write: WriteTask
    finish: Callable[[], Mapping[Path, Entry]] = dict


class _PendingSave(NamedTuple):
    final: Path
    partial: Path
    finish: Callable[[], Mapping[Path, Entry]]
    background: BackgroundWrite


class CheckpointStore:
    """Checkpoints of one run folder. Unless noted otherwise, methods are collective, with timeout `storage_timeout_s`.

    layout: numbers that identify the distribution of the models over ranks; random states are only restored in the same
    layout. log: logs a line for users. provenance: on the lead, further entries of manifests, see `provenance.py`.
    """

    def __init__(
        self,
        run_dir: Path,
        keep: int,
        storage_timeout_s: float = 7200.0,
        layout: Sequence[int | str] = (),
        log: Callable[[str], None] | None = None,
        provenance: Mapping[str, str] | None = None,
    ) -> None:
        self.run_dir, self.folder = run_dir, run_dir / "checkpoints"
        self.keep = max(1, keep)
        self.keep_before_step: int | None = None
        """Keep the newest checkpoint from before this step in addition to `keep`, for rollbacks."""
        self.storage_timeout_s = storage_timeout_s
        self.layout = list(layout)
        self.provenance = dict(provenance or {})
        self._pending: _PendingSave | None = None
        self._removal: threading.Thread | None = None
        self._log = log or (lambda text: print(text, flush=True) if ranks.is_lead() else None)

    def begin(self, step: int, host: dict[str, Any], stage: Callable[[Path], RankWrite], needed: int = 0) -> None:
        """Start to write step `step`, after `finish` of the previous one. All state may change once this returns.

        stage: called by all ranks; captures the models and other state. Files that its `write` returns (written and
        synced by this rank, with hashes) are not read again; others are hashed by all ranks together. needed: bytes of
        free space required. Raises StorageError on all ranks if the checkpoint cannot be started.
        """
        if self._pending is not None:
            raise RuntimeError(f"{self._pending.final} is still being written")
        final = self.folder / f"step_{step:06d}"
        partial = final.with_suffix(".tmp")
        write_state = capture_state(host)

        def prepare_folder() -> None:
            self._remove_partial()
            disk_space.check_free_space(self.folder, needed)
            partial.mkdir(parents=True)

        def start_write() -> None:
            part = stage(partial)

            def work(ended: Callable[[], bool]) -> dict[Path, Entry]:
                return {**part.write(ended), **write_state(partial)}

            self._pending = _PendingSave(final, partial, part.finish, BackgroundWrite(work))

        with ranks.with_timeout(self.storage_timeout_s):
            try:
                ranks.run_on_all(prepare_folder, rank_zero_only=True)
                ranks.run_on_all(start_write)
            except OSError as error:
                raise self._discard(final, partial, error) from None

    @property
    def pending_step(self) -> int | None:
        """Step of the checkpoint that is being written, or None. The same on all ranks."""
        return None if self._pending is None else manifest.step_of(self._pending.final)

    def is_written(self) -> bool:
        """Return whether this rank's write has completed or failed. Not collective."""
        return self._pending is None or self._pending.background.is_done()

    def finish(self) -> Path:
        """Wait until all ranks have written, commit the checkpoint as the newest one, and return its folder.

        Older checkpoints beyond `keep` are renamed and then removed in a thread. If any rank fails to write, raises
        StorageError on all ranks; earlier checkpoints are untouched then, and the partial one is removed.
        """
        assert self._pending is not None, "call begin first"
        final, partial, finish, background = self._pending
        with ranks.with_timeout(self.storage_timeout_s):
            try:
                self._write_manifest(partial, finish, background)
                ranks.run_on_all(lambda: self._commit(partial, final), rank_zero_only=True)
            except OSError as error:
                raise self._discard(final, partial, error) from None
        self._pending = None
        return final

    def cancel(self) -> None:
        """Stop writing; partial files stay behind as `.tmp`. Not collective: for a run that ends with an error."""
        if self._pending is not None:
            self._pending.background.cancel()

    def remove_unfinished(self) -> None:
        """Remove partial checkpoints that killed runs have left."""
        try:
            ranks.run_on_all(self._remove_partial, rank_zero_only=True)
        except OSError as error:
            raise ConfigError(f"cannot remove half a checkpoint from {self.folder}: {error}") from None

    def find_newest(self, before: int | None = None, after: int | None = None) -> Path | None:
        """Return the newest complete and valid checkpoint (before step `before`), or None; log and skip invalid ones.

        after: return only one of a later step. Raises ConfigError if there are checkpoints but none is valid, unless
        `before` or `after` is given.
        """
        faults = []
        with ranks.with_timeout(self.storage_timeout_s):
            try:
                steps = ranks.run_on_all(self._steps, rank_zero_only=True)[0]
            except OSError as error:
                raise ConfigError(f"cannot list checkpoints in {self.folder}: {error}") from None
            for folder in reversed(steps or ()):
                if before is not None and manifest.step_of(folder) >= before:
                    continue
                if after is not None and manifest.step_of(folder) <= after:
                    break
                try:
                    _verify(folder)
                    return folder
                except ConfigError as fault:
                    faults.append(f"{folder.name}: {fault}")
                    self._log(f"skipping checkpoint {folder}: {fault}")
        if faults and before is None and after is None:
            raise ConfigError(
                f"none of the checkpoints in {self.folder} is complete ({'; '.join(faults)}): copy one there, "
                "or set run.dir to another folder to start at step 1"
            )
        return None

    def read_step(self, folder: Path) -> int:
        """Return the step of a checkpoint, on all ranks."""
        return int(ranks.run_on_all(lambda: manifest.host_state(folder)["step"], rank_zero_only=True)[0] or 0)

    def describe_changes(self, folder: Path) -> str:
        """On the lead, describe how a checkpoint's writer differs from the running code, as a suffix of a log line."""
        written, _ = manifest.read(folder)
        return "".join(f", written {text}" for text in describe_changes(written, self.provenance))

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore this rank's random states and return the host state of a folder that `find_newest` returned.

        If the layout differs from the checkpoint's, random states are seeded from its step instead.
        """
        try:
            (tree, files), host = manifest.read(folder), manifest.host_state(folder)
        except ConfigError as fault:
            raise ConfigError(f"checkpoint {folder} changed while it was read: {fault}") from None
        name, world = rng_file_name(), torch.distributed.get_world_size()
        if (tree.get("world_size"), tree.get("layout")) == (world, self.layout) and name in files:
            restore_rng_state(torch.load(folder / name, weights_only=True))
        else:
            reseed(host["step"])
            self._log(f"{folder.name} was written in another layout: random states are seeded again from its step")
        return host

    def _write_manifest(
        self, partial: Path, finish: Callable[[], Mapping[Path, Entry]], written: BackgroundWrite
    ) -> None:
        """Complete the ranks' parts and write the manifest. Call after all ranks have written."""

        def gather_files(write: Callable[[], Mapping[Path, Entry]]) -> dict[str, Entry]:
            parts = ranks.run_on_all(lambda: {str(file.relative_to(partial)): entry for file, entry in write().items()})
            return _merge_files(parts)

        reported = gather_files(written.result) | gather_files(finish)
        unhashed = ranks.run_on_all(lambda: _list_unhashed(partial, reported), rank_zero_only=True)[0]
        assert unhashed is not None
        files = dict(reported)
        if unhashed:
            local_names = _local_share(unhashed)
            hashed = ranks.run_on_all(lambda: {name: manifest.hash_file(partial / name) for name in local_names})
            files |= _merge_files(hashed)

        def describe() -> None:
            for name in unhashed:
                sync(partial / name)
            content = {
                "step": manifest.step_of(partial),
                "world_size": torch.distributed.get_world_size(),
                "layout": self.layout,
                **self.provenance,
                "files": {name: files[name]._asdict() for name in sorted(files)},
            }
            (partial / manifest.FILE_NAME).write_text(json.dumps(content, indent=1))
            folders = (path for path in partial.rglob("*") if path.is_dir())
            for path in (partial / manifest.FILE_NAME, *folders, partial):
                sync(path)

        ranks.run_on_all(describe, rank_zero_only=True)

    def _discard(self, final: Path, partial: Path, error: OSError) -> StorageError:
        """Remove the partial checkpoint. Collective, so that no rank is still writing."""
        if self._pending is not None:
            self._pending.background.cancel()
        self._pending = None
        ranks.barrier()
        if ranks.is_lead():
            shutil.rmtree(partial, ignore_errors=True)
        ranks.barrier()
        return StorageError(f"could not write checkpoint {final}: {error}; earlier checkpoints are intact")

    def _remove_partial(self) -> None:
        if self._removal is not None:
            self._removal.join()
        for partial in self.folder.glob("step_*.tmp"):
            shutil.rmtree(partial)

    def _commit(self, partial: Path, final: Path) -> None:
        if final.exists():
            shutil.rmtree(final)
        os.rename(partial, final)
        sync(self.folder)
        # The checkpoint is committed: a failure from here on must not be reported as a failed write.
        for clean_up in (self._update_latest, self._remove_old):
            try:
                clean_up(final.name)
            except OSError as error:
                self._log(f"checkpoint {final} is written, but cleaning up failed: {error}")

    def _update_latest(self, name: str) -> None:
        partial = self.folder / "latest.tmp"
        partial.write_text(name)
        os.replace(partial, self.folder / "latest")

    def _remove_old(self, name: str) -> None:
        steps = self._steps()
        before = self.keep_before_step
        rollback_target = [path for path in steps if before is not None and manifest.step_of(path) < before][-1:]
        removed = []
        for folder in steps[: -self.keep]:
            if folder.name != name and folder not in rollback_target:  # a run may have restarted among old checkpoints
                removed.append(folder.with_suffix(".tmp"))
                os.rename(folder, removed[-1])  # so that a half-removed one is not taken for damaged
        # Removing many files takes time. No rank waits for it; the program does at exit.
        self._removal = threading.Thread(target=self._remove, args=(removed,), name="checkpoint")
        self._removal.start()

    def _remove(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                self._log(f"checkpoints are written, but {folder} cannot be removed: {error}")

    def _steps(self) -> list[Path]:
        """Return the folders of complete checkpoints, oldest first."""
        return [folder for folder in manifest.list_checkpoints(self.run_dir) if folder.suffix != ".tmp"]


def _verify(folder: Path) -> None:
    """Check sizes, then hashes, of a checkpoint; ranks share the files. Raises ConfigError on all ranks."""
    contents = ranks.run_on_all(lambda: manifest.read(folder), rank_zero_only=True)[0]
    assert contents is not None
    _, files = contents
    names = _local_share({name: entry.bytes for name, entry in files.items()})
    ranks.run_on_all(lambda: manifest.check_sizes(folder, files, names))
    ranks.run_on_all(lambda: manifest.check_hashes(folder, files, names))
    ranks.run_on_all(lambda: manifest.host_state(folder), rank_zero_only=True)


def _local_share(sizes: Mapping[str, int]) -> list[str]:
    """Return the files that this rank hashes, about as many bytes as every other."""
    return manifest.split_by_size(sizes, torch.distributed.get_world_size())[torch.distributed.get_rank()]


def _merge_files(parts: Sequence[Mapping[str, Entry] | None]) -> dict[str, Entry]:
    return {name: entry for part in parts for name, entry in (part or {}).items()}


def _list_unhashed(folder: Path, reported: Mapping[str, Entry]) -> dict[str, int]:
    """Return the sizes of files that nobody has hashed. Raises OSError if rank 0 does not see what others wrote."""
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    for name, entry in reported.items():
        if name not in sizes:
            sizes[name] = (folder / name).stat().st_size  # a directory listing on a network file system may be stale
        if sizes[name] != entry.bytes:
            raise OSError(f"{name} has {sizes[name]} bytes on rank 0's disk, and {entry.bytes} were written")
    return {name: size for name, size in sizes.items() if name not in reported}
