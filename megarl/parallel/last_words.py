"""What a rank says as it ends of an error of its own, for those that will only see that they have lost it."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import torch.distributed as dist

from megarl.parallel.job_secret import seal, unseal

_KEY = "megarl/last words"


def exchange_root_cause(error: BaseException, kind: Literal["stopped", "ended", "mistake", "fault", "lost"]) -> str:
    """Leave word of a mistake or a fault, of which the first in the job stays; where this rank has `lost` another, what
    was said so, empty where nothing was: that rank was killed, or does not answer."""
    with suppress(RuntimeError):  # the store may be gone, too
        store = dist.distributed_c10d._get_default_store()
        if kind in ("mistake", "fault"):
            text = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
            store.compare_set(_KEY, "", seal(text.encode(), _KEY))  # type: ignore[arg-type]  # str, it says
        elif kind == "lost" and store.check([_KEY]):
            return bytes(unseal(store.get(_KEY), _KEY)).decode(errors="replace")
    return ""
