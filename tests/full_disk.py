"""Runs a command on a small disk that is full for a while; start it with `unshare --mount`.

    full_disk.py DISK MEGABYTES FLAG COMMAND ...

DISK becomes a file system in memory. It is filled once DISK/run has a line of metrics, until FLAG exists. The last line
of output is a JSON summary: the exit status and the files of the run.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path


def mount(mount_point: Path, size: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", str(mount_point).encode(), b"tmpfs", 0, f"size={size}".encode()):
        sys.exit(f"NO MOUNT: {os.strerror(ctypes.get_errno())}")


def fill(file: Path) -> None:
    with file.open("ab", buffering=0) as ballast:
        for size in (1 << 20, 4096):
            try:
                while True:
                    ballast.write(bytes(size))
            except OSError:
                pass


def main() -> None:
    disk, flag, command = Path(sys.argv[1]), Path(sys.argv[3]), sys.argv[4:]
    mount(disk, f"{sys.argv[2]}m")
    run, ballast, full = disk / "run", disk / "ballast", 0
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None and not flag.exists():
        if (run / "metrics.jsonl").exists() and "\n" in (run / "metrics.jsonl").read_text():
            fill(ballast)
            full += shutil.disk_usage(disk).free < 4096
        time.sleep(0.05)
    ballast.unlink(missing_ok=True)
    output, _ = process.communicate()
    result = {
        "status": process.returncode,
        "output": output,
        "full": full,
        "checkpoints": sorted(path.name for path in (run / "checkpoints").glob("*")),
        "log": (run / "log.txt").read_text(),
        "rollouts": sorted(path.name for path in (run / "rollouts").glob("step_*")),
        "metrics": (run / "metrics.jsonl").read_text().splitlines(),
    }
    print("RESULT " + json.dumps(result))


main()
