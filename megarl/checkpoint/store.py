"""Checkpoints on disk: written to a temporary name, renamed when complete, and the newest valid one found again.

    <run>/checkpoints/step_000020/
        actor/ critic/     Megatron's own distributed checkpoint: weights, fp32 masters, optimizer, scheduler
        carried/           unfinished conversations, one file per engine (rollout.oversample)
        host.json          loader position, controller state, step and sample counters
        rng_00003.pt       random states of Python, numpy, torch and Megatron, per rank
        manifest.json      every file with its size and SHA-256; written last
    <run>/checkpoints/latest   the name of the newest one

A folder counts only under its final name, which it gets when all of its files are on disk. Hashing is distributed: the
rank that writes a file hashes it, and on loading each rank verifies its share. `BackgroundWrite` is the thread that writes a
rank's part while the rank trains; it does not communicate.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
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
"""By which the thread stands back where cores are scarce: training waits for its ranks, and nobody for a checkpoint."""
CANCEL_TIMEOUT_S = 30.0
"""How long a run that ends waits for the thread to leave its work."""

WriteTask = Callable[[Callable[[], bool]], Mapping[Path, Entry]]
"""Given a function that says whether to leave it; returns the files that it wrote."""


class BackgroundWrite:
    """One piece of work, begun. A daemon: a run that dies does not wait for it."""

    def __init__(self, work: WriteTask) -> None:
        self._work, self._cancelled = work, threading.Event()
        self._written: Mapping[Path, Entry] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, min(19, os.getpriority(os.PRIO_PROCESS, own) + NICENESS))
        try:
            self._written = self._work(self._cancelled.is_set)
        except BaseException as error:  # noqa: B036  whatever it is, `result` says it
            self._error = error

    def is_done(self) -> bool:
        """Whether it has been done, or has failed."""
        return not self._thread.is_alive()

    def result(self) -> Mapping[Path, Entry]:
        """What was written, once it is. Raises OSError where it could not be."""
        self._thread.join()
        if self._written is not None:
            return self._written
        error = self._error
        raise error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")

    def cancel(self) -> None:
        """Stop at the next occasion, and wait for that."""
        self._cancelled.set()
        self._thread.join(CANCEL_TIMEOUT_S)


def rng_file_name() -> str:
    """Of this rank, in a checkpoint."""
    return f"rng_{torch.distributed.get_rank():05d}.pt"


def capture_rng_state() -> dict[str, Any]:
    """As they are, in what `torch.load(weights_only=True)` reads."""
    from megatron.core import tensor_parallel

    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Go on from what `current` returned."""
    from megatron.core import tensor_parallel

    name, keys, position, has_gauss, cached = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])


def reseed(step: int) -> None:
    """As the start of a run, but from `step`: equal on all ranks, but for Megatron's, which knows what must differ."""
    from megatron.core import tensor_parallel

    random.seed(step)
    np.random.seed(step % 2**32)
    torch.manual_seed(step)
    if tensor_parallel.get_cuda_rng_tracker().get_states():  # a rank without a model has none
        tensor_parallel.model_parallel_cuda_manual_seed(step + 1)


STEP_PATTERN = re.compile(r"step_(\d{6,})")


class StorageError(ConfigError):
    """A checkpoint could not be written. The earlier ones are as they were, and training could go on."""


class RankWrite(NamedTuple):
    """What a rank has for a checkpoint, as it was when this was made. write: its files, in a thread, talking to nobody;
    it asks whether to leave it. finish: by all ranks, after all have written. Both raise OSError."""

    write: WriteTask
    finish: Callable[[], None] = lambda: None


class _PendingSave(NamedTuple):
    final: Path
    partial: Path
    step: int
    finish: Callable[[], None]
    background: BackgroundWrite


