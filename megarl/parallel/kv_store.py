"""Counters, values and the root cause of a failure, shared by all ranks of the job in its torch store."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

import torch.distributed as dist

from megarl.parallel.encoding import decode, encode
from megarl.parallel.job_secret import ForgedError, seal, unseal
from megarl.parallel.ranks import add_to_counter

_CHUNK_BYTES = 4 << 20  # of a value: torch's store takes up to 8 MiB
_MAX_CHUNKS = 1024


class KVStore:
    """Counters and values shared by all ranks of the job; implements `rollout.group_queue.SharedStore`."""

    def add(self, name: str, more: int) -> int:
        return add_to_counter(name, more)

    def remove(self, name: str) -> None:
        dist.distributed_c10d._get_default_store().delete_key(name)

    def put(self, name: str, value: Any) -> None:
        store, content = dist.distributed_c10d._get_default_store(), seal(encode(value), name)
        offsets = range(0, len(content), _CHUNK_BYTES)
        for number, offset in enumerate(offsets):
            store.set(f"{name}/{number}", content[offset : offset + _CHUNK_BYTES])  # type: ignore[arg-type]  # str, it says
        store.set(name, str(len(offsets)))

    def get(self, name: str) -> Any:
        """Remove and return a value. Raises ForgedError if no rank of the job has put it."""
        store = dist.distributed_c10d._get_default_store()
        count = int(store.get(name))
        if not 0 < count <= _MAX_CHUNKS:
            raise ForgedError(f"a value of {count} parts that no rank wrote")
        names = [f"{name}/{number}" for number in range(count)]
        content = b"".join(store.get(part) for part in names)
        for part in (name, *names):
            store.delete_key(part)
        return decode(unseal(content, name))


_KEY = "megarl/last words"


def exchange_root_cause(error: BaseException, kind: Literal["stopped", "ended", "mistake", "fault", "lost"]) -> str:
    """Publish a mistake or fault; the first one in the job stays. If this rank has `lost` a peer, return that cause.

    Returns an empty string if no cause was published: the lost rank was killed or does not respond.
    """
    with suppress(RuntimeError):  # the store may be unreachable, too
        store = dist.distributed_c10d._get_default_store()
        if kind in ("mistake", "fault"):
            text = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
            store.compare_set(_KEY, "", seal(text.encode(), _KEY))  # type: ignore[arg-type]  # str, it says
        elif kind == "lost" and store.check([_KEY]):
            return bytes(unseal(store.get(_KEY), _KEY)).decode(errors="replace")
    return ""
