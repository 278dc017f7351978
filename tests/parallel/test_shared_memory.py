"""Shared memory that another process maps by a handle, without helper processes or named files."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch

from megarl.parallel import shared_memory

WRITER = """
import json, sys
from megarl.parallel import shared_memory
tensor = shared_memory.map_handle(*json.loads(sys.argv[1]))
print(tensor.tolist())
tensor[1] = 9
"""


def test_another_process_reads_and_writes_mapped_memory() -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    full = shared_memory.empty((8,), torch.uint8)
    full[2:5] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    handle = json.dumps(shared_memory.export_handle(full[2:5]))
    assert not [item for item in psutil.Process().children() if "torch_shm" in item.name()]
    assert not [name for name in {path.name for path in Path("/dev/shm").iterdir()} - before if "torch" in name]
    done = subprocess.run([sys.executable, "-c", WRITER, handle], capture_output=True, text=True)
    assert done.stdout == "[1, 2, 3]\n", done.stderr
    assert full.tolist() == [0, 0, 1, 9, 3, 0, 0, 0]
    del full
    after_free = subprocess.run([sys.executable, "-c", WRITER, handle], capture_output=True, text=True)
    assert after_free.returncode == 1 and "FileNotFoundError" in after_free.stderr


def test_refuses_to_export_private_memory() -> None:
    with pytest.raises(ValueError, match="is not in shared memory"):
        shared_memory.export_handle(torch.zeros(3))
    assert shared_memory.map_handle(*shared_memory.export_handle(torch.zeros(0, dtype=torch.uint8))).numel() == 0


def test_threads_allocate_and_free_at_the_same_time() -> None:
    """Memory is unmapped before its finalizer runs, so that another thread may get memory at the same address first."""
    errors: list[Exception] = []

    def allocate() -> None:
        try:
            for _ in range(2000):
                shared_memory.export_handle(shared_memory.empty((100_000,), torch.uint8))
        except Exception as error:
            errors.append(error)

    before = shared_memory.allocated_bytes()
    threads = [threading.Thread(target=allocate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and shared_memory.allocated_bytes() == before
