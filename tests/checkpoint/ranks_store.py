"""Two ranks write, damage and find checkpoints. argv: what to try, an empty folder."""

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
        return {}  # hashed by all

    return written_by(write)


def written_by(write: Write) -> Callable[[Path], RankWrite]:
    return lambda target: RankWrite(lambda ended: write(target))


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except ConfigError as error:
        return str(error)
    return ""


def on_lead(work: Callable[[], Any]) -> None:
    ranks.barrier()  # others may still be looking
    if ranks.is_lead():
        work()
    ranks.barrier()


def whole(folder: Path) -> dict[str, object]:
    """Rotation, random states, failures to write, damage."""
    place = ranks.initialize(ParallelConfig(world_size=2), timeout_s=60)
    said: list[str] = []
    ours = Store(folder, keep=2, layout=(2, 1), log=said.append)
    place_of, rank = folder / "checkpoints", place.job.rank
    facts: dict[str, object] = {"found_before": ours.find_newest() is not None}
    for step in (1, 2, 3):
        ours.save(step, {"step": step, "coef": 0.1 + step}, parts(f"step {step}"))
    facts["kept"] = sorted(path.name for path in place_of.glob("step_*"))
    facts["latest"] = (place_of / "latest").read_text()
    ranks.barrier()  # the other may still be looking

    spares = Store(folder / "spares", keep=2)
    spares.keep_before_step = 3  # updates have been skipped from then on
    for step in range(1, 6):
        spares.save(step, {"step": step}, parts(f"step {step}"))
    facts["spared"] = sorted(path.name for path in (folder / "spares" / "checkpoints").glob("step_*"))

    # Random states come back: the numbers drawn after a load are those drawn after the save.
    def draws() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    ours.save(4, {"step": 4}, parts("step 4"))
    expected = draws()
    facts["host"] = ours.load(place_of / "step_000004")
    facts["rng_equal"] = draws() == expected
    facts["said"] = list(said)
    other = Store(folder, keep=2, layout=(2, 2), log=said.append)
    other.load(place_of / "step_000004")
    first = draws()
    other.load(place_of / "step_000004")
    facts["rng_anew"] = first == draws() != expected and len(set(map(str, ranks.all_gather_objects(first)))) == 1
    facts["said_anew"] = said.pop()

    # A failure on one rank is an error on both, nothing is left of it, and the earlier checkpoints stay.
    def failing(target: Path) -> dict[Path, Entry]:
        (target / "half.bin").write_text("half")
        if rank == 1:
            raise OSError(28, "No space left on device")
        return {}

    facts["error"] = error_of(lambda: ours.save(5, {"step": 5}, written_by(failing)))
    facts["no_room"] = error_of(lambda: ours.save(5, {"step": 5}, parts("step 5"), needed=1 << 60))
    facts["left"] = sorted(path.name for path in place_of.iterdir())

    # What is no checkpoint is none, and what cannot be tidied up is no failure.
    def strange() -> None:
        for name in ("step_abc", "step_", "step_000009.tmp", "backup", "step_99"):
            (place_of / name).mkdir()
        (place_of / "step_000077").write_text("a file")
        (place_of / "latest").unlink()
        (place_of / "latest").mkdir()
        (place_of / "latest" / "x").write_text("")

    on_lead(strange)
    ours.save(1_000_000, {"step": 1_000_000}, parts("far"))
    newest = ours.find_newest()
    facts["far"] = newest and newest.name
    facts["said_latest"] = bool([text for text in said if "cleaning up" in text]) == (rank == 0)
    on_lead(lambda: shutil.rmtree(place_of / "step_1000000"))

    # Damage: each makes an older one the newest.
    actual: dict[str, str] = {}
    manifest_of = place_of / "step_000008" / "manifest.json"

    def entry(change: Callable[[dict[str, Any]], Any]) -> Callable[[], None]:
        def rewrite() -> None:
            tree = json.loads(manifest_of.read_text())
            change(tree)
            manifest_of.write_text(json.dumps(tree))

        return rewrite

    def flip() -> None:
        damaged = bytearray((place_of / "step_000008" / "part_1.bin").read_bytes())
        damaged[0] ^= 1
        (place_of / "step_000008" / "part_1.bin").write_bytes(damaged)

    def foreign_host() -> None:
        host = place_of / "step_000008" / "host.json"
        host.write_text("[]")
        entry(lambda tree: tree["files"].update({"host.json": manifest.hash_file(host)._asdict()}))()

    damages: dict[str, Callable[[], Any]] = {
        "flipped": flip,
        "rng missing": lambda: (place_of / "step_000008" / "rng_00001.pt").unlink(),
        "rng truncated": lambda: os.truncate(place_of / "step_000008" / "rng_00000.pt", 100),
        "host missing": lambda: (place_of / "step_000008" / "host.json").unlink(),
        "host foreign": foreign_host,
        "manifest missing": manifest_of.unlink,
        "manifest text": lambda: manifest_of.write_text("no JSON"),
        "manifest binary": lambda: manifest_of.write_bytes(b"\xff\xfe\x00"),
        "manifest list": lambda: manifest_of.write_text("[]"),
        "manifest deep": lambda: manifest_of.write_text("[" * 100_000),
        "files list": entry(lambda tree: tree.update(files=["a"])),
        "entry text": entry(lambda tree: tree["files"].update({"host.json": "x"})),
        "size text": entry(lambda tree: tree["files"]["host.json"].update(bytes="12")),
        "outside": entry(lambda tree: tree["files"].update({"../../x": {"bytes": 1, "sha256": ""}})),
        "no host": entry(lambda tree: tree["files"].pop("host.json")),
        "part a folder": lambda: (
            (place_of / "step_000008" / "part_0.bin").unlink(),
            (place_of / "step_000008" / "part_0.bin").mkdir(),
        ),
    }
    ours.save(7, {"step": 7}, parts("step 7"))
    intact = ours.save(8, {"step": 8}, parts("step 8"))
    on_lead(lambda: shutil.copytree(intact, folder / "intact"))
    for name, damage in damages.items():
        on_lead(lambda: (shutil.rmtree(intact), shutil.copytree(folder / "intact", intact)))
        on_lead(damage)
        said.clear()
        after = ours.find_newest()
        actual[name] = f"{after and after.name} | {' '.join(said)}"
    facts["damages"] = actual
    on_lead(lambda: (place_of / "step_000007" / "part_0.bin").unlink())
    facts["none_whole"] = error_of(ours.find_newest)
    return facts


