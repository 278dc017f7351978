"""What could have been drawn in the place of a token, where sampling was cut off by `top_p`, `top_k` or `min_p`.

The policy is then the softmax over these tokens alone, and so has to be the trainer's: log pi(a) = x_a - log sum_j
exp(x_j) over j of the set of a, for any weights, of now or of a reference. The set is of the weights that sampled, and
is kept (arXiv:2512.02556, section 3.1, "Keep Sampling Mask"): one that the trainer found for itself would be another
near the cut, and might lack the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarl.types.arrays import as_token_ids


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """Of n tokens, one after the other, the ids that each could have had; its own is among them.

    A count of 0 says that nothing was cut off: the whole vocabulary, or a token that no policy chose.
    """

    counts: torch.Tensor  # [n] int32, how many ids are of each token
    ids: torch.Tensor  # [sum(counts)] int32, in any order within a token, none twice

    @staticmethod
    def from_rows(rows: Sequence[Sequence[int]]) -> SamplingMask:
        """The ids of each token. Raises ValueError or TypeError for what are no whole numbers."""
        ids = as_token_ids([token for row in rows for token in row])
        return SamplingMask(torch.tensor([len(row) for row in rows], dtype=torch.int32), torch.tensor(ids))

    @staticmethod
    def unrestricted(tokens: int) -> SamplingMask:
        """Of so many tokens of which nothing was cut off."""
        return SamplingMask(torch.zeros(tokens, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))

    @staticmethod
    def concat(parts: Sequence[SamplingMask]) -> SamplingMask:
        """One after the other; there is one at least."""
        return SamplingMask(torch.cat([part.counts for part in parts]), torch.cat([part.ids for part in parts]))

    def __len__(self) -> int:
        return len(self.counts)

    def index_select(self, rows: torch.Tensor) -> SamplingMask:
        """[m] int64 which of the tokens -> these, in this order; -1 for one of which nothing was cut off."""
        known = rows >= 0
        at = rows.where(known, 0)
        if not len(self.counts):
            return SamplingMask.unrestricted(len(rows))
        counts = self.counts.long()
        sizes = counts[at] * known
        starts = (counts.cumsum(0) - counts)[at] - (sizes.cumsum(0) - sizes)
        ids = self.ids[torch.arange(int(sizes.sum())) + torch.repeat_interleave(starts, sizes)]
        return SamplingMask(sizes.int(), ids)

    def excludes(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n] bool: whether a token has a set, and is not in it. tokens: [n] their ids."""
        owner = torch.repeat_interleave(torch.arange(len(self)), self.counts)
        within = torch.zeros(len(self), dtype=torch.bool)
        within[owner[self.ids == tokens[owner]]] = True
        return (self.counts > 0) & ~within
