"""Check a box's isolation from inside, before it is trusted."""

from __future__ import annotations

from typing import Any

from megarl.sandbox.results import Limits, Result

LIMITS = Limits(seconds=60.0)
SOURCE = r"""
import os, resource, socket


def fails(do):
    try:
        do()
    except OSError:
        return True
    return False


def unshare():
    import ctypes
    if ctypes.CDLL(None).unshare(0x10000000):
        raise OSError("refused")


status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines())
send(0, {
    "it is root": os.getuid() == 0 or os.geteuid() == 0,
    "it has capabilities": int(status["CapEff"], 16) | int(status["CapPrm"], 16) | int(status["CapBnd"], 16) != 0,
    "it may gain privileges": status["NoNewPrivs"].strip() != "1",
    "it sees other processes": max(int(name) for name in os.listdir("/proc") if name.isdecimal()) > 64,
    "it sees users of this machine": os.path.exists("/etc/passwd"),
    "it can write outside of its own folders": not all(
        fails(lambda: open(path + "/probe", "w")) for path in ("/", "/usr", "/dev", "/etc", "/proc/sys/kernel")
    ) or not fails(lambda: open("/proc/self/comm", "w")),
    "it has a network": any(not line.split(":")[0].strip() == "lo" for line in open("/proc/net/dev").readlines()[2:]),
    "it can make network sockets": not fails(lambda: socket.socket(socket.AF_INET)),
    "its address space is not limited": resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY,
    "its open files are not limited": resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 4096,
    "it can make namespaces": not fails(unshare),
})
"""


def list_faults(report: Any, run: Result) -> list[str]:
    """Return descriptions of the layers that do not hold."""
    if not isinstance(report, dict):
        tail = run.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return [f"Python does not run in a box ({run.reason or 'without a word'}{': ' + tail[0] if tail else ''})"]
    return [name for name, is_fault in report.items() if is_fault]
