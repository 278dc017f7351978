"""Find prewarmed sandboxes by their processes, and wait for them."""

import time
from pathlib import Path

COMMAND = ["python3", "main.py"]
PRINT_AGE = """
up, clock = float(open("/proc/uptime").read().split()[0]), {clock}
print(up - int(open("/proc/1/stat").read().rpartition(") ")[2].split()[19]) / clock)
"""
"""Print the age of the sandbox's first process in seconds."""


def list_children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_running(pid):
    """Whether the process runs; zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def get_process_name(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def find_idle_sandboxes(sandbox):
    """Map the bubblewrap process of each idle sandbox to the first process inside."""
    return {
        bwrap_pid: children[0]
        for bwrap_pid in list_children(sandbox.async_sandbox.runner_pid)
        if get_process_name(bwrap_pid) == "bwrap"
        and is_running(bwrap_pid)
        and (children := list_children(bwrap_pid))  # it may exit at any time
    }


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)
    return result


def warm(sandbox, count=5, idle=4, **kwargs):
    """Run the command until idle sandboxes are prewarmed for the next run."""
    for _ in range(count):
        assert sandbox.run(COMMAND, {"main.py": b""}, **kwargs).ok
    return wait_until(lambda: len(result := find_idle_sandboxes(sandbox)) >= idle and result)
