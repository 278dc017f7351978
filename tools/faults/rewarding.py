"""Rewards that fail in every way, in one step of a run; the next step must be normal."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from faults.fixtures import Fixtures
from faults.job import shortened
from faults.judging import HUGE, NOTES, Service, requested_fault
from faults.recorded_answers import record, wordy
from faults.results import Findings, RowResult
from megarl.observe.rollout_log import read_records
from megarl.observe.rollout_table import Record

FAULTS: tuple[tuple[str, ...], ...] = (
    ("error", "once"),
    ("hang", "slow"),
    ("malformed", "nan", "text", "huge"),
    ("raise", "loop", "leave"),
    ("error",) * 4,
    ("flat",) * 4,
    (),
)
"""Misbehaviour that the answers of each group ask for in the first step; the remaining answers of a group ask for
none."""
SAMPLES = 6
TIMEOUT_S, TRIES, PAUSE_S = 3.0, 3, 0.2
MASKED = {"error", "hang", "malformed", "nan", "text", "huge", "raise", "loop", "leave"}


def answer(step: int, group: int, sample: int) -> str:
    fault_names = FAULTS[group]
    if group in (4, 5):
        fault_names = fault_names[:1] * SAMPLES  # all samples of the group
    request = f" [{fault_names[sample]}]" if step == 1 and sample < len(fault_names) else ""
    return wordy(step, group, sample) + request


def run_scenario(fixtures: Fixtures, row_numbers: Sequence[int]) -> Iterator[tuple[int, RowResult]]:
    fixtures.say(f"rows {', '.join(map(str, row_numbers))}")
    place = fixtures.new_folder("rewarding")
    notes = place / "notes"
    notes.mkdir()
    replay = record(place / "answers", fixtures.material / "model", (1, 2), len(FAULTS), SAMPLES, answer)
    service = Service()
    os.environ[NOTES] = str(notes)
    options = {"url": service.url, "private": True, "timeout": TIMEOUT_S, "tries": TRIES, "pause": PAUSE_S}
    options |= {"batch": 1, "concurrency": 8, "answer_mb": 1.0}
    try:
        with fixtures.start_replayed(
            place / "run",
            parallel__world_size=1,
            parallel__tp=1,
            parallel__ep=1,
            rollout__replay=replay,
            rollout__samples_per_prompt=SAMPLES,
            rollout__pass_env=[NOTES],
            data__prompts_per_step=len(FAULTS),
            run__num_rollout=2,
            run__save_every=0,
            run__export=False,
            reward__functions=["faults.judging:judge"],
            reward__timeout=TIMEOUT_S,
            reward__max_failed_frac=0.9,
            roles={"reward": {"backend": "http", "options": options}},
        ) as job:
            ended = job.wait()
    finally:
        service.close()
        del os.environ[NOTES]
    first, second = (Step(read_records(place / "run", step)) for step in (1, 2))
    common = Findings()
    common.add(ended.status == 0, "the run came to its end", f"the run ended: {ended.reason}")
    rows = job.metrics()
    for number, work in ((23, _errors), (24, _late), (25, _rejected), (26, _functions), (27, _groups)):
        if number in row_numbers:
            findings = Findings()
            findings.facts += [fact for fact in common.facts if not fact[0]]
            yield number, work(findings, first, second, service, notes, rows)


class Step:
    """Records of a step, by group and by requested misbehaviour."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records

    def asking(self, *fault_names: str) -> list[Record]:
        return [record for record in self.records if requested_fault(record.rollout.answer) in fault_names]

    def group(self, number: int) -> list[Record]:
        return [record for record in self.records if record.rollout.group == number]

    def masked(self, findings: Findings, *fault_names: str) -> int:
        """Check that the answers with these words have no reward and were not trained on. Return their number."""
        records = self.asking(*fault_names)
        good = [record for record in records if record.rollout.unscored and record.advantages is None]
        reasons = {text for record in records for text in record.rollout.unscored.values()}
        why = sorted({shortened(text.rpartition("/score: ")[2], 70) for text in reasons})
        findings.add(
            bool(records) and len(good) == len(records),
            f"{len(good)} masked, not 0 ({'; '.join(why[:4])})",
            f"{len(good)} of {len(records)} masked",
        )
        return len(records)

    def others_are_right(self, findings: Findings, group: int) -> None:
        """Check that the group's rewarded answers have advantages around their own mean: no failed one counts as 0."""
        scored = [record for record in self.group(group) if not record.rollout.unscored]
        rewards = [record.rollout.reward for record in scored]
        advantages = [record.advantage for record in scored]
        mean = sum(rewards) / max(1, len(rewards))
        good = all(
            advantage is not None and math.isfinite(advantage) and (advantage > 0) == (reward > mean)
            for advantage, reward in zip(advantages, rewards, strict=True)
            if abs(reward - mean) > 1e-9
        )
        is_centered = abs(sum(advantage or 0.0 for advantage in advantages)) < 1e-3
        findings.add(bool(scored) and good and is_centered, "the others are compared with each other alone")


