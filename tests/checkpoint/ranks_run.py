"""Run the whole program once, with faults of the disk.

argv: a fault (a name in `DISK_FAULTS`, or empty), then the arguments of `megarl.train`. Prints the exit code and both
output streams.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from megarl import checkpointing, train
from megarl.checkpoint import disk_space, manifest
from megarl.models import hf_folder
from megarl.parallel import ranks

calls: dict[str, int] = {}


def count(name: str) -> int:
    calls[name] = calls.get(name, 0) + 1
    return calls[name]


def full_in_first_save() -> None:
    """A write of the first checkpoint fails on the last rank, in the middle of a model file."""
    write = manifest.HashingFile.write

    def write_with_fault(self: manifest.HashingFile, data: Any) -> int:
        if "step_000001.tmp/actor/__" in self._file.name and os.environ["RANK"] == str(
            int(os.environ["WORLD_SIZE"]) - 1
        ):
            self.failure = OSError(28, "No space left on device")
            raise self.failure
        return write(self, data)

    manifest.HashingFile.write = write_with_fault  # type: ignore[method-assign]


def full_in_metadata_of_second_save() -> None:
    """In the second checkpoint, the model's first rank fails to write the metadata, after all have written."""
    write = manifest.HashingFile.write

    def write_with_fault(self: manifest.HashingFile, data: Any) -> int:
        if self._file.name.endswith("step_000002.tmp/actor/.metadata"):
            self.failure = OSError(28, "No space left on device")
            raise self.failure
        return write(self, data)

    manifest.HashingFile.write = write_with_fault  # type: ignore[method-assign]


def no_space_for_last_checkpoint() -> None:
    """The check of free space before the second save fails."""
    check = disk_space.check_free_space

    def check_with_fault(folder: Any, needed: int) -> None:
        if folder.name == "checkpoints" and count("saves") == 2:
            raise OSError(28, "about 5.0 MB are needed, and 1.0 MB are free")
        check(folder, needed)

    disk_space.check_free_space = check_with_fault


def no_space_for_export_at_first() -> None:
    """The first check finds no space, a quota interrupts the first file, and then there is space."""
    free, write_file = disk_space.free_bytes, hf_folder.write_file

    def free_with_fault(folder: Any) -> int:
        return 1000 if folder.name == "export" and count("checks") == 1 else free(folder)

    def write_with_fault(*arguments: Any, **named: Any) -> None:
        if count("files") == 1:
            raise OSError(122, "Disk quota exceeded")
        write_file(*arguments, **named)

    disk_space.free_bytes, hf_folder.write_file = free_with_fault, write_with_fault
    checkpointing.EXPORT_RETRY_S = 0.05


def no_space_for_export() -> None:
    free = disk_space.free_bytes
    disk_space.free_bytes = lambda folder: 1000 if folder.name == "export" else free(folder)
    checkpointing.EXPORT_RETRY_S = 0.05


DISK_FAULTS: dict[str, Callable[[], None]] = {
    work.__name__: work
    for work in (
        full_in_first_save,
        full_in_metadata_of_second_save,
        no_space_for_last_checkpoint,
        no_space_for_export_at_first,
        no_space_for_export,
    )
}


def main(disk: str, *arguments: str) -> None:
    if disk in DISK_FAULTS:
        DISK_FAULTS[disk]()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = train.main(arguments)
    print(
        "RESULT " + json.dumps({"code": code, "out": out.getvalue()[-6000:], "err": err.getvalue()[-3000:]}), flush=True
    )
    if threading.active_count() == 1 and code == 0:
        ranks.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
