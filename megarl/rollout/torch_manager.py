"""The `torch_shm_manager` of a process: torch starts it where a tensor is first shared by a name of a file, to remove
these files when the process is gone, and it inherits the environment for as long as it lives."""

from __future__ import annotations

import ctypes
import os
from functools import cache

import torch

_NEEDED = ("PATH", "LD_LIBRARY_PATH", "TMPDIR", "TEMP", "TMP", "TEMPDIR")
"""All that it has a use for: its libraries, and where its socket goes."""


@cache
def start_without_secrets() -> None:
    """Have torch start this process's, once, with an environment of `_NEEDED` alone.

    It is forked and executed within libtorch, which asks nobody what to hand over, so what C has for this process's
    environment is another array meanwhile. Nothing is taken out of the old one: other threads that ask for a variable
    in these milliseconds find all of it, or those that are needed.
    """
    kept = [f"{name}={os.environ[name]}".encode() for name in _NEEDED if name in os.environ]
    array = (ctypes.c_char_p * (len(kept) + 1))(*kept, None)
    known = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ")
    before = known.value
    try:
        known.value = ctypes.addressof(array)
        torch.zeros(1).untyped_storage()._share_filename_cpu_()
    finally:
        known.value = before
