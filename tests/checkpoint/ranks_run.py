"""One run of the whole program. argv: what happens to the disk (nothing, or what `DISKS` names), then as for
`megarl.train`. Prints the exit code, and what it said on both streams."""

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


def full_once() -> None:
    """A write of the first checkpoint fails on the last rank, in the middle of a file of the model."""
    write = manifest.HashingFile.write

    def writing(self: manifest.HashingFile, data: Any) -> int:
        if "step_000001.tmp/actor/__" in self._file.name and os.environ["RANK"] == str(
            int(os.environ["WORLD_SIZE"]) - 1
        ):
            self.failure = OSError(28, "No space left on device")
            raise self.failure
        return write(self, data)

    manifest.HashingFile.write = writing  # type: ignore[method-assign]


def full_at_rank_0s() -> None:
    """Of the second checkpoint, a file that Megatron's rank 0 writes between two collectives."""
    from torch.distributed.checkpoint import FileSystemWriter

    from megarl.megatron import dist_checkpoint

    def finish(self: Any, *arguments: Any) -> None:
        if count("finish") == 2:
            raise OSError(28, "No space left on device")
        FileSystemWriter.finish(self, *arguments)

    dist_checkpoint.filesystem_async.FileSystemWriterAsync.finish = dist_checkpoint._defer_failure(finish)


def no_room_for_the_last() -> None:
    """By the first look at each save."""
    demand = disk_space.check_free_space

    def demanding(folder: Any, needed: int) -> None:
        if folder.name == "checkpoints" and count("saves") == 2:
            raise OSError(28, "about 5.0 MB are needed, and 1.0 MB are free")
        demand(folder, needed)

    disk_space.check_free_space = demanding


def no_room_for_the_export_at_first() -> None:
    """Then room, which a quota takes away in the middle of the file, then room indeed."""
    free, write_file = disk_space.free_bytes, hf_folder.write_file

    def found(folder: Any) -> int:
        return 1000 if folder.name == "export" and count("looks") == 1 else free(folder)

    def writing(*arguments: Any, **named: Any) -> None:
        if count("files") == 1:
            raise OSError(122, "Disk quota exceeded")
        write_file(*arguments, **named)

    disk_space.free_bytes, hf_folder.write_file = found, writing
    checkpointing.EXPORT_RETRY_S = 0.05


def no_room_for_the_export() -> None:
    free = disk_space.free_bytes
    disk_space.free_bytes = lambda folder: 1000 if folder.name == "export" else free(folder)
    checkpointing.EXPORT_RETRY_S = 0.05


DISKS: dict[str, Callable[[], None]] = {
    work.__name__: work
    for work in (
        full_once,
        full_at_rank_0s,
        no_room_for_the_last,
        no_room_for_the_export_at_first,
        no_room_for_the_export,
    )
}


def main(disk: str, *arguments: str) -> None:
    if disk in DISKS:
        DISKS[disk]()
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
