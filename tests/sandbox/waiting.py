"""Nests that wait, as processes of this machine."""

import time
from pathlib import Path

COMMAND = ["python3", "main.py"]
AGED = """
up, clock = float(open("/proc/uptime").read().split()[0]), {clock}
print(up - int(open("/proc/1/stat").read().rpartition(") ")[2].split()[19]) / clock)
"""
"""Prints for how many seconds the first process of the box has been there."""


def children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def there(pid):
    """Runs, or could; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def named(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def waiting(boxes):
    """While no box runs: by its bubblewrap, the first process of each nest."""
    return {
        outer: inner[0]
        for outer in children(boxes.sandbox.runner_pid)
        if named(outer) == "bwrap" and there(outer) and (inner := children(outer))  # it may end at any time
    }


def until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "it has never come to that"
        time.sleep(0.01)
    return result


def warm(boxes, count=5, nests=4, **value):
    """Run it so often that nests wait for the next one."""
    for _ in range(count):
        assert boxes.run(COMMAND, {"main.py": b""}, **value).ok
    return until(lambda: len(result := waiting(boxes)) >= nests and result)
