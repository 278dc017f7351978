"""Two ranks write, damage and find checkpoints. argv: the case, an empty folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "megatron"))

from megarl.checkpoint import manifest
from megarl.checkpoint.manifest import Entry, Write
from megarl.checkpoint.store import CheckpointStore, RankWrite
from megarl.config import ConfigError, ParallelConfig
from megarl.parallel import ranks


class Store(CheckpointStore):
    def save(self, step: int, host: dict[str, Any], stage: Callable[[Path], RankWrite], needed: int = 0) -> Path:
        self.begin(step, host, stage, needed)
        folder = self.finish()
        if self._removal is not None:
            self._removal.join()
        ranks.barrier()
        return folder


def parts(content: str) -> Callable[[Path], RankWrite]:
    def write(target: Path) -> dict[Path, Entry]:
        (target / f"part_{torch.distributed.get_rank()}.bin").write_text(content)
        return {}  # without hashes, so that all ranks hash the files

    return stage(write)


def stage(write: Write) -> Callable[[Path], RankWrite]:
    return lambda target: RankWrite(lambda is_cancelled: write(target))


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except ConfigError as error:
        return str(error)
    return ""


def on_lead(work: Callable[[], Any]) -> None:
    ranks.barrier()  # others may still be reading
    if ranks.is_lead():
        work()
    ranks.barrier()


def life_cycle(folder: Path) -> dict[str, object]:
    """Check rotation, random states, failed writes and damage."""
    layout_ranks = ranks.initialize(ParallelConfig(world_size=2), timeout_s=60)
    log: list[str] = []
    store = Store(folder, keep=2, layout=(2, 1), log=log.append)
    checkpoints, rank = folder / "checkpoints", layout_ranks.job.rank
    report: dict[str, object] = {"has_checkpoint_before_save": store.find_newest() is not None}
    for step in (1, 2, 3):
        store.save(step, {"step": step, "coef": 0.1 + step}, parts(f"step {step}"))
    report["after_rotation"] = sorted(path.name for path in checkpoints.glob("step_*"))
    report["latest"] = (checkpoints / "latest").read_text()
    ranks.barrier()  # the other rank may still be reading

    protecting = Store(folder / "protecting", keep=2)
    protecting.keep_before_step = 3  # as after updates that were skipped from step 3 on
    for step in range(1, 6):
        protecting.save(step, {"step": step}, parts(f"step {step}"))
    report["with_keep_before_step"] = sorted(
        path.name for path in (folder / "protecting" / "checkpoints").glob("step_*")
    )

    # Loading restores random states: the same numbers are drawn after it as after the save.
    def draws() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    store.save(4, {"step": 4}, parts("step 4"))
    expected = draws()
    report["host"] = store.load(checkpoints / "step_000004")
    report["rng_equal"] = draws() == expected
    report["log"] = list(log)
    other_layout = Store(folder, keep=2, layout=(2, 2), log=log.append)
    other_layout.load(checkpoints / "step_000004")
    first = draws()
    other_layout.load(checkpoints / "step_000004")
    report["rng_reseeded"] = first == draws() != expected and len(set(map(str, ranks.all_gather_objects(first)))) == 1
    report["reseed_log"] = log.pop()

    # A failure on one rank raises on both and removes the partial checkpoint; earlier checkpoints stay.
    def write_with_failure(target: Path) -> dict[Path, Entry]:
        (target / "half.bin").write_text("half")
        if rank == 1:
            raise OSError(28, "No space left on device")
        return {}

    report["error"] = error_of(lambda: store.save(5, {"step": 5}, stage(write_with_failure)))
    report["no_space"] = error_of(lambda: store.save(5, {"step": 5}, parts("step 5"), needed=1 << 60))
    report["after_failed_saves"] = sorted(path.name for path in checkpoints.iterdir())

    # Foreign files and folders are ignored, and a failed cleanup is only logged.
    def add_foreign_entries() -> None:
        for name in ("step_abc", "step_", "step_000009.tmp", "backup", "step_99"):
            (checkpoints / name).mkdir()
        (checkpoints / "step_000077").write_text("a file")
        (checkpoints / "latest").unlink()
        (checkpoints / "latest").mkdir()
        (checkpoints / "latest" / "x").write_text("")

    on_lead(add_foreign_entries)
    store.save(1_000_000, {"step": 1_000_000}, parts("last"))
    newest = store.find_newest()
    report["newest_at_step_1e6"] = newest and newest.name
    report["cleanup_failure_logged_by_lead"] = bool([text for text in log if "cleaning up" in text]) == (rank == 0)
    on_lead(lambda: shutil.rmtree(checkpoints / "step_1000000"))

    # With any damage, the checkpoint before is the newest complete one.
    results: dict[str, str] = {}
    manifest_of = checkpoints / "step_000008" / "manifest.json"

    def edit_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[], None]:
        def rewrite() -> None:
            tree = json.loads(manifest_of.read_text())
            change(tree)
            manifest_of.write_text(json.dumps(tree))

        return rewrite

    def flip_bit() -> None:
        damaged = bytearray((checkpoints / "step_000008" / "part_1.bin").read_bytes())
        damaged[0] ^= 1
        (checkpoints / "step_000008" / "part_1.bin").write_bytes(damaged)

    def foreign_host() -> None:
        host = checkpoints / "step_000008" / "host.json"
        host.write_text("[]")
        edit_manifest(lambda tree: tree["files"].update({"host.json": manifest.hash_file(host)._asdict()}))()

    damages: dict[str, Callable[[], Any]] = {
        "flipped": flip_bit,
        "rng missing": lambda: (checkpoints / "step_000008" / "rng_00001.pt").unlink(),
        "rng truncated": lambda: os.truncate(checkpoints / "step_000008" / "rng_00000.pt", 100),
        "host missing": lambda: (checkpoints / "step_000008" / "host.json").unlink(),
        "host foreign": foreign_host,
        "manifest missing": manifest_of.unlink,
        "manifest text": lambda: manifest_of.write_text("no JSON"),
        "manifest binary": lambda: manifest_of.write_bytes(b"\xff\xfe\x00"),
        "manifest list": lambda: manifest_of.write_text("[]"),
        "manifest deep": lambda: manifest_of.write_text("[" * 100_000),
        "files list": edit_manifest(lambda tree: tree.update(files=["a"])),
        "entry text": edit_manifest(lambda tree: tree["files"].update({"host.json": "x"})),
        "size text": edit_manifest(lambda tree: tree["files"]["host.json"].update(bytes="12")),
        "outside": edit_manifest(lambda tree: tree["files"].update({"../../x": {"bytes": 1, "sha256": ""}})),
        "no host": edit_manifest(lambda tree: tree["files"].pop("host.json")),
        "part a folder": lambda: (
            (checkpoints / "step_000008" / "part_0.bin").unlink(),
            (checkpoints / "step_000008" / "part_0.bin").mkdir(),
        ),
    }
    store.save(7, {"step": 7}, parts("step 7"))
    intact = store.save(8, {"step": 8}, parts("step 8"))
    on_lead(lambda: shutil.copytree(intact, folder / "intact"))
    for name, damage in damages.items():
        on_lead(lambda: (shutil.rmtree(intact), shutil.copytree(folder / "intact", intact)))
        on_lead(damage)
        log.clear()
        after = store.find_newest()
        results[name] = f"{after and after.name} | {' '.join(log)}"
    report["damages"] = results
    on_lead(lambda: (checkpoints / "step_000007" / "part_0.bin").unlink())
    report["none_complete"] = error_of(store.find_newest)
    return report


def slow_rank(folder: Path) -> dict[str, object]:
    """Save and find with collectives that time out after half a second, while each part takes a second on one rank."""
    import tiny

    from megarl.megatron import optimizer
    from megarl.megatron.dist_checkpoint import StagedCheckpoint, restore_model
    from megarl.megatron.trainer_model import MegatronModel

    chosen = tiny.config(world=2, ep=2)
    layout_ranks = ranks.initialize(chosen.parallel, timeout_s=60)
    model = MegatronModel(tiny.HF["qwen3_moe"], chosen, layout_ranks, "actor", total_updates=3)
    store = Store(folder, keep=2, storage_timeout_s=100)
    hash_file, finish, sharded_state = manifest.hash_file, manifest.HashingFile.finish, optimizer.sharded_state
    verified: list[str] = []

    def delay_on(work: Callable[..., Any], rank: int) -> Callable[..., Any]:
        def delayed(*arguments: Any, **named: Any) -> Any:
            if rank == layout_ranks.job.rank:
                time.sleep(1)
            return work(*arguments, **named)

        return delayed

    def slow_hash_file(path: Path) -> Any:
        verified.append(str(path.name))
        return delay_on(hash_file, len(verified) == 1)(path)

    manifest.hash_file = slow_hash_file  # type: ignore[assignment]
    manifest.HashingFile.finish = delay_on(finish, 1)  # type: ignore[method-assign]
    optimizer.sharded_state = delay_on(sharded_state, 1)
    ranks._timeout_s = 0.5
    with contextlib.suppress(RuntimeError), ranks.with_timeout(100):
        pass  # sets the timeout of all groups on exit

    def write(target: Path) -> Any:
        if layout_ranks.job.rank == 0:
            (target / "common.bin").write_text("written without a hash")
        staged = StagedCheckpoint(model, target / "actor")
        return RankWrite(lambda is_cancelled: staged.write(2, is_cancelled), staged.finish)

    saved = store.save(1, {"step": 1}, write)
    hashed_later = list(verified)
    verified.clear()
    with ranks.with_timeout(100):
        newest = store.find_newest()  # its own timeout is shorter than the block's
        restore_model(model, saved / "actor")
        verified_by_rank = ranks.all_gather_objects(verified)
    tree = json.loads((saved / "manifest.json").read_text())["files"]
    local = {name: hashlib.sha256((saved / name).read_bytes()).hexdigest() for name in tree}
    on_disk = {str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()} - {"manifest.json"}
    return {
        "found newest": newest == saved,
        "hashes": local == {name: entry["sha256"] for name, entry in tree.items()} and on_disk == set(tree),
        "hashed after write": hashed_later,
        "verified once": sorted(name for names in verified_by_rank for name in names)
        == sorted(Path(name).name for name in tree),
        "verified per rank": [len(names) for names in verified_by_rank],
        "modes": sorted({oct(path.stat().st_mode & 0o777) for path in saved.rglob("*") if path.is_file()}),
        "written": sorted(Path(name).name for name in tree if name.endswith(".distcp")),
    }


def deferred_copies(folder: Path) -> dict[str, object]:
    """Change a model in each possible way while a save has not copied its state, and save with plans of earlier
    saves."""
    import tiny

    from megarl.checkpoint.dist_checkpoint_reader import CheckpointReader
    from megarl.megatron import dist_checkpoint
    from megarl.megatron.dist_checkpoint import SaveSlot, StagedCheckpoint, restore_model
    from megarl.megatron.trainer_model import MegatronModel
    from megarl.types import TokenLoss

    chosen = tiny.config(world=2, ep=2, model={"dtype": "bfloat16"})
    layout_ranks = ranks.initialize(chosen.parallel, timeout_s=60)
    model = MegatronModel(tiny.HF["qwen3_moe"], chosen, layout_ranks, "actor", total_updates=9)
    rank, slot, plans = layout_ranks.job.rank, SaveSlot(), list[Path]()
    make_plan = dist_checkpoint._make_plan

    def counted(shards: Any, state: Any, path: Path) -> Any:
        plans.append(path)
        return make_plan(shards, state, path)

    dist_checkpoint._make_plan = counted

    def save(name: str, before_write: Callable[[], object] = lambda: None, **options: Any) -> dict[str, str]:
        """Return the checksum of each tensor file."""
        staged = StagedCheckpoint(model, folder / name, **options)
        before_write()
        written = staged.write()
        staged.finish()
        return {path.name: entry.sha256 for path, entry in written.items()}

    def train() -> None:
        model.train_step(tiny.batch(), lambda output, _: TokenLoss(-output.logprobs))  # type: ignore[operator]

    def load_shards() -> None:
        model.load_shards(lambda param, parts, part: torch.full_like(model.local_params()[param.megatron], 0.5))

    def load_tensors() -> None:
        shapes = {hf.name: hf.shape for param in model.params() for hf in param.hf}
        model.load_tensors((name, torch.full(shape, 0.25)) for name, shape in shapes.items())

    def load_reference() -> None:
        restore_model(model, folder / "reference", is_reference=True)

    with contextlib.ExitStack() as stack:

        def swap_weights() -> None:
            stack.enter_context(model.swap_weights(initial))

        def offload_and_change() -> None:
            model.offload()
            train()

        initial = model.host_copy()
        save("first", slot=slot)
        save("reference", is_reference=True)
        model.save_snapshot()
        train()
        is_old, is_changed, was_planned = {}, {}, {}
        for change in (
            *(train, model.rollback, load_shards, load_tensors, offload_and_change),
            *(load_reference, lambda: restore_model(model, folder / "first"), train, swap_weights),
        ):
            name = f"{len(is_old)} {change.__name__}"
            before = save(f"{name} before")
            plans.clear()
            is_old[name] = save(f"{name} later", change, slot=slot, copies="later") == before
            was_planned[name] = bool(plans)
            is_changed[name] = save(f"{name} after") != before
    readers = [CheckpointReader(folder / f"0 train {name}") for name in ("before", "later")]
    plans.clear()
    save("other shards", slot=slot, is_reference=True)
    num_plans = [len(plans)]
    if rank == 1:
        slot.plan = None
    save("other shards on one rank", slot=slot, is_reference=True)
    num_plans.append(len(plans))
    save("same shards", slot=slot, is_reference=True)
    return {
        "old": is_old,
        "changed": is_changed,
        "planned": was_planned,
        "same table": readers[0] == readers[1],
        "plans": [*num_plans, len(plans)],
    }


def dying_rank(folder: Path) -> dict[str, object]:
    """Save on two ranks, one of which dies, for which the other rank would wait an hour."""
    layout_ranks = ranks.initialize(ParallelConfig(world_size=2), timeout_s=3600)
    store = Store(folder, keep=2, storage_timeout_s=3600)

    def write(target: Path) -> dict[Path, Entry]:
        if layout_ranks.job.rank == 1:
            print("RESULT {}", flush=True)
            os._exit(0)
        return {}

    try:
        store.save(1, {"step": 1}, stage(write))
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": ""}


if __name__ == "__main__":
    os.umask(0o022)
    cases = {"life_cycle": life_cycle, "slow_rank": slow_rank, "dying_rank": dying_rank}
    result = (cases | {"deferred_copies": deferred_copies})[sys.argv[1]](Path(sys.argv[2]))
    print("RESULT " + json.dumps(result), flush=True)
    if sys.argv[1] == "dying_rank":
        os._exit(0)
    ranks._timeout_s = 60.0
    ranks.shutdown()