def slow(folder: Path) -> dict[str, object]:
    """Collectives wait half a second, and every part of a checkpoint takes one on one of the ranks."""
    import tiny

    from megarl.megatron import optimizer
    from megarl.megatron.dist_checkpoint import StagedCheckpoint, restore_model
    from megarl.megatron.trainer_model import MegatronModel

    chosen = tiny.config(world=2, ep=2)
    place = ranks.initialize(chosen.parallel, timeout_s=60)
    model = MegatronModel(tiny.HF["qwen3_moe"], chosen, place, "actor", total_updates=3)
    ours = Store(folder, keep=2, storage_timeout_s=100)
    hash_file, finish, sharded_state = manifest.hash_file, manifest.HashingFile.finish, optimizer.sharded_state
    verified: list[str] = []

    def slowly(work: Callable[..., Any], rank: int) -> Callable[..., Any]:
        def slowed(*arguments: Any, **named: Any) -> Any:
            if rank == place.job.rank:
                time.sleep(1)
            return work(*arguments, **named)

        return slowed

    def noted(path: Path) -> Any:
        verified.append(str(path.name))
        return slowly(hash_file, len(verified) == 1)(path)

    manifest.hash_file = noted  # type: ignore[assignment]
    manifest.HashingFile.finish = slowly(finish, 1)  # type: ignore[method-assign]
    optimizer.sharded_state = slowly(sharded_state, 1)
    ranks._timeout_s = 0.5
    with contextlib.suppress(RuntimeError), ranks.with_timeout(100):
        pass  # from here on all groups have it

    def write(target: Path) -> Any:
        if place.job.rank == 0:
            (target / "common.bin").write_text("which nobody has hashed")
        staged = StagedCheckpoint(model, target / "actor")
        return RankWrite(lambda ended: staged.write(2, ended), staged.finish)

    saved = ours.save(1, {"step": 1}, write)
    hashed_later = list(verified)
    verified.clear()
    with ranks.with_timeout(100):
        actual = ours.find_newest()  # whose own patience ends before that of the block
        restore_model(model, saved / "actor")
        everyone = ranks.all_gather_objects(verified)
    tree = json.loads((saved / "manifest.json").read_text())["files"]
    local = {name: hashlib.sha256((saved / name).read_bytes()).hexdigest() for name in tree}
    lie = {str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()} - {"manifest.json"}
    return {
        "found": actual == saved,
        "hashes": local == {name: entry["sha256"] for name, entry in tree.items()} and lie == set(tree),
        "hashed later": hashed_later,
        "verified once": sorted(name for names in everyone for name in names)
        == sorted(Path(name).name for name in tree),
        "shared": [len(names) for names in everyone],
        "modes": sorted({oct(path.stat().st_mode & 0o777) for path in saved.rglob("*") if path.is_file()}),
        "written": sorted(Path(name).name for name in tree if name.endswith(".distcp")),
    }


def killed(folder: Path) -> dict[str, object]:
    """A rank that dies in a save, for which the other would wait an hour."""
    place = ranks.initialize(ParallelConfig(world_size=2), timeout_s=3600)
    ours = Store(folder, keep=2, storage_timeout_s=3600)

    def write(target: Path) -> dict[Path, Entry]:
        if place.job.rank == 1:
            print("RESULT {}", flush=True)
            os._exit(0)
        return {}

    try:
        ours.save(1, {"step": 1}, written_by(write))
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": ""}


if __name__ == "__main__":
    os.umask(0o022)
    result = {"whole": whole, "slow": slow, "killed": killed}[sys.argv[1]](Path(sys.argv[2]))
    print("RESULT " + json.dumps(result), flush=True)
    if sys.argv[1] == "killed":
        os._exit(0)
    ranks._timeout_s = 60.0
    ranks.shutdown()
