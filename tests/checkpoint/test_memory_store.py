"""Checkpoints in the memory of nodes: copies on other nodes, lost nodes, damage, interrupted saves, strangers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.checkpoint.memory_store import forget_step, read_record, write_record

RunRanks = Callable[..., list[dict[str, Any]]]


def test_any_lost_node_is_replaced_by_copies(tmp_path: Path, run_ranks: RunRanks) -> None:
    reports = run_ranks(3, "tests/checkpoint/ranks_memory_store.py", str(tmp_path))
    for rank, report in enumerate(reports):
        assert report["nodes"] == [[0], [1], [2]] and report["partner"] == (rank + 1) % 3
        assert report["is_stale_removed"] and report["at_first"] is None
        enough, lacks = report["lacks"]
        assert enough == [] and len(lacks) == 3  # two checkpoints of this rank and of the one before
        assert lacks[rank].startswith(f"checkpoints in memory need up to {4 * (1 << 60) / 1e9:.1f} GB, and ")
        assert report["steps"] == ["step_000002"] and report["recorded"] == 2
        before = (rank - 1) % 3  # whose copies this node has
        expected = {"manifest.json", *(f"actor/__{number}_0.distcp" for number in (rank, before))}
        expected |= {
            f"{name}" for number in (rank, before) for name in (f"rng_0000{number}.pt", f"unhashed_{number}.bin")
        }
        expected |= {"host.json"} if 0 in (rank, before) else set()
        expected |= {"actor/.metadata"} if 2 in (rank, before) else set()
        assert set(report["files"]) == expected

        assert report["found"] == ["step_000002"] and report["log"] == []
        shards = {name for name in report["files_again"] if name.endswith(".distcp")}
        assert shards == {name for name in expected if name.endswith(".distcp")}  # nothing that nobody here reads
        others = {f"rng_0000{number}.pt" for number in range(3)} | {f"unhashed_{number}.bin" for number in range(3)}
        assert set(report["files_again"]) == shards | others | {"host.json", "manifest.json", "actor/.metadata"}
        assert report["shards"] == ["2 of 0", "2 of 1", "2 of 2"] and report["repaired"] == f"2 of {rank}"
        assert report["unknown"] == [None, False]

        assert "could not write checkpoint" in report["error"] and "No space left on device" in report["error"]
        assert report["error"].endswith("earlier checkpoints are intact")
        assert report["after_failures"] == "step_000002" and report["steps_after_failures"] == ["step_000002"]
        (line,) = report["log_of_failures"]
        assert line.startswith("skipping checkpoint of step 4 in memory: manifest.json is broken")
        assert "killed" in report["half_error"] and report["after_half"] == "step_000002"

        assert "is no file of a checkpoint" in report["outside"] and "is no file" in report["read_outside"]
        assert "step_000002/host.json is of no checkpoint that is being written" in report["other_step"]
        assert report["stranger"] is True and "differs from its checksum" in report["damaged"]

        assert report["after_two_lost"] is None
        (line,) = report["log_of_two"]
        assert line.startswith("skipping checkpoint of step 6 in memory: no node has actor/__0_0.distcp")
        assert report["cleared"] == [False, False, False]


def test_record_of_a_copied_run_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_record(tmp_path / "run", "0" * 16, 5)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert read_record(tmp_path / "copy") == ("", 0) and forget_step(tmp_path / "copy") == 0
    assert read_record(tmp_path / "run") == ("0" * 16, 5)
    assert forget_step(tmp_path / "run") == 5 and read_record(tmp_path / "run") == ("0" * 16, 0)
