"""One run of the whole program, to which something happens while a checkpoint is written. argv: what (of `EVENTS`, or
nothing), then as for `megarl.train`. It is a child of this process, which prints how it ended: its exit status or the
signal, negative; and what it said on both streams."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl import train
from megarl.checkpoint import manifest, store
from megarl.checkpoint.store import CheckpointStore
from megarl.megatron.dist_checkpoint import StagedCheckpoint
from megarl.megatron.trainer_model import MegatronModel
from megarl.processes.children import die_with_parent

LAST = int(os.environ["WORLD_SIZE"]) - 1
RANK = int(os.environ["RANK"])


def late(on_step: Callable[[int], None] = lambda step: None) -> None:
    """A checkpoint is written after the next step has changed everything, or when somebody waits for it. on_step: is
    called in each step, from 1 on, while that of the step before is under way."""
    may_write, steps = threading.Event(), [0]
    write, finish, train_step = StagedCheckpoint.write, CheckpointStore.finish, MegatronModel.train_step

    def writing(self: Any, *arguments: Any) -> Any:
        may_write.wait()
        return write(self, *arguments)

    def finishing(self: Any) -> Any:
        may_write.set()
        return finish(self)

    def training(self: Any, *arguments: Any) -> Any:
        steps[0] += 1
        try:
            actual = train_step(self, *arguments)
            on_step(steps[0])
        finally:
            may_write.set()
        return actual

    def staging(self: Any, *arguments: Any) -> None:
        may_write.clear()
        init(self, *arguments)

    init = StagedCheckpoint.__init__
    StagedCheckpoint.__init__ = staging  # type: ignore[method-assign]
    StagedCheckpoint.write = writing  # type: ignore[method-assign]
    CheckpointStore.finish = finishing  # type: ignore[method-assign]
    MegatronModel.train_step = training  # type: ignore[method-assign]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_file(part: str, what: Callable[[Any], None]) -> None:
    """what: happens in the middle of a file of the second checkpoint's, on the last rank."""
    write = manifest.HashingFile.write

    def writing(self: manifest.HashingFile, data: Any) -> int:
        if f"step_000002.tmp/{part}" in self._file.name and RANK == LAST:
            what(self)
        return write(self, data)

    manifest.HashingFile.write = writing  # type: ignore[method-assign]


def killed_writing() -> None:
    late()
    at_file("actor/__", lambda stream: die())


def killed_at_the_manifest() -> None:
    sync = store.sync

    def syncing(path: Path) -> None:
        if path.parent.name == "step_000002.tmp" and path.name == manifest.FILE_NAME:
            die()
        sync(path)

    store.sync = syncing


def killed_before_it_has_its_name() -> None:
    commit = CheckpointStore._commit

    def committing(self: Any, partial: Path, final: Path) -> None:
        if final.name == "step_000002":
            die()
        commit(self, partial, final)

    CheckpointStore._commit = committing  # type: ignore[method-assign]


def killed_when_it_has() -> None:
    name_latest = CheckpointStore._update_latest

    def naming(self: Any, name: str) -> None:
        if name == "step_000002":
            die()
        name_latest(self, name)

    CheckpointStore._update_latest = naming  # type: ignore[method-assign]


def full() -> None:
    def refuse(stream: manifest.HashingFile) -> None:
        stream.failure = OSError(28, "No space left on device")
        raise stream.failure

    late()
    at_file("actor/__", refuse)


def asked_to_stop() -> None:
    def ask(step: int) -> None:
        if step == 2 and RANK == LAST:
            os.kill(os.getpid(), signal.SIGUSR1)

    late(ask)


def fails(where: tuple[int, ...]) -> None:
    def fail(step: int) -> None:
        if step == 2 and RANK in where:
            raise ValueError("a fault of ours")

    late(fail)


def all_fail() -> None:
    fails((0, LAST))


def one_fails() -> None:
    fails((LAST,))


EVENTS: dict[str, Callable[[], None]] = {
    event.__name__: event
    for event in (
        late,
        killed_writing,
        killed_at_the_manifest,
        killed_before_it_has_its_name,
        killed_when_it_has,
        full,
        asked_to_stop,
        all_fail,
        one_fails,
    )
}


def main(event: str, *arguments: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("out", "err")]
        parent = os.getpid()
        if not (pid := os.fork()):
            die_with_parent(parent)
            for number, output in enumerate(outputs, 1):
                os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT, 0o600), number)
            EVENTS.get(event, lambda: None)()
            code = train.main(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        out, err = (output.read_text()[-6000:] for output in outputs)
    result = {"code": os.waitstatus_to_exitcode(status), "out": out, "err": err}
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
