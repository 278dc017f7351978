"""Checkpoints on disk: written aside, renamed when whole, newest valid one found again.

    <run>/checkpoints/step_000020/
        actor/ critic/     Megatron's own distributed checkpoint: weights, fp32 masters, optimizer, scheduler
        host.json          loader position, controller state, step and sample counters
        rng_00003.pt       each rank's random states
        manifest.json      every file with its size and SHA-256; written last
    <run>/checkpoints/latest   the name of the newest one

A folder counts only once it has its final name, and it gets that after everything in it is on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.config import ConfigError
from megarl.parallel import ranks


class CheckpointStore:
    """Checkpoints of one run folder. Every method is called by all ranks."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self.folder = run_dir / "checkpoints"
        self.keep = max(1, keep)

    def save(self, step: int, host: dict[str, Any], write_parts: Callable[[Path], None]) -> Path:
        """Write step `step`; `write_parts(folder)` writes the models, on all ranks. Returns the final folder.

        Raises ConfigError on all ranks when any rank could not write; the earlier checkpoints are untouched then.
        """
        final = self.folder / f"step_{step:06d}"
        partial = final.with_suffix(".tmp")
        rank = torch.distributed.get_rank()
        self._together(lambda: _fresh(partial) if rank == 0 else None)
        self._together(lambda: write_parts(partial))

        def own_files() -> None:
            torch.save(_rng_state(), partial / f"rng_{rank:05d}.pt")
            if rank == 0:
                (partial / "host.json").write_text(json.dumps(host))

        self._together(own_files)
        if rank == 0:
            error = None
            try:
                manifest = {
                    str(file.relative_to(partial)): {"bytes": file.stat().st_size, "sha256": _sha256(file)}
                    for file in sorted(partial.rglob("*"))
                    if file.is_file()
                }
                content = {"step": step, "world_size": torch.distributed.get_world_size(), "files": manifest}
                (partial / "manifest.json").write_text(json.dumps(content, indent=1))
                _sync_tree(partial)
                if final.exists():
                    shutil.rmtree(final)
                os.rename(partial, final)
                _replace_text(self.folder / "latest", final.name)
                for old in self._steps()[: -self.keep]:
                    shutil.rmtree(old)
            except OSError as failure:
                error = str(failure)
        else:
            error = None
        error = ranks.broadcast_object(error)
        if error:
            raise ConfigError(f"could not write checkpoint {final}: {error}; earlier checkpoints are intact")
        return final

    def newest(self) -> Path | None:
        """The newest checkpoint whose files are all there and whole; names and skips those that are not."""
        chosen = None
        if torch.distributed.get_rank() == 0:
            for folder in reversed(self._steps()):
                fault = _fault_in(folder)
                if fault is None:
                    chosen = str(folder)
                    break
                print(f"skipping checkpoint {folder}: {fault}", flush=True)
        chosen = ranks.broadcast_object(chosen)
        return Path(chosen) if chosen else None

    @staticmethod
    def load(folder: Path) -> dict[str, Any]:
        """Restore this rank's random states and return the host state."""
        rank = torch.distributed.get_rank()
        world = json.loads((folder / "manifest.json").read_text())["world_size"]
        if world == torch.distributed.get_world_size():
            _restore_rng(torch.load(folder / f"rng_{rank:05d}.pt", weights_only=True))
        return json.loads((folder / "host.json").read_text())

    def _steps(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step_*") if path.suffix != ".tmp")

    def _together(self, work: Callable[[], None]) -> None:
        error = None
        try:
            work()
        except OSError as failure:
            error = str(failure)
        errors = [text for text in ranks.all_gather_objects(error) if text]
        if errors:
            raise ConfigError(f"could not write a checkpoint in {self.folder}: {errors[0]}; earlier ones are intact")


def _fresh(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _fault_in(folder: Path) -> str | None:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())["files"]
    except (OSError, ValueError, KeyError):
        return "manifest.json is missing or broken"
    for name, entry in manifest.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            return f"{name} is missing or truncated"
        if _sha256(file) != entry["sha256"]:
            return f"{name} differs from its checksum"
    return None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replace_text(file: Path, text: str) -> None:
    partial = file.with_suffix(".tmp")
    partial.write_text(text)
    os.replace(partial, file)


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
