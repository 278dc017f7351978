"""Two ranks write, damage and find checkpoints. argv: an empty folder."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch

from megarl.checkpoint.store import CheckpointStore
from megarl.config import ConfigError, ParallelConfig
from megarl.parallel import ranks


def main(folder: Path) -> None:
    place = ranks.initialize(ParallelConfig(world_size=2), timeout_s=60)
    store = CheckpointStore(folder, keep=2)
    facts: dict[str, object] = {"found_before": store.newest() is not None}

    def write(content: str):
        def parts(target: Path) -> None:
            (target / f"part_{place.rank}.bin").write_text(content)

        return parts

    for step in (1, 2, 3):
        store.save(step, {"step": step, "coef": 0.1 + step}, write(f"step {step}"))
    facts["kept"] = sorted(path.name for path in (folder / "checkpoints").glob("step_*"))
    facts["latest"] = (folder / "checkpoints" / "latest").read_text()

    # Random states come back: the numbers drawn after a load are those drawn after the save.
    def draws() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    newest = store.newest()
    assert newest is not None
    store.save(4, {"step": 4}, write("step 4"))
    expected = draws()
    host = store.load(folder / "checkpoints" / "step_000004")
    facts["rng_equal"] = draws() == expected
    facts["host"] = host

    # A failure on one rank is an error on both, and the earlier checkpoints stay.
    def failing(target: Path) -> None:
        if place.rank == 1:
            raise OSError(28, "No space left on device")

    try:
        store.save(5, {"step": 5}, failing)
        facts["error"] = ""
    except ConfigError as error:
        facts["error"] = str(error)
    ranks.barrier()

    # Damage: a flipped byte in step 4 makes step 3 the newest; a missing file there leaves none.
    if place.rank == 0:
        damaged = folder / "checkpoints" / "step_000004" / "part_1.bin"
        content = bytearray(damaged.read_bytes())
        content[0] ^= 1
        damaged.write_bytes(content)
    ranks.barrier()
    after_flip = store.newest()
    facts["after_flip"] = after_flip.name if after_flip else None
    if place.rank == 0:
        (folder / "checkpoints" / "step_000003" / "host.json").unlink()
    ranks.barrier()
    facts["after_loss"] = store.newest() is not None
    print("RESULT " + json.dumps(facts))
    ranks.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
