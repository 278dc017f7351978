"""A rehearsal finds faults that were seeded into the configuration or the code of a job, and says where they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from seeded_faults import HF, JOB  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("seeded_faults.py")
MESSAGES = {
    "swapped collectives": ("rank 0 does all_reduce (32 bytes", "rank 4 does broadcast (32 bytes"),
    "a collective that a rank skips": ("ranks 0 and 3 should do the same", "rank 0 does all_reduce (4 bytes"),
    "a collective that a stage skips": ("would wait for ever for all_reduce (4 bytes", "rank 0"),
    "a group of a stage alone": ("rank 4 makes no group METRICS of ranks [0, 1, 2, 3], which rank 0 makes",),
    "groups in another order": ("rank 0 makes the groups FIRST when rank 4 makes the groups SECOND",),
    "padding on a rank": ("ranks 0 and 3 should do the same", "all_gather_single"),
    "no wait": ("rank 0: nobody has waited for all_reduce (4 bytes",),
    "blocked sends": ("rank 0 would wait for ever for send to rank 4", "rank 4 waits for send to rank 0"),
    "a send as first use": ("the first use of the group of the ranks [0, 2, 4, 6] is a",),
    "an unreceived message": ("rank 0 would wait for ever for send to rank 4 (32 bytes",),
    "an unsent message": ("rank 4 would wait for ever for receive from rank 0 (32 bytes",),
    "swapped messages": ("rank 0 gives send to rank 4 (32 bytes", "taken as receive from rank 0 (64 bytes"),
    "splits that disagree": ("ranks 0 and 3 should do the same", "all_to_all_single"),
    "one more micro-batch": ("would wait for ever for", "rank 4"),
    "long responses": ("actor update on ranks 0-3), which does not fit on a GPU of 0.004 GB",),
    "logits at once": ("actor update on ranks 4-7), which does not fit on a GPU of 0.004 GB", "logprobs.py"),
    "no room for the engine": ("(generate on ranks 0-3), which does not fit on a GPU of 0.004 GB",),
    "a leak": ("rank 0 needs more memory after a second step than after the first:", "seeded_faults.py"),
    "host memory": ("the fullest node (ranks 0-7) needs", "of host memory for tensors, which does not fit in 0.01 GB"),
    "uneven stages": ("stage 1 (ranks 4-7) does 1.6 times the work of the mean stage: the others wait",),
}
"""Parts of the report by fault."""
EVERY_DAY = ("swapped collectives", "a collective that a rank skips", "a leak", "logits at once")


def rehearse(names: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *names]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=550)
    assert result.returncode == 0, result.stderr[-3000:]
    records = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [item for item in records if "error" in item] == []
    assert {item["name"] for item in records} == set(names)
    return {item["name"]: item for item in records}


def check(records: dict[str, Any]) -> None:
    for name, record in records.items():
        if name == "nothing":
            assert record["faults"] == [] and record["fits"], record["text"]
            assert "no rank would wait for ever" in record["text"] and "which fits on a GPU" in record["text"]
            assert "modelled on H100s, with " in record["text"]
        else:
            assert record["faults"] or not record["fits"], name
            assert [part for part in MESSAGES[name] if part not in record["text"]] == [], (name, record["text"])


@pytest.mark.slow
def test_finds_faults() -> None:
    check(rehearse(("nothing", *EVERY_DAY)))


@pytest.mark.nightly
def test_finds_every_fault() -> None:
    assert len(MESSAGES) == 20
    check(rehearse(tuple(name for name in MESSAGES if name not in EVERY_DAY)))


@pytest.mark.slow
@pytest.mark.parametrize("gpu_gb", [0.004, 0.002])
def test_command_line(tmp_path: Path, gpu_gb: float) -> None:
    """The exit status says whether the job would run."""
    model = tmp_path / "config.json"
    model.write_text(json.dumps(HF))
    config = tmp_path / "job.yaml"
    sections = JOB | {"model": JOB["model"] | {"hf_config": str(model)}, "run": JOB["run"] | {"dir": str(tmp_path)}}
    config.write_text(json.dumps({"algorithm": "grpo"} | sections))
    command = [sys.executable, "-m", "megarl.train", str(config), "--rehearse", f"parallel.gpu_gb={gpu_gb}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)
    fits = gpu_gb == 0.004
    assert result.returncode == (0 if fits else 1), result.stderr[-3000:]
    for line in (
        "rehearsed one step of 8 ranks: 2 kinds of ranks, 4 played",
        "every conversation has 1,024 tokens; 1 of 1 update with 2 of 2 micro-batches on each rank",
        "no rank would wait for ever",
        "pipeline: stage 1 (ranks 4-7) does 1.2 times the work of the mean stage: the others wait",
        "idle in log-probs and updates, modelled: 33% (ranks 4-7) to",
        "the fullest node (ranks 0-7) needs",
        "the largest of the trainer's tensors on ranks 0-3:",
        f"(actor update on ranks 0-3), which {'fits' if fits else 'does not fit'} on a GPU of {gpu_gb:g} GB",
    ):
        assert line in result.stdout, (line, result.stdout)
