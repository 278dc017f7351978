"""Name of this machine in messages about a run."""

from __future__ import annotations

import os
import socket


def get_name(number: int | None = None) -> str:
    """Return Slurm's name of the node, or else the host name, with the node's number if there are several."""
    if slurm_name := os.environ.get("SLURMD_NODENAME"):
        return slurm_name
    if number is None and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":  # torchrun's
        number = int(os.environ["GROUP_RANK"])
    return socket.gethostname() + ("" if number is None else f" (number {number})")
