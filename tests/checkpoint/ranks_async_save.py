"""Run the whole program once and disturb it while it writes a checkpoint.

argv: an event (a name in `EVENTS`, or empty), then the arguments of `megarl.train`. The run is a child of this process,
which prints the child's exit status, negative for a signal, and both of its output streams.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megarl import train
from megarl.checkpoint import manifest, store
from megarl.checkpoint.store import CheckpointStore
from megarl.megatron import optimizer
from megarl.megatron.dist_checkpoint import StagedCheckpoint
from megarl.megatron.trainer_model import MegatronModel
from megarl.parallel.host_copy import DeferredCopy
from megarl.processes.children import die_with_parent

LAST = int(os.environ["WORLD_SIZE"]) - 1
RANK = int(os.environ["RANK"])


def delay_writes(on_step: Callable[[int], None] = lambda step: None) -> None:
    """Delay each checkpoint's writes until the next step has changed the weights, or until the run waits for them.

    on_step is called in each step, from 1 on, while the save of the step before is pending."""
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
            metrics = train_step(self, *arguments)
            on_step(steps[0])
        finally:
            may_write.set()
        return metrics

    def staging(self: Any, *arguments: Any, **named: Any) -> None:
        may_write.clear()
        init(self, *arguments, **named)

    init = StagedCheckpoint.__init__
    StagedCheckpoint.__init__ = staging  # type: ignore[method-assign]
    StagedCheckpoint.write = writing  # type: ignore[method-assign]
    CheckpointStore.finish = finishing  # type: ignore[method-assign]
    MegatronModel.train_step = training  # type: ignore[method-assign]


def delay_copies() -> None:
    """Delay each copy of the state, which has started, until an update waits for it, or has been taken."""
    has_started, may_copy = threading.Event(), threading.Event()
    pending: list[Any] = []
    init, copy, wait, take_step = DeferredCopy.__init__, DeferredCopy._copy, DeferredCopy.wait, optimizer.take_step

    def initializing(self: Any, pairs: Iterable[Any], *arguments: Any) -> None:
        init(self, pairs, *arguments)
        if self._pairs:
            has_started.clear()
            may_copy.clear()
            pending.append(self)

    def copying(self: Any) -> None:
        has_started.set()
        may_copy.wait()
        copy(self)
        pending.remove(self)

    def waiting(self: Any) -> None:
        if self in pending:
            has_started.wait()
            may_copy.set()
        wait(self)

    def taking_step(*arguments: Any) -> Any:
        if pending:
            print("an update was taken before the copy was complete")
        result = take_step(*arguments)
        may_copy.set()  # a copy that the update has not waited for has new values
        return result

    DeferredCopy.__init__ = initializing  # type: ignore[method-assign]
    DeferredCopy._copy = copying  # type: ignore[method-assign]
    DeferredCopy.wait = waiting  # type: ignore[method-assign]
    optimizer.take_step = taking_step


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_write(part: str, action: Callable[[Any], None]) -> None:
    """Call `action` in the middle of writing a file of the second checkpoint, on the last rank."""
    write = manifest.HashingFile.write

    def writing(self: manifest.HashingFile, data: Any) -> int:
        if f"step_000002.tmp/{part}" in self._file.name and RANK == LAST:
            action(self)
        return write(self, data)

    manifest.HashingFile.write = writing  # type: ignore[method-assign]


def kill_while_writing() -> None:
    delay_writes()
    on_write("actor/__", lambda stream: die())


def kill_at_manifest() -> None:
    sync = store.sync

    def syncing(path: Path) -> None:
        if path.parent.name == "step_000002.tmp" and path.name == manifest.FILE_NAME:
            die()
        sync(path)

    store.sync = syncing


def kill_before_commit() -> None:
    commit = CheckpointStore._commit

    def committing(self: Any, partial: Path, final: Path) -> None:
        if final.name == "step_000002":
            die()
        commit(self, partial, final)

    CheckpointStore._commit = committing  # type: ignore[method-assign]


def kill_after_commit() -> None:
    name_latest = CheckpointStore._update_latest

    def naming(self: Any, name: str) -> None:
        if name == "step_000002":
            die()
        name_latest(self, name)

    CheckpointStore._update_latest = naming  # type: ignore[method-assign]


def disk_full() -> None:
    def refuse(stream: manifest.HashingFile) -> None:
        stream.failure = OSError(28, "No space left on device")
        raise stream.failure

    delay_writes()
    on_write("actor/__", refuse)


def stop_signal() -> None:
    def ask(step: int) -> None:
        if step == 2 and RANK == LAST:
            os.kill(os.getpid(), signal.SIGUSR1)

    delay_writes(ask)


def fail_on(failing_ranks: tuple[int, ...]) -> None:
    def fail(step: int) -> None:
        if step == 2 and RANK in failing_ranks:
            raise ValueError("injected fault")

    delay_writes(fail)


def all_ranks_fail() -> None:
    fail_on((0, LAST))


def one_rank_fails() -> None:
    fail_on((LAST,))


EVENTS: dict[str, Callable[[], None]] = {
    event.__name__: event
    for event in (
        delay_writes,
        delay_copies,
        kill_while_writing,
        kill_at_manifest,
        kill_before_commit,
        kill_after_commit,
        disk_full,
        stop_signal,
        all_ranks_fail,
        one_rank_fails,
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
