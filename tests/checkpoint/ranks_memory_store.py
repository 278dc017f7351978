"""Three ranks, each with a folder of its own as if it were a node, save into memory and find it. argv: an empty folder.

A new store in the same process stands for a restarted run.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.checkpoint import manifest, memory_store
from megarl.checkpoint.manifest import Entry
from megarl.checkpoint.memory_store import MemoryStore
from megarl.checkpoint.node_transfer import fetch_file, send_file
from megarl.checkpoint.store import RankWrite
from megarl.config import ConfigError, ParallelConfig
from megarl.parallel import ranks
from megarl.parallel.job_secret import seal


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except (ConfigError, OSError) as error:
        return str(error)
    return ""


def main(folder: Path) -> dict[str, Any]:
    rank = ranks.initialize(ParallelConfig(world_size=3), timeout_s=60).job.rank
    log: list[str] = []
    report: dict[str, Any] = {}

    def start() -> MemoryStore:
        return MemoryStore(folder / "run", folder / f"node_{rank}", 60.0, [3, 1], log.append, {})

    def stage(content: str, fails: bool = False) -> Callable[[Path], RankWrite]:
        def write(target: Path) -> dict[Path, Entry]:
            if fails:
                raise OSError(28, "No space left on device")
            (target / "actor").mkdir(exist_ok=True)
            shard = target / "actor" / f"__{rank}_0.distcp"
            (target / f"unhashed_{rank}.bin").write_text(content)
            return {shard: manifest.write_content(shard, content.encode())}

        def finish() -> dict[Path, Entry]:
            path = store.folder / f"step_{store.pending_step:06d}.tmp/actor/.metadata"
            return {path: manifest.write_content(path, content.encode())} if rank == 2 else {}

        return lambda target: RankWrite(lambda ended: write(target), finish)

    def save(step: int, fails: bool = False) -> Path:
        store.begin(step, {"step": step}, stage(f"{step} of {rank}", fails))
        return finish_save()

    def finish_save() -> Path:
        folder = store.finish()
        if store._removal is not None:
            store._removal.join()
        return folder

    def on_ranks(chosen: tuple[int, ...], work: Callable[[], Any]) -> None:
        ranks.barrier()
        if rank in chosen:
            work()
        ranks.barrier()

    def lose(*nodes: int) -> None:
        on_ranks(nodes, lambda: shutil.rmtree(store.folder))

    (folder / "run").mkdir(exist_ok=True)
    stale = folder / f"node_{rank}" / f"{memory_store.PREFIX}{os.getuid()}-stale"
    stale.mkdir(mode=0o700, parents=True)
    memory_store.STALE_S = -1.0
    store = start()
    report["nodes"], report["partner"], report["is_stale_removed"] = store.nodes, store.partner, not stale.exists()
    report["lacks"] = [store.check_space(size) for size in (1000, 1 << 60)]
    report["at_first"] = store.find_newest()
    save(1)
    newest = save(2)
    report["steps"] = sorted(path.name for path in store.folder.glob("step_*"))
    report["files"] = names(newest)
    report["recorded"] = json.loads(memory_store.record_path(folder / "run").read_text())["step"]

    # A node is lost, and then the shard of one more node is damaged.
    lose(1)
    store = start()
    report["found"] = [path and path.name for path in [store.find_newest()]]
    report["files_again"] = names(newest)
    store.fetch(newest / f"actor/__{(rank + 1) % 3}_0.distcp")  # what only other nodes have
    report["shards"] = [(newest / f"actor/__{number}_0.distcp").read_text() for number in range(3)]
    report["unknown"] = (store.fetch(newest / "actor/none"), (newest / "actor/none").exists())
    on_ranks((0,), lambda: (newest / "actor/__0_0.distcp").write_text("2 of X"))
    store = start()
    store.find_newest()
    report["repaired"] = (newest / f"actor/__{rank}_0.distcp").read_text()
    store.keep_only(newest)
    report["log"], log[:] = list(log), []

    # A save that fails or is interrupted leaves the checkpoint before.
    report["error"] = error_of(lambda: save(3, fails=rank == 1))
    store.begin(3, {"step": 3}, stage("interrupted"))
    on_ranks((0,), lambda: shutil.copytree(newest, store.folder / "step_000004"))
    on_ranks((0,), lambda: (store.folder / "step_000004/manifest.json").write_text("{}"))
    store.cancel()
    ranks.barrier()
    store = start()
    found = store.find_newest()
    report["after_failures"] = found and found.name
    store.keep_only(found)
    report["steps_after_failures"] = sorted(path.name for path in store.folder.glob("step_*"))
    report["log_of_failures"], log[:] = list(log), []

    # Half of the nodes have committed.
    commit = MemoryStore._commit

    def commit_on_two(self: MemoryStore, partial: Path, final: Path) -> None:
        if rank != 0:
            raise OSError("killed")
        commit(self, partial, final)

    MemoryStore._commit = commit_on_two  # type: ignore[method-assign]
    report["half_error"] = error_of(lambda: save(5))
    MemoryStore._commit = commit  # type: ignore[method-assign]
    store = start()
    found = store.find_newest()
    report["after_half"] = found and found.name

    # Strangers can neither write nor read.
    address = store._addresses[(rank + 1) % 3]
    assert address is not None
    store.begin(6, {"step": 6}, stage("six"))
    entry = Entry(5, "")
    victim = folder / "victim"
    report["outside"] = error_of(lambda: send_file(address, newest / "host.json", "../victim", entry, lambda: False))
    report["read_outside"] = error_of(lambda: fetch_file(address, "../../../etc/hostname", victim, entry))
    report["other_step"] = error_of(
        lambda: send_file(address, newest / "host.json", "step_000002/host.json", entry, lambda: False)
    )
    with socket.create_connection(address, 10) as stranger:
        stranger.recv(16)
        request = seal(json.dumps({"is_put": False, "name": "step_000002/host.json"}).encode(), "request", b"0" * 32)
        stranger.sendall(struct.pack("<I", len(request)) + request)
        report["stranger"] = stranger.recv(100) == b""
    report["damaged"] = error_of(
        lambda: send_file(address, newest / "rng_00000.pt", "step_000006.tmp/x", entry, lambda: False)
    )
    finish_save()

    # Two neighbors are lost at once.
    lose(0, 1)
    log.clear()
    store = start()
    report["after_two_lost"], report["log_of_two"] = store.find_newest(), list(log)
    store.clear()
    ranks.barrier()
    report["cleared"] = [store.folder.exists(), memory_store.record_path(folder / "run").exists(), victim.exists()]
    return report


if __name__ == "__main__":
    result = main(Path(sys.argv[1]))
    print("RESULT " + json.dumps(result, default=str), flush=True)
    ranks.shutdown()