class CheckpointStore:
    """Checkpoints of one run folder. Every method is called by all ranks, which wait `storage_timeout_s` for the
    slowest, but for those that say otherwise.

    layout: numbers that say who has which part of the models; the random states of another layout mean nothing in
    this one. say: where lines for people go. origin: on the lead, what else goes into manifests, see `provenance.py`.
    """

    def __init__(
        self,
        run_dir: Path,
        keep: int,
        storage_timeout_s: float = 7200.0,
        layout: Sequence[int | str] = (),
        say: Callable[[str], None] | None = None,
        origin: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = run_dir / "checkpoints"
        self.keep = max(1, keep)
        self.rollback_before: int | None = None
        """The newest checkpoint from before this step stays, however many there are: models may go back to it."""
        self.storage_timeout_s = storage_timeout_s
        self.layout = list(layout)
        self.provenance = dict(origin or {})
        self._pending: _PendingSave | None = None
        self._removal: threading.Thread | None = None
        self._log = say or (lambda text: print(text, flush=True) if ranks.is_lead() else None)

    def save(self, step: int, host: dict[str, Any], stage: Callable[[Path], RankWrite], needed: int = 0) -> Path:
        """Write step `step` and wait for all of it: `begin` and `finish`."""
        self.begin(step, host, stage, needed)
        folder = self.finish()
        ranks.run_on_all(self._await_removal, lead=True)
        return folder

    def begin(self, step: int, host: dict[str, Any], stage: Callable[[Path], RankWrite], needed: int = 0) -> None:
        """Begin to write step `step`, after `finish` of the one before. From here on everything may change.

        stage: called by all ranks; the models and what else there is, as it is now. What its `write` returns, files
        that this rank wrote and synced, with their hashes, is not read again; others are hashed by all ranks together.
        needed: bytes, for which there must be room. Raises StorageError on all ranks when it cannot be begun.
        """
        if self._pending is not None:
            raise RuntimeError(f"{self._pending.final} is still being written")
        final = self.folder / f"step_{step:06d}"
        partial = final.with_suffix(".tmp")
        text, states = json.dumps(host), io.BytesIO()
        torch.save(capture_rng_state(), states)

        def small_files() -> dict[Path, Entry]:
            found = partial / rng_file_name()
            if ranks.is_lead():
                (partial / "host.json").write_text(text)
            return {found: manifest.write_hashed(found, lambda stream: stream.write(states.getbuffer()))[1]}

        def staged() -> None:
            part = stage(partial)

            def work(ended: Callable[[], bool]) -> dict[Path, Entry]:
                return {**part.write(ended), **small_files()}

            self._pending = _PendingSave(final, partial, step, part.finish, BackgroundWrite(work))

        with ranks.with_timeout(self.storage_timeout_s):
            try:
                ranks.run_on_all(lambda: self._prepare_folder(partial, needed), lead=True)
                ranks.run_on_all(staged)
            except OSError as error:
                raise self._discard(final, partial, error) from None

    @property
    def pending_step(self) -> int | None:
        """The step of the checkpoint that was begun and is not finished; None without one. The same on all ranks."""
        return None if self._pending is None else self._pending.step

    def is_written(self) -> bool:
        """Whether this rank has nothing to write any more, or could not; not collective."""
        return self._pending is None or self._pending.background.is_done()

    def finish(self) -> Path:
        """Wait until all ranks have written what was begun, and make a checkpoint of it, the newest one; returns its
        folder. Older ones that need not stay have lost their names then, and are removed in a thread. Raises
        StorageError on all ranks when any rank could not write; the earlier checkpoints are untouched then, and nothing
        of this one is left."""
        assert self._pending is not None, "begin comes first"
        final, partial, step, finish, written = self._pending
        with ranks.with_timeout(self.storage_timeout_s):
            try:
                self._write_manifest(partial, step, finish, written)
                ranks.run_on_all(lambda: self._commit(partial, final), lead=True)
            except OSError as error:
                raise self._discard(final, partial, error) from None
        self._pending = None
        return final

    def cancel(self) -> None:
        """Stop writing; what is there of it stays behind as `.tmp`. Not collective: for a run that ends by an error."""
        if self._pending is not None:
            self._pending.background.cancel()

    def remove_unfinished(self) -> None:
        """Remove what runs that were killed have left."""
        try:
            ranks.run_on_all(self._remove_partial, lead=True)
        except OSError as error:
            raise ConfigError(f"cannot remove half a checkpoint from {self.folder}: {error}") from None

    def find_newest(self, before: int | None = None) -> Path | None:
        """The newest checkpoint whose files are all there and whole; names and skips those that are not. before: only
        of steps before this one.

        Raises ConfigError where there are checkpoints, but none that is whole.
        """
        faults = []
        with ranks.with_timeout(self.storage_timeout_s):
            try:
                steps = ranks.run_on_all(self._steps, lead=True)[0]
            except OSError as error:
                raise ConfigError(f"cannot look for checkpoints in {self.folder}: {error}") from None
            for folder in reversed([one for one in steps or () if before is None or _parse_step(one) < before]):
                fault = self._check_checkpoint(folder)
                if fault is None:
                    return folder
                faults.append(f"{folder.name}: {fault}")
                self._log(f"skipping checkpoint {folder}: {fault}")
        if faults and before is None:
            raise ConfigError(
                f"none of the checkpoints in {self.folder} is whole ({'; '.join(faults)}): put a copy of one there, "
                "or set run.dir to another folder to start at step 1"
            )
        return None

    def list_checkpoints(self) -> list[str]:
        """The checkpoints that are there, the oldest first; whether they are whole is not looked at."""
        return [str(folder) for folder in ranks.run_on_all(self._steps, lead=True)[0] or ()]

    def read_step(self, folder: Path) -> int:
        """Which step a checkpoint is of, on all ranks."""
        return int(ranks.run_on_all(lambda: _read_host_state(folder)["step"], lead=True)[0] or 0)

    def describe_changes(self, folder: Path) -> str:
        """On the lead, what wrote a checkpoint where that is not what runs now, for the end of a line."""
        found = manifest.read(folder)
        words = () if isinstance(found, str) else describe_changes(found[0], self.provenance)
        return "".join(f", written {text}" for text in words)

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore this rank's random states and return the host state of a folder that `newest` found.

        In another layout than the checkpoint's the random states are drawn anew, from its step.
        """
        found, host, name = manifest.read(folder), _read_host_state(folder), rng_file_name()
        if isinstance(found, str):
            raise ConfigError(f"checkpoint {folder} has changed meanwhile: {found}")
        tree, files = found
        world = torch.distributed.get_world_size()
        if (tree.get("world_size"), tree.get("layout")) == (world, self.layout) and name in files:
            restore_rng_state(torch.load(folder / name, weights_only=True))
        else:
            reseed(host["step"])
            self._log(f"{folder.name} was written in another layout: random states are drawn anew, from its step")
        return host

    def _write_manifest(self, partial: Path, step: int, finish: Callable[[], None], written: BackgroundWrite) -> None:
        """After all ranks have written: what says where everything is, and that it is all there."""

        def own_files() -> dict[str, Entry]:
            return {str(file.relative_to(partial)): entry for file, entry in written.result().items()}

        reported = _merge_files(ranks.run_on_all(own_files))
        ranks.run_on_all(finish)
        rest = ranks.run_on_all(lambda: _list_unhashed(partial, reported), lead=True)[0]
        assert rest is not None
        mine = manifest.split_by_size(rest, torch.distributed.get_world_size())[torch.distributed.get_rank()]
        hashed = ranks.run_on_all(lambda: {name: manifest.hash_file(partial / name) for name in mine})
        files = reported | _merge_files(hashed)

        def describe() -> None:
            for name in rest:
                sync(partial / name)
            content = {
                "step": step,
                "world_size": torch.distributed.get_world_size(),
                "layout": self.layout,
                **self.provenance,
                "files": {name: files[name]._asdict() for name in sorted(files)},
            }
            (partial / manifest.FILE_NAME).write_text(json.dumps(content, indent=1))
            for path in (
                partial / manifest.FILE_NAME,
                *(item for item in partial.rglob("*") if item.is_dir()),
                partial,
            ):
                sync(path)

        ranks.run_on_all(describe, lead=True)

    def _discard(self, final: Path, partial: Path, error: OSError) -> StorageError:
        """Leave nothing of it. Collective, as nobody may still be writing."""
        if self._pending is not None:
            self._pending.background.cancel()
        self._pending = None
        ranks.barrier()
        if ranks.is_lead():
            shutil.rmtree(partial, ignore_errors=True)
        ranks.barrier()
        return StorageError(f"could not write checkpoint {final}: {error}; earlier checkpoints are intact")

    def _prepare_folder(self, partial: Path, needed: int) -> None:
        self._remove_partial()
        disk_space.check_free_space(self.folder, needed)
        partial.mkdir(parents=True)

    def _await_removal(self) -> None:
        if self._removal is not None:
            self._removal.join()

    def _remove_partial(self) -> None:
        self._await_removal()
        for left in self.folder.glob("step_*.tmp"):
            shutil.rmtree(left)

    def _commit(self, partial: Path, final: Path) -> None:
        if final.exists():
            shutil.rmtree(final)
        os.rename(partial, final)
        sync(self.folder)
        # The checkpoint is there: what fails from here on must not make it one that could not be written.
        for tidy in (self._update_latest, self._remove_old):
            try:
                tidy(final.name)
            except OSError as error:
                self._log(f"checkpoint {final} is written, but tidying up failed: {error}")

    def _update_latest(self, name: str) -> None:
        partial = self.folder / "latest.tmp"
        partial.write_text(name)
        os.replace(partial, self.folder / "latest")

    def _remove_old(self, name: str) -> None:
        steps = self._steps()
        spared = [one for one in steps if self.rollback_before is not None and _parse_step(one) < self.rollback_before][
            -1:
        ]
        gone = []
        for old in steps[: -self.keep]:
            if old.name != name and old not in spared:  # a run may have begun anew among old ones
                gone.append(old.with_suffix(".tmp"))
                os.rename(old, gone[-1])  # half of one is not to be taken for damaged
        # Many files, for which no rank has to wait; the program does, at its end.
        self._removal = threading.Thread(target=self._remove, args=(gone,), name="checkpoint")
        self._removal.start()

    def _remove(self, gone: Sequence[Path]) -> None:
        for folder in gone:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                self._log(f"checkpoints are written, but {folder} cannot be removed: {error}")

    def _steps(self) -> list[Path]:
        """Folders of checkpoints, the oldest first; whatever else lies there is none."""
        try:
            found = [(STEP_PATTERN.fullmatch(path.name), path) for path in self.folder.iterdir() if path.is_dir()]
        except FileNotFoundError:
            return []
        return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]

    def _check_checkpoint(self, folder: Path) -> str | None:
        """What is wrong with a checkpoint, on all ranks: sizes first, then contents, each rank its share of bytes."""
        found = ranks.run_on_all(lambda: manifest.read(folder), lead=True)[0]
        if found is None or isinstance(found, str):
            return found
        _, files = found
        sizes = {name: entry.bytes for name, entry in files.items()}
        mine = manifest.split_by_size(sizes, torch.distributed.get_world_size())[torch.distributed.get_rank()]
        for fault in (manifest.check_sizes, manifest.check_hashes):
            faults = ranks.run_on_all(lambda fault=fault: fault(folder, files, mine))  # type: ignore[misc]
            if worst := next((text for text in faults if text), None):
                return worst
        host = ranks.run_on_all(lambda: manifest.host_state(folder), lead=True)[0]
        return host if isinstance(host, str) else None


def _parse_step(folder: Path) -> int:
    match = STEP_PATTERN.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def _read_host_state(folder: Path) -> dict[str, Any]:
    host = manifest.host_state(folder)
    if isinstance(host, str):
        raise ConfigError(f"checkpoint {folder} has changed meanwhile: {host}")
    return host


def _merge_files(parts: Sequence[Mapping[str, Entry] | None]) -> dict[str, Entry]:
    return {name: entry for part in parts for name, entry in (part or {}).items()}


def _list_unhashed(folder: Path, reported: Mapping[str, Entry]) -> dict[str, int]:
    """Sizes of the files that nobody has hashed. Raises OSError where rank 0 does not see what others wrote."""
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    for name, entry in reported.items():
        if name not in sizes:
            sizes[name] = (folder / name).stat().st_size  # a listing of a network's file system may be old
        if sizes[name] != entry.bytes:
            raise OSError(f"{name} has {sizes[name]} bytes on rank 0's disk, and {entry.bytes} were written")
    return {name: size for name, size in sizes.items() if name not in reported}