Rows = Sequence[Mapping[str, float]]


def _errors(findings: Findings, first: Step, second: Step, service: Service, notes: Path, rows: Rows) -> RowResult:
    lost = first.masked(findings, "error")
    first.others_are_right(findings, 0)
    tries = [times for key, times in service.request_times.items() if requested_fault(key) == "error"]
    gaps = [times[i + 1] - times[i] for times in tries for i in range(len(times) - 1)]
    has_paused = all(len(times) == TRIES for times in tries) and min(gaps, default=0.0) >= PAUSE_S / 2
    findings.add(has_paused, f"{TRIES} tries each, {min(gaps, default=0):.2f} to {max(gaps, default=0):.2f} s apart")
    once = first.asking("once")
    findings.add(bool(once) and not once[0].rollout.unscored, "one that failed once has its reward")
    return findings.result(lost=lost)


def _late(findings: Findings, first: Step, second: Step, service: Service, notes: Path, rows: Rows) -> RowResult:
    lost = first.masked(findings, "hang")
    slow = first.asking("slow")
    findings.add(bool(slow) and not slow[0].rollout.unscored, "a slow answer is waited for")
    first.others_are_right(findings, 1)
    findings.add(len(rows) == 2, "the step finished")
    return findings.result(detect=TIMEOUT_S * TRIES, lost=lost)


def _rejected(findings: Findings, first: Step, second: Step, service: Service, notes: Path, rows: Rows) -> RowResult:
    lost = first.masked(findings, "malformed", "nan", "text", "huge")
    findings.add(
        0 < service.bytes_sent < HUGE / 50,
        f"of 1 GB {service.bytes_sent / 1e6:.0f} MB were sent",
        f"{service.bytes_sent} bytes were taken",
    )
    failed = sum(bool(record.rollout.unscored.get("service")) for record in first.records) / len(first.records)
    counted = bool(rows) and abs(rows[0].get("reward/service_failed_frac", -1) - failed) < 1e-6
    findings.add(counted, f"counted: reward/service_failed_frac {failed:.2f}")
    return findings.result(lost=lost)


def _functions(findings: Findings, first: Step, second: Step, service: Service, notes: Path, rows: Rows) -> RowResult:
    lost = first.masked(findings, "raise", "loop", "leave")
    pids = {file.name: int(file.read_text()) for file in notes.iterdir()}
    is_killed = "loop" in pids and not os.path.exists(f"/proc/{pids['loop']}")
    findings.add(is_killed, "the process that hung was killed")
    all_rewarded = all(not record.rollout.unscored for record in second.records)
    findings.add(all_rewarded, "in the next step all have a reward, by the one slot that the pool has")
    return findings.result(detect=TIMEOUT_S, lost=lost)


def _groups(findings: Findings, first: Step, second: Step, service: Service, notes: Path, rows: Rows) -> RowResult:
    masked, flat = first.group(4), first.group(5)
    findings.add(all(record.advantages is None for record in masked), f"{len(masked)} of a masked group are skipped")
    level = {record.rollout.reward for record in flat}
    zero = all(record.advantage in (None, 0.0) for record in flat)
    findings.add(len(level) == 1 and zero, "a group of equal rewards has advantages of 0")
    numbers = [value for row in rows for value in row.values() if isinstance(value, float)]
    advantages = [record.advantage for record in (*first.records, *second.records) if record.advantage is not None]
    finite = all(map(math.isfinite, (*numbers, *advantages)))
    findings.add(bool(numbers) and finite, f"all of {len(numbers)} figures are numbers")
    findings.add(len(rows) == 2 and rows[1].get("actor/grad_norm", 0) > 0, "the run goes on learning")
    return findings.result(lost=len(masked))
