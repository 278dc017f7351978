"""Weight sync between ranks that are threads of one process, over a wire with the worst legal timing.

The sender's buffer is read only when the receiver waits, and the receiver's buffer holds garbage from the start of the
transfer. Orders are written only when they are settled. Reusing a buffer too early therefore corrupts the engine's
tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
import ranks_executor
import torch

from megarl.reshard.run import executor

Sent = tuple[torch.Tensor, threading.Event]
PATIENCE = 60.0  # seconds; a longer wait is a deadlock


class Wire:
    def __init__(self, world: int) -> None:
        self.between: dict[tuple[int, int], Queue[Sent]] = {
            (src, dst): Queue() for src in range(world) for dst in range(world)
        }

    def transfer(
        self, receives: Sequence[tuple[int, torch.Tensor]], sends: Sequence[tuple[int, torch.Tensor]], _: str, rank: int
    ) -> list[tuple[Any, int]]:
        started: list[tuple[Any, int]] = []
        for peer, tensor in sends:
            done = threading.Event()
            self.between[rank, peer].put((tensor, done))
            started.append((PendingTransfer(lambda done=done: done.wait(PATIENCE)), peer))  # type: ignore[misc]
        for peer, tensor in receives:
            tensor.view(torch.uint8).fill_(0xA5)
            started.insert(0, (PendingTransfer(lambda peer=peer, tensor=tensor: self._take(peer, rank, tensor)), peer))  # type: ignore[misc]
        return started

    def _take(self, peer: int, rank: int, target: torch.Tensor) -> None:
        tensor, done = self.between[peer, rank].get(timeout=PATIENCE)
        target.copy_(tensor)
        done.set()


class PendingTransfer:
    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait = wait


class LateRun(ranks_executor.Run):
    """A run that writes orders only when they are settled."""

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text, rank)
        self.late: list[tuple[torch.Tensor, dict[str, Any], bool]] = []

    def send_to_engine(self, buffer: torch.Tensor, order: dict[str, Any], draft: bool) -> None:
        self.late.append((buffer, order, draft))

    def settle(self) -> None:
        for run in self.late:
            super().send_to_engine(*run)
        self.late.clear()


def sync_as_threads(seed: str, world: int, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return each rank's `ranks_executor.Run.result`."""
    monkeypatch.setattr(executor, "_transfer", Wire(world).transfer)
    ranks = ",".join(map(str, range(world)))
    runs = [LateRun(f"{seed}/{ranks}/{ranks}", rank) for rank in range(world)]
    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(LateRun.result, runs))
