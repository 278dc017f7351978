"""Harnesses: their private channel, and the one that probes a box from inside. Uses only the standard library."""

from __future__ import annotations

import hmac
import json
from pathlib import Path
from typing import Any

from megarl.sandbox.results import Limits, Result

_ISOLATED_PYTHON = ["python3", "-I", "-S", "-c"]
HARNESS_COMMAND = [*_ISOLATED_PYTHON, Path(__file__).with_name("inside_harness.py").read_text(encoding="utf-8")]
SESSION_COMMAND = [*_ISOLATED_PYTHON, Path(__file__).with_name("inside_session.py").read_text(encoding="utf-8")]


def encode_preamble(nonce: str, source: str) -> bytes:
    """Encode what a harness reads first.

    Raises ValueError for source with a zero character, which Python does not accept.
    """
    if "\0" in source:
        raise ValueError("a harness cannot have a zero character in it")
    return f"{nonce}\n{source}\0".encode()


def parse_results(data: bytes, nonce: str, count: int) -> dict[int, Any]:
    """Return the values of lines `nonce number value` whose number is below `count` and occurs once."""
    results: dict[int, Any] = {}
    rejected: set[int] = set()
    for line in data.split(b"\n")[:-1]:  # after the last newline there is nothing or an incomplete line
        head, _, rest = line.partition(b" ")
        digits, _, text = rest.partition(b" ")
        if not hmac.compare_digest(head, nonce.encode()) or len(digits) > 9 or not digits.isdigit():
            continue
        number = int(digits)
        if number in results:
            rejected.add(number)
        elif number < count:
            try:
                results[number] = json.loads(text)
            except (ValueError, RecursionError):
                rejected.add(number)
    return {number: value for number, value in results.items() if number not in rejected}


PROBE_LIMITS = Limits(seconds=60.0)
PROBE_SOURCE = r"""
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
