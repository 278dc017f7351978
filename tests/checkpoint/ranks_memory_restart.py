"""Run the whole program once, as if each rank were a node, and kill ranks at some moment of a save into memory.

argv: an event (a name in `EVENTS`, `kill_in_update_N`, or empty), the folder for the nodes' memory, then the arguments
of `megarl.train`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ranks_async_save
from ranks_async_save import LAST, RANK, die

from megarl.checkpoint import manifest, memory_store, node_transfer
from megarl.checkpoint.memory_store import MemoryStore
from megarl.megatron.trainer_model import MegatronModel


def kill_in_update(number: int) -> None:
    """Kill all nodes in an update of a model, counted from the start of the program."""
    train_step, steps = MegatronModel.train_step, [0]

    def training(self: Any, *arguments: Any) -> Any:
        steps[0] += 1
        if steps[0] == number:
            die()
        return train_step(self, *arguments)

    MegatronModel.train_step = training  # type: ignore[method-assign]


def kill_while_writing() -> None:
    write = manifest.HashingFile.write

    def writing(self: manifest.HashingFile, data: Any) -> int:
        if RANK == LAST and "step_000002.tmp/actor/__" in self._file.name:
            die()
        return write(self, data)

    manifest.HashingFile.write = writing  # type: ignore[method-assign]


def kill_while_sending() -> None:
    receive, count = node_transfer._receive_file, [0]

    def receiving(connection: Any, path: Path, entry: manifest.Entry) -> None:
        if RANK == LAST and "step_000002.tmp" in str(path):
            count[0] += 1
            if count[0] == 2:
                die()
        receive(connection, path, entry)

    node_transfer._receive_file = receiving


def memory_full() -> None:
    """Refuse a file that the other node sends."""
    receive = node_transfer._receive_file

    def receiving(connection: Any, path: Path, entry: manifest.Entry) -> None:
        if RANK == LAST and "step_000002.tmp" in str(path):
            raise OSError(28, "No space left on device")
        receive(connection, path, entry)

    node_transfer._receive_file = receiving


def kill_before_commit() -> None:
    """Kill one node when the other may have renamed its part."""
    commit = MemoryStore._commit

    def committing(self: MemoryStore, partial: Path, final: Path) -> None:
        if RANK == LAST and final.name == "step_000002":
            die()
        commit(self, partial, final)

    MemoryStore._commit = committing  # type: ignore[method-assign]


def kill_after_commit() -> None:
    end = MemoryStore._end_save

    def ending(self: MemoryStore, final: Path) -> None:
        if RANK == LAST and final.name == "step_000002":
            die()
        end(self, final)

    MemoryStore._end_save = ending  # type: ignore[method-assign]


def kill_while_loading() -> None:
    fetch = memory_store.fetch_file

    def fetching(*arguments: Any) -> None:
        fetch(*arguments)
        die()

    memory_store.fetch_file = fetching


EVENTS: dict[str, Callable[[], None]] = {
    event.__name__: event
    for event in (
        kill_while_writing,
        kill_while_sending,
        memory_full,
        kill_before_commit,
        kill_after_commit,
        kill_while_loading,
    )
}

if __name__ == "__main__":
    name, memory, *rest = sys.argv[1:]
    os.environ["NODE_MEMORY"] = f"{memory}/node_{RANK}"
    ranks_async_save.EVENTS |= EVENTS
    if match := re.fullmatch(r"kill_in_update_(\d+)", name):
        ranks_async_save.EVENTS[name] = partial(kill_in_update, int(match[1]))
    ranks_async_save.main(name, *rest)
