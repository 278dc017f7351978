"""What this machine is called in lines about a run."""

from __future__ import annotations

import os
import socket


def get_name(number: int | None = None) -> str:
    """As Slurm calls it, else its host name, with the number that it has among several nodes."""
    if called := os.environ.get("SLURMD_NODENAME"):
        return called
    if number is None and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":  # torchrun's
        number = int(os.environ["GROUP_RANK"])
    return socket.gethostname() + ("" if number is None else f" (number {number})")
