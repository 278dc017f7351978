"""Read-only arrays of token ids and log-probs, and equality of dataclasses that contain them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
"""[tokens] int32, read-only. Dataclasses accept any sequence of integers and convert it."""

Logprobs = npt.NDArray[np.float32]
"""[tokens] float32, read-only. Dataclasses accept any sequence of numbers and convert it."""


_MAX_TOKEN_ID = 2**31 - 1


def as_token_ids(values: npt.ArrayLike) -> Ids:
    """Return token ids as a read-only array. Does not copy an int32 array.

    Raises ValueError unless `values` is a flat list of integers from 0 to 2^31 - 1.
    """
    ids = np.asarray(values)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"token ids are a list of whole numbers, not {str(values)[:80]}")
    if ids.size and ids.min() < 0:
        raise ValueError(f"a token id is negative: {ids.min()}")
    if ids.dtype != np.int32 and ids.size and ids.max() > _MAX_TOKEN_ID:
        raise ValueError(f"no token has the id {ids.max()}")
    return as_read_only(ids.astype(np.int32, copy=False), values)


def as_read_only(array: npt.NDArray[Any], source: object) -> npt.NDArray[Any]:
    """Make `array` read-only. If it is the caller's own array (`source`), return a read-only view and leave that one
    writable."""
    if array.flags.writeable:
        array = array.view() if array is source else array
        array.setflags(write=False)
    return array


def no_ids() -> Ids:
    return as_token_ids(())


def no_logprobs() -> Logprobs:
    return np.zeros(0, np.float32)


def fields_equal(left: object, right: object) -> bool:
    """Compare two instances of a dataclass field by field: arrays by content, NaN equal to NaN. Skips fields with
    `compare=False`."""
    for item in (item for item in fields(left) if item.compare):  # type: ignore[arg-type]
        a, b = getattr(left, item.name), getattr(right, item.name)
        if not (np.array_equal(a, b, equal_nan=True) if isinstance(a, np.ndarray) else a == b):
            return False
    return True


def concat(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Concatenate the arrays; no parts give an empty array."""
    return np.concatenate(parts, dtype=dtype) if parts else np.zeros(0, dtype)
