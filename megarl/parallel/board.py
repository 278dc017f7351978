"""Counters and notes that all ranks of the job see, in the store by which they have met."""

from __future__ import annotations

import torch.distributed as dist

from megarl.parallel.ranks import count

_NOTE_BYTES = 4 << 20
"""Of a note at once: torch's store takes 8 MiB."""


class Board:
    """Counters and notes that all ranks of the job see; as `rollout.queue.Board`."""

    def add(self, name: str, more: int) -> int:
        return count(name, more)

    def put(self, name: str, note: bytes) -> None:
        store = dist.distributed_c10d._get_default_store()
        parts = range(0, max(1, len(note)), _NOTE_BYTES)
        for number, first in enumerate(parts):
            store.set(f"{name}/{number}", note[first : first + _NOTE_BYTES])  # type: ignore[arg-type]  # str, it says
        store.set(name, str(len(parts)))

    def get(self, name: str) -> bytes:
        """What was put there by this name; it is gone then."""
        store = dist.distributed_c10d._get_default_store()
        names = [f"{name}/{number}" for number in range(int(store.get(name)))]
        note = b"".join(store.get(part) for part in names)
        for part in (name, *names):
            store.delete_key(part)
        return note
