"""Share the cause of a rank's failure with ranks that only see its connection close."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import torch.distributed as dist

from megarl.parallel.job_secret import seal, unseal

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
