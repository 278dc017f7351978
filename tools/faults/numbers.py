"""Non-finite values: a gradient on one rank, log-probs of one sample."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from faults.fixtures import GROUPS, SAMPLES, STEPS, Fixtures, run_rows
from faults.job import shortened
from faults.points import Point
from faults.results import Findings, RowResult
from megarl.observe.rollout_log import read_records

MAX_SKIPPED = 1
"""Maximum number of updates skipped in a row."""


def run_scenario(fixtures: Fixtures, row_numbers: Sequence[int]) -> Iterator[tuple[int, RowResult]]:
    yield from run_rows(fixtures, row_numbers, {20: _gradient, 21: _log_probs})


def _gradient(fixtures: Fixtures) -> RowResult:
    """Run two data parallel ranks; the second spoils its gradients in step 2, and again in steps 4 and 5."""
    findings = Findings()
    once = Point("once", "gradient", 2, rank=1)
    twice = Point("twice", "gradient", 4, rank=1, repeats=MAX_SKIPPED)
    with fixtures.start_replayed(
        fixtures.new_folder("row_20") / "run",
        [once, twice],
        run__num_rollout=6,
        run__max_skipped_updates=MAX_SKIPPED,
        rollout__replay=fixtures.longer_answers,
        parallel__tp=1,
        parallel__ep=1,
    ) as job:
        ended = job.wait()
    rows = {row["step"]: row for row in job.metrics()}
    skipped = [step for step, row in rows.items() if row.get("actor/skipped")]
    findings.add(
        2 in skipped and 3 in rows and 3 not in skipped, "the update of step 2 was skipped, and the run went on"
    )
    finite = all(math.isfinite(row.get("actor/loss", 0.0)) for row in rows.values())
    findings.add(finite and not rows[3].get("actor/skipped") if 3 in rows else False, "the next one was taken, by both")
    back = re.search(r"[^.]*(went back to|are those of) \S*step_\d+( again)?", job.log)
    is_named = "gradient is not finite" in ended.reason
    findings.add(
        (ended.status == 2 and is_named) or bool(back),
        f"{MAX_SKIPPED + 1} in a row: {shortened(back[0] if back else ended.reason, 110)}",
        f"{MAX_SKIPPED + 1} in a row: {ended.reason}",
    )
    return findings.result(lost=GROUPS * SAMPLES * len(skipped))


def _log_probs(fixtures: Fixtures) -> RowResult:
    """Make the trainer's log-probs of one sample NaN in step 2."""
    findings = Findings()
    point = Point("nan", "logprobs", 2)
    # With two updates per step, log-probs are computed before the updates.
    with fixtures.start_replayed(
        fixtures.new_folder("row_21") / "run",
        [point],
        run__num_update=2,
        run__ppo_epochs=2,
        parallel__world_size=1,
        parallel__tp=1,
        parallel__ep=1,
    ) as job:
        job.wait_for_point("nan")
        ended = job.wait()
    findings.add(ended.status == 0, "the run went on", f"the run ended: {ended.reason}")
    rows = {row["step"]: row for row in job.metrics()}
    counted = {name: value for name, value in rows.get(2, {}).items() if "nonfinite" in name and value}
    findings.add(bool(counted), f"counted: {', '.join(counted)}", "no metric counts it")
    lost = None
    if 2 in rows:
        # Rollout 0 is the rank's first sample.
        (damaged,) = [record for record in read_records(job.run_dir, 2) if record.number == 0]
        left_out = damaged.advantages is None or not damaged.advantages.any()
        lost = int(rows[2].get("rollout/masked_nonfinite", 0))
        findings.add(left_out and lost == 1, "nothing was learned from it, and no other", f"left out: {lost}")
    all_finite = all(math.isfinite(row.get("actor/loss", math.nan)) for row in rows.values()) and len(rows) == STEPS
    findings.add(all_finite, "losses are numbers", "there are no losses of all steps")
    return findings.result(lost=lost)
