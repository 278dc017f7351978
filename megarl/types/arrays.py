"""Arrays per token: read-only ids and log-probs, and sampling masks.

A sampling mask holds the ids that could have been sampled at a token under `top_p`, `top_k` or `min_p`. The policy is
then the softmax over these ids alone, and the trainer must use the same distribution:
log pi(a) = x_a - log sum_j exp(x_j) over the ids j in the mask of a. The mask is recorded from the weights that sampled
(arXiv:2512.02556, section 3.1): a recomputed one would differ near the threshold and might lack the sampled token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int32]
"""[tokens] int32, read-only. Dataclasses accept any sequence of integers and convert it."""
Logprobs = npt.NDArray[np.float32]
"""[tokens] float32, read-only. Dataclasses accept any sequence of numbers and convert it."""


def as_token_ids(values: npt.ArrayLike) -> Ids:
    """Return token ids as a read-only array. Does not copy an int32 array.

    Raises ValueError unless `values` is a flat list of integers from 0 to 2^31 - 1.
    """
    ids = np.asarray(values)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"token ids are a list of whole numbers, not {str(values)[:80]}")
    if ids.size and ids.min() < 0:
        raise ValueError(f"a token id is negative: {ids.min()}")
    if ids.dtype != np.int32 and ids.size and ids.max() >= 2**31:
        raise ValueError(f"no token has the id {ids.max()}")
    return as_read_only(ids.astype(np.int32, copy=False), values)


def as_read_only(array: npt.NDArray[Any], source: object) -> npt.NDArray[Any]:
    """Return `array` read-only; a view if it is the caller's own array, `source`, which stays writable."""
    if array.flags.writeable:
        array = array.view() if array is source else array
        array.setflags(write=False)
    return array


def no_ids() -> Ids:
    return as_token_ids(())


def no_logprobs() -> Logprobs:
    return np.zeros(0, np.float32)


def fields_equal(left: object, right: object) -> bool:
    """Compare the fields of two dataclasses that have `compare` set: arrays by content, NaN equal to NaN."""
    pairs = ((getattr(left, f.name), getattr(right, f.name)) for f in fields(left) if f.compare)  # type: ignore[arg-type]
    return all(np.array_equal(a, b, equal_nan=True) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def concat(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Concatenate the arrays; no parts give an empty array."""
    return np.concatenate(parts, dtype=dtype) if parts else np.zeros(0, dtype)


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The ids that could have been sampled at each of n tokens, the sampled one included.

    A count of 0 means no restriction: the whole vocabulary, or a token that the policy did not sample.
    """

    counts: torch.Tensor  # [n] int32, number of ids of each token
    ids: torch.Tensor  # [sum(counts)] int32, unique and in any order within a token

    @staticmethod
    def from_rows(rows: Sequence[Sequence[int]]) -> SamplingMask:
        """Build a mask from the ids of each token. Raises ValueError or TypeError for non-integers."""
        ids = as_token_ids([token for row in rows for token in row])
        return SamplingMask(torch.tensor([len(row) for row in rows], dtype=torch.int32), torch.tensor(ids))

    @staticmethod
    def unrestricted(tokens: int) -> SamplingMask:
        """Return the mask of `tokens` tokens without a restriction."""
        return SamplingMask(torch.zeros(tokens, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))

    @staticmethod
    def concat(parts: Sequence[SamplingMask]) -> SamplingMask:
        """Concatenate one or more masks."""
        return SamplingMask(torch.cat([part.counts for part in parts]), torch.cat([part.ids for part in parts]))

    def __len__(self) -> int:
        return len(self.counts)

    def index_select(self, rows: torch.Tensor) -> SamplingMask:
        """Return the masks of the tokens `rows` ([m] int64), in this order; -1 gives an unrestricted token."""
        if not len(self.counts):
            return SamplingMask.unrestricted(len(rows))
        valid, counts = rows >= 0, self.counts.long()
        sources = rows.where(valid, 0)
        sizes = counts[sources] * valid
        starts = (counts.cumsum(0) - counts)[sources] - (sizes.cumsum(0) - sizes)
        ids = self.ids[torch.arange(int(sizes.sum())) + torch.repeat_interleave(starts, sizes)]
        return SamplingMask(sizes.int(), ids)

    def excludes(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return [n] bool: True where a token has a mask that does not contain its id. tokens: [n] ids."""
        owner = torch.repeat_interleave(torch.arange(len(self)), self.counts)
        is_contained = torch.zeros(len(self), dtype=torch.bool)
        is_contained[owner[self.ids == tokens[owner]]] = True
        return (self.counts > 0) & ~is_contained
