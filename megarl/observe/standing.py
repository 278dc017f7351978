"""Where a thread stands: at work, or waiting for other ranks; seen from its stack, by whoever looks at it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

_WAITS = (
    "/torch/distributed/",
    "/megatron/core/pipeline_parallel/p2p_communication.py",
    "/megatron/core/distributed/",
    "/megarl/parallel/exact.py",
    "/megarl/parallel/delivery.py",
    "/megarl/parallel/neighbours.py",
)
"""Files whose functions, where they are the innermost, wait for messages of other ranks."""


class Standing(NamedTuple):
    """waits: for other ranks. where: the innermost place of ours, in words."""

    waits: bool
    where: str


def standing(thread: int) -> Standing:
    """Of a thread, by its ident."""
    frame = sys._current_frames().get(thread)
    waits = frame is not None and any(part in frame.f_code.co_filename for part in _WAITS)
    found: FrameType | None = frame
    while found is not None and not _is_ours(found.f_code.co_filename):
        found = found.f_back
    shown = found or frame
    if shown is None:
        return Standing(False, "nowhere")
    code = shown.f_code
    return Standing(waits, f"{code.co_filename}, line {shown.f_lineno}, in {code.co_name}")


def _is_ours(file: str) -> bool:
    return "/megarl/" in file and "/megarl/parallel/" not in file
