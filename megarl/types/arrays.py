"""Token ids and log-probs as arrays that nobody changes, and values that have such arrays in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
"""[tokens] int32, read-only. Where a value takes it, any sequence of whole numbers will do: an array is made of it."""

Logprobs = npt.NDArray[np.float32]
"""[tokens] float32, read-only; made of any sequence of numbers, like `Ids`."""


_MAX_TOKEN_ID = 2**31 - 1


def as_token_ids(values: npt.ArrayLike) -> Ids:
    """Token ids as a read-only array, without a copy of one that is such an array already.

    Raises ValueError for what is not a list of whole numbers, each of them from 0 to 2^31 - 1.
    """
    given = np.asarray(values)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"token ids are a list of whole numbers, not {str(values)[:80]}")
    if given.size and given.min() < 0:
        raise ValueError(f"a token id is negative: {given.min()}")
    if given.dtype != np.int32 and given.size and given.max() > _MAX_TOKEN_ID:
        raise ValueError(f"no token has the id {given.max()}")
    return as_read_only(given.astype(np.int32, copy=False), values)


def as_read_only(array: npt.NDArray[Any], given: object) -> npt.NDArray[Any]:
    """The array, or a view of it where it is the one that was given, which its owner may go on writing to."""
    if array.flags.writeable:
        array = array.view() if array is given else array
        array.setflags(write=False)
    return array


def no_ids() -> Ids:
    return as_token_ids(())


def no_logprobs() -> Logprobs:
    return np.zeros(0, np.float32)


def fields_equal(left: object, right: object) -> bool:
    """Equality of two values of one class field by field, arrays by what is in them; NaN is like NaN. Fields with
    `compare=False` are left out."""
    for item in (item for item in fields(left) if item.compare):  # type: ignore[arg-type]
        a, b = getattr(left, item.name), getattr(right, item.name)
        if not (np.array_equal(a, b, equal_nan=True) if isinstance(a, np.ndarray) else a == b):
            return False
    return True


def concat(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The parts one after the other; there may be none."""
    return np.concatenate(parts, dtype=dtype) if parts else np.zeros(0, dtype)
