"""The rows: the injected fault and the expected result, in the words of the fault contract."""

from __future__ import annotations

from dataclasses import dataclass

SAME = "peers exit within the timeout; restart; bitwise resume"
FALLS_BACK = "file named, skipped, falls back"
SAVES = "saves within its budget; requeue code; save completes"


@dataclass(frozen=True)
class Row:
    injected: str
    expected: str
    scenario: str
    """Module of this package whose `run_scenario` injects it, along with other rows of the same runs."""
    short: bool = False
    """Whether `--short` includes it: it takes seconds and needs no engine."""


ROWS: dict[int, Row] = {
    1: Row("SIGKILL a rank in forward", SAME, "dying"),
    2: Row("SIGKILL in an all-reduce", SAME, "dying"),
    3: Row("SIGSTOP a rank", "detected within the timeout; stacks dumped", "dying"),
    4: Row(
        "SIGKILL the engine mid-generation",
        "restarted, full weights synced again, only lost samples regenerated",
        "generating",
    ),
    5: Row("engine hangs", "killed within interval + timeout; as 4", "generating"),
    6: Row("engine dies during a weight sync", "no mixed version ever serves; the step is retried", "generating"),
    7: Row("a bit flipped in a synced tensor", "checksum mismatch stops the rollout", "generating"),
    8: Row(
        "kill at each checkpoint stage (tmp, data, manifest, rename, latest)", "the previous checkpoint loads", "saving"
    ),
    9: Row("truncated shard", FALLS_BACK, "damage", short=True),
    10: Row("flipped bit", FALLS_BACK, "damage", short=True),
    11: Row("missing shard or metadata", FALLS_BACK, "damage", short=True),
    12: Row("disk full in a save (small tmpfs)", "training goes on, the old checkpoint intact, an alarm", "disks"),
    13: Row("read-only checkpoint folder", "clear error at start-up", "disks", short=True),
    14: Row("async writer killed", "next save detects it; no half commit", "saving"),
    15: Row("two jobs, one folder", "the second is refused by a lock", "damage", short=True),
    16: Row("resume at another DP / TP / PP / EP", "resharded and equal", "changing"),
    17: Row("resume with another config or data set", "refused unless forced", "changing"),
    18: Row("SIGUSR1 mid-rollout; a second one while saving", SAVES, "generating"),
    19: Row("SIGTERM mid-rollout; a second one while saving", SAVES, "generating"),
    20: Row("NaN/Inf gradient on one rank", "all ranks skip together; N in a row aborts", "numbers"),
    21: Row("NaN log-prob or advantage", "sample masked and counted", "numbers"),
    22: Row("hung tool", "killed at its deadline; the turn gets a timeout observation", "generating"),
    23: Row("reward service answers 500", "back-off, then the sample is masked: never a silent 0", "rewarding", True),
    24: Row("reward service slow or hanging", "deadline; the step finishes", "rewarding", True),
    25: Row("reward is malformed JSON, NaN, a 1 GB body", "rejected and counted", "rewarding", True),
    26: Row(
        "reward function raises or hangs", "its process is killed, the pool slot recovered", "rewarding", short=True
    ),
    27: Row("a whole group masked, or zero variance", "skipped, nothing divided by zero", "rewarding", short=True),
    28: Row("disk full for logs or TensorBoard", "training goes on", "disks", short=True),
    29: Row("one rank ten times slower", "the straggler is named", "dying"),
    30: Row("random-kill soak", "completes; effective-time ratio and recovery-second percentiles printed", "soaking"),
}


def parse_rows(text: str) -> list[int]:
    """Parse `1,4-6` to row numbers, ascending. Raises ValueError for a number that is no row."""
    selected: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or not set(numbers) <= ROWS.keys():
            raise ValueError(f"{part.strip()!r} names no row of 1 to {max(ROWS)}")
        selected |= set(numbers)
    return sorted(selected)


def by_scenario(numbers: list[int]) -> dict[str, list[int]]:
    """Return the rows that each scenario shows, in the order of their first rows."""
    scenarios: dict[str, list[int]] = {}
    for number in numbers:
        scenarios.setdefault(ROWS[number].scenario, []).append(number)
    return scenarios
