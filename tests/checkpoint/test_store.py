"""The checkpoint store on two ranks: rotation, random states, failed writes, damage, slow and dying ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.checkpoint.manifest import split_by_size

RunRanks = Callable[..., list[dict[str, Any]]]
SCRIPT = "tests/checkpoint/ranks_store.py"


def test_checkpoints_are_complete_or_absent(tmp_path: Path, run_ranks: RunRanks) -> None:
    results = run_ranks(2, SCRIPT, "life_cycle", str(tmp_path))
    for report in results:
        assert report["has_checkpoint_before_save"] is False
        assert report["after_rotation"] == ["step_000002", "step_000003"]
        assert report["latest"] == "step_000003"
        assert report["with_keep_before_step"] == ["step_000002", "step_000004", "step_000005"]
        assert report["rng_equal"] is True and report["log"] == []
        assert report["rng_reseeded"] is True and "step_000004 was written in another layout" in report["reseed_log"]
        assert report["host"] == {"step": 4}
        for error in (report["error"], report["no_space"]):
            assert error.startswith(f"could not write checkpoint {tmp_path}/checkpoints/step_000005: ")
            assert error.endswith("; earlier checkpoints are intact")
        assert "No space left on device" in report["error"]
        assert "are needed, and" in report["no_space"] and "are free" in report["no_space"]
        assert report["after_failed_saves"] == ["latest", "step_000003", "step_000004"]
        assert report["newest_at_step_1e6"] == "step_1000000" and report["cleanup_failure_logged_by_lead"]
    expected = {
        "flipped": "part_1.bin differs from its checksum",
        "rng missing": "rng_00001.pt is missing",
        "rng truncated": "rng_00000.pt is truncated or of another size",
        "host missing": "host.json is missing",
        "host foreign": "host.json does not name its step",
        "manifest missing": "manifest.json is missing",
        "manifest text": "manifest.json is broken",
        "manifest binary": "manifest.json is broken",
        "manifest list": "manifest.json is broken",
        "manifest deep": "manifest.json is broken",
        "files list": "manifest.json is broken",
        "entry text": "manifest.json is broken",
        "size text": "manifest.json is broken",
        "outside": "manifest.json is broken",
        "no host": "manifest.json does not list host.json",
        "part a folder": "part_0.bin is truncated or of another size",
    }
    for report in results:
        for name, text in expected.items():
            result = report["damages"][name]
            assert result.startswith(f"step_000007 | skipping checkpoint {tmp_path}"), (name, result)
            assert text in result, (name, result)
        assert f"none of the checkpoints in {tmp_path}/checkpoints is complete" in report["none_complete"]
        assert (
            "step_000008: part_0.bin" in report["none_complete"]
            and "step_000007: part_0.bin" in report["none_complete"]
        )


def test_changes_of_a_model_wait_for_copies_of_a_save(tmp_path: Path, run_ranks: RunRanks) -> None:
    for report in run_ranks(2, SCRIPT, "deferred_copies", str(tmp_path)):
        assert len(report["old"]) == 9 and all(report["old"].values()), report
        assert all(report["changed"].values()), report  # else the old values prove nothing
        # All of these saves have the first one's plan, which describes the same files as a new one.
        assert not any(report["planned"].values()) and report["same table"], report
        assert report["plans"] == [1, 2, 2]  # for other shards, for other shards on one rank, for the same ones


def test_save_waits_for_slow_rank_beyond_collective_timeout(tmp_path: Path, run_ranks: RunRanks) -> None:
    results = run_ranks(2, SCRIPT, "slow_rank", str(tmp_path))
    for report in results:
        assert report["found newest"] and report["hashes"] and report["verified once"]
        assert min(report["verified per rank"]) >= 2  # both ranks have verified files
        assert report["modes"] == ["0o644"]
        assert {name.split("_")[2] for name in report["written"]} == {"0", "1"}  # both ranks have written
    # Files that their writer reports are hashed while they are written, and never read back for it.
    assert [name for report in results for name in report["hashed after write"]] == ["common.bin"]


def test_save_fails_when_a_rank_dies(tmp_path: Path, run_ranks: RunRanks) -> None:
    survivor, _ = run_ranks(2, SCRIPT, "dying_rank", str(tmp_path), timeout=60.0)
    assert survivor["error"]


def test_split_by_size_balances_bytes() -> None:
    sizes = {"a": 100, "b": 60, "c": 50, "d": 5, "e": 0}
    assert [sorted(names) for names in split_by_size(sizes, 2)] == [["a", "d", "e"], ["b", "c"]]
    assert sorted(name for names in split_by_size(dict.fromkeys("abcd", 0), 4) for name in names) == list("abcd")
    assert split_by_size({}, 2) == [[], []]
