"""Checkpoints on disk: written aside, renamed when whole, newest valid one found again.

    <run>/checkpoints/step_000020/
        actor/ critic/     Megatron's own distributed checkpoint: weights, fp32 masters, optimizer, scheduler
        carried/           conversations that go on in a later step, a file of each engine (rollout.oversample)
        host.json          loader position, controller state, step and sample counters
        rng_00003.pt       each rank's random states
        manifest.json      every file with its size and SHA-256; written last
    <run>/checkpoints/latest   the name of the newest one

A folder counts only once it has its final name, and it gets that after everything in it is on disk. Nobody hashes
alone: a file is hashed by the rank that writes it, as it does, and on the way back each rank verifies its share.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.checkpoint import manifest, room
from megarl.checkpoint.manifest import Entry
from megarl.checkpoint.origin import differs
from megarl.config import ConfigError
from megarl.parallel import ranks

STEP = re.compile(r"step_(\d{6,})")


class StorageError(ConfigError):
    """A checkpoint could not be written. The earlier ones are as they were, and training could go on."""


class CheckpointStore:
    """Checkpoints of one run folder. Every method is called by all ranks, which wait `storage_timeout_s` for the
    slowest.

    layout: numbers that say who has which part of the models; the random states of another layout mean nothing in
    this one. say: where lines for people go. origin: on the lead, what else goes into manifests, see `origin.py`.
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
        self.storage_timeout_s = storage_timeout_s
        self.layout = list(layout)
        self.origin = dict(origin or {})
        self._say = say or (lambda text: print(text, flush=True) if ranks.is_lead() else None)

    def save(
        self,
        step: int,
        host: dict[str, Any],
        write_parts: Callable[[Path], Mapping[Path, Entry] | None],
        needed: int = 0,
    ) -> Path:
        """Write step `step`; `write_parts(folder)` writes the models, on all ranks. Returns the final folder.

        What it returns, files that this rank wrote and synced, with their hashes, is not read again; others are hashed
        by all ranks together. needed: bytes, for which there must be room. Raises StorageError on all ranks when any
        rank could not write; the earlier checkpoints are untouched then, and nothing of this one is left.
        """
        final = self.folder / f"step_{step:06d}"
        partial = final.with_suffix(".tmp")
        with ranks.patient(self.storage_timeout_s):
            try:
                ranks.together(lambda: self._make_room(partial, needed), lead=True)
                self._write(partial, host, write_parts)
                ranks.together(lambda: self._commit(partial, final), lead=True)
            except OSError as error:
                if ranks.is_lead():
                    shutil.rmtree(partial, ignore_errors=True)
                ranks.barrier()
                raise StorageError(
                    f"could not write checkpoint {final}: {error}; earlier checkpoints are intact"
                ) from None
        return final

    def newest(self, before: int | None = None) -> Path | None:
        """The newest checkpoint whose files are all there and whole; names and skips those that are not. before: only
        of steps before this one.

        Raises ConfigError where there are checkpoints, but none that is whole.
        """
        faults = []
        with ranks.patient(self.storage_timeout_s):
            try:
                steps = ranks.together(self._steps, lead=True)[0]
            except OSError as error:
                raise ConfigError(f"cannot look for checkpoints in {self.folder}: {error}") from None
            for folder in reversed([one for one in steps or () if before is None or _step_of(one) < before]):
                fault = self._fault_in(folder)
                if fault is None:
                    return folder
                faults.append(f"{folder.name}: {fault}")
                self._say(f"skipping checkpoint {folder}: {fault}")
        if faults and before is None:
            raise ConfigError(
                f"none of the checkpoints in {self.folder} is whole ({'; '.join(faults)}): put a copy of one there, "
                "or set run.dir to another folder to start at step 1"
            )
        return None

    def names(self) -> list[str]:
        """The checkpoints that are there, the oldest first; whether they are whole is not looked at."""
        return [str(folder) for folder in ranks.together(self._steps, lead=True)[0] or ()]

    def step_of(self, folder: Path) -> int:
        """Which step a checkpoint is of, on all ranks."""
        return int(ranks.together(lambda: _host(folder)["step"], lead=True)[0] or 0)

    def differs(self, folder: Path) -> str:
        """On the lead, what wrote a checkpoint where that is not what runs now, for the end of a line."""
        found = manifest.read(folder)
        words = () if isinstance(found, str) else differs(found[0], self.origin)
        return "".join(f", written {text}" for text in words)

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore this rank's random states and return the host state of a folder that `newest` found.

        In another layout than the checkpoint's the random states are drawn anew, from its step.
        """
        found, host, name = manifest.read(folder), _host(folder), _rng_name()
        if isinstance(found, str):
            raise ConfigError(f"checkpoint {folder} has changed meanwhile: {found}")
        tree, files = found
        world = torch.distributed.get_world_size()
        if (tree.get("world_size"), tree.get("layout")) == (world, self.layout) and name in files:
            _restore_rng(torch.load(folder / name, weights_only=True))
        else:
            _fresh_rng(host["step"])
            self._say(f"{folder.name} was written in another layout: random states are drawn anew, from its step")
        return host

    def _write(
        self, partial: Path, host: dict[str, Any], write_parts: Callable[[Path], Mapping[Path, Entry] | None]
    ) -> None:
        def own_files() -> dict[str, Entry]:
            written = {str(file.relative_to(partial)): entry for file, entry in (write_parts(partial) or {}).items()}
            random_states = partial / _rng_name()
            _, written[random_states.name] = manifest.write_hashed(
                random_states,
                lambda stream: torch.save(_rng_state(), stream),  # type: ignore[arg-type]
            )
            if ranks.is_lead():
                (partial / "host.json").write_text(json.dumps(host))
            return written

        reported = _union(ranks.together(own_files))
        rest = ranks.together(lambda: _unreported(partial, reported), lead=True)[0]
        assert rest is not None
        mine = manifest.shares(rest, torch.distributed.get_world_size())[torch.distributed.get_rank()]
        hashed = ranks.together(lambda: {name: manifest.hash_file(partial / name) for name in mine})
        files = reported | _union(hashed)

        def finish() -> None:
            for name in rest:
                _sync(partial / name)
            content = {
                "step": host.get("step"),
                "world_size": torch.distributed.get_world_size(),
                "layout": self.layout,
                **self.origin,
                "files": {name: files[name]._asdict() for name in sorted(files)},
            }
            (partial / manifest.NAME).write_text(json.dumps(content, indent=1))
            for path in (partial / manifest.NAME, *(item for item in partial.rglob("*") if item.is_dir()), partial):
                _sync(path)

        ranks.together(finish, lead=True)

    def _make_room(self, partial: Path, needed: int) -> None:
        for left in self.folder.glob("step_*.tmp"):  # by a run that was killed
            shutil.rmtree(left)
        room.demand(self.folder, needed)
        partial.mkdir(parents=True)

    def _commit(self, partial: Path, final: Path) -> None:
        if final.exists():
            shutil.rmtree(final)
        os.rename(partial, final)
        _sync(self.folder)
        # The checkpoint is there: what fails from here on must not make it one that could not be written.
        for tidy in (self._name_latest, self._remove_old):
            try:
                tidy(final.name)
            except OSError as error:
                self._say(f"checkpoint {final} is written, but tidying up failed: {error}")

    def _name_latest(self, name: str) -> None:
        partial = self.folder / "latest.tmp"
        partial.write_text(name)
        os.replace(partial, self.folder / "latest")

    def _remove_old(self, name: str) -> None:
        for old in self._steps()[: -self.keep]:
            if old.name != name:  # which is not the last where a run has begun anew among old ones
                gone = old.with_suffix(".tmp")
                os.rename(old, gone)  # half of one is not to be taken for damaged
                shutil.rmtree(gone)

    def _steps(self) -> list[Path]:
        """Folders of checkpoints, the oldest first; whatever else lies there is none."""
        try:
            found = [(STEP.fullmatch(path.name), path) for path in self.folder.iterdir() if path.is_dir()]
        except FileNotFoundError:
            return []
        return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]

    def _fault_in(self, folder: Path) -> str | None:
        """What is wrong with a checkpoint, on all ranks: sizes first, then contents, each rank its share of bytes."""
        found = ranks.together(lambda: manifest.read(folder), lead=True)[0]
        if found is None or isinstance(found, str):
            return found
        _, files = found
        sizes = {name: entry.bytes for name, entry in files.items()}
        mine = manifest.shares(sizes, torch.distributed.get_world_size())[torch.distributed.get_rank()]
        for fault in (manifest.size_fault, manifest.content_fault):
            faults = ranks.together(lambda fault=fault: fault(folder, files, mine))  # type: ignore[misc]
            if worst := next((text for text in faults if text), None):
                return worst
        host = ranks.together(lambda: manifest.host_state(folder), lead=True)[0]
        return host if isinstance(host, str) else None


def _step_of(folder: Path) -> int:
    match = STEP.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def _host(folder: Path) -> dict[str, Any]:
    host = manifest.host_state(folder)
    if isinstance(host, str):
        raise ConfigError(f"checkpoint {folder} has changed meanwhile: {host}")
    return host


def _union(parts: Sequence[Mapping[str, Entry] | None]) -> dict[str, Entry]:
    return {name: entry for part in parts for name, entry in (part or {}).items()}


def _unreported(folder: Path, reported: Mapping[str, Entry]) -> dict[str, int]:
    """Sizes of the files that nobody has hashed. Raises OSError where rank 0 does not see what others wrote."""
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    for name, entry in reported.items():
        if name not in sizes:
            sizes[name] = (folder / name).stat().st_size  # a listing of a network's file system may be old
        if sizes[name] != entry.bytes:
            raise OSError(f"{name} has {sizes[name]} bytes on rank 0's disk, and {entry.bytes} were written")
    return {name: size for name, size in sizes.items() if name not in reported}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rng_name() -> str:
    return f"rng_{torch.distributed.get_rank():05d}.pt"


def _rng_state() -> dict[str, Any]:
    from megatron.core import tensor_parallel

    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _restore_rng(state: dict[str, Any]) -> None:
    from megatron.core import tensor_parallel

    name, keys, position, has_gauss, cached = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])


def _fresh_rng(step: int) -> None:
    """As the start of a run, but from `step`: equal on all ranks, but for Megatron's, which knows what must differ."""
    from megatron.core import tensor_parallel

    random.seed(step)
    np.random.seed(step % 2**32)
    torch.manual_seed(step)
    if tensor_parallel.get_cuda_rng_tracker().get_states():  # a rank without a model has none
        tensor_parallel.model_parallel_cuda_manual_seed(step + 1)
