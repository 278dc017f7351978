"""Sampling masks: the ids that could have been sampled at a token under `top_p`, `top_k` or `min_p`.

With truncated sampling the policy is the softmax over these ids alone, and the trainer must use the same distribution:
log pi(a) = x_a - log sum_j exp(x_j) over the ids j in the mask of a, for any weights, current or reference. The mask is
recorded from the weights that sampled (arXiv:2512.02556, section 3.1, "Keep Sampling Mask"): a mask that the trainer
recomputed would differ near the threshold and might lack the sampled token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.types.arrays import as_token_ids


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
        valid = rows >= 0
        sources = rows.where(valid, 0)
        if not len(self.counts):
            return SamplingMask.unrestricted(len(rows))
        counts = self.counts.long()
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
