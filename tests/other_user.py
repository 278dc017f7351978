"""Runs Python code as another user of this machine, 65534. This needs root."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="to act as another user takes root")
# Only root may be able to read the interpreter's folder, so import everything before giving up root.
_BECOME = """
import array, ctypes, encodings.idna, hashlib, json, os, pickle, re, socket, struct, sys, threading, time
os.chdir("/")
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
assert os.getresuid() == (65534, 65534, 65534)
"""


def start_as_other_user(code: str, *arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-I", "-S", "-c", _BECOME + code, *arguments]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def as_other_user(code: str, *arguments: str, timeout: float = 120.0) -> str:
    """Run code as the other user and return what it prints; fail if it raises."""
    process = start_as_other_user(code, *arguments)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0 and err == "", err
    return out
