"""Which logits are made at a time: of some tokens over this rank's part of the vocabulary, or, where sampling was cut
off, of each token over those ids of it that it could have had, which are few: rows of the output layer's weight are
looked up for them, and no logits of others are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megarl.types import Support

NOTHING = -1e30
"""The logit of no token: far below any, and finite, so that 0 times it is 0."""


@dataclass(frozen=True)
class Piece:
    """Some tokens, and the logits that are made of them."""

    rows: slice | torch.Tensor  # [n] which tokens
    target: torch.Tensor  # [n] int64, at which of a token's logits its target is; any where it is not here
    here: torch.Tensor  # [n] bool, whether it is
    ids: torch.Tensor | None  # [n, K] int64 rows of the weight for each token, -1 for none; None for all `columns`
    columns: int

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
        """[n, columns] or [n, K] fp32, `NOTHING` where there is none."""
        states = hidden[self.rows]
        if self.ids is None:
            return make_logits(states, weight[: self.columns], scale, cap)
        found = torch.matmul(weight[self.ids.clamp(min=0)], states[:, :, None])[..., 0].float()
        return squashed(found, scale, cap).masked_fill_(self.ids < 0, NOTHING)

    def to_hidden(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[n, hidden]: the gradient of the states, of that of the logits, in the weight's type."""
        if self.ids is None:
            return grad @ weight[: self.columns]
        return torch.matmul(grad[:, None], weight[self.ids.clamp(min=0)])[:, 0]

    def add_to_weight(self, total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the gradient of the weight to [columns, hidden] fp32, of that of the logits, in the weight's type."""
        states = hidden[self.rows]
        if self.ids is None:
            total += grad.T @ states
            return
        parts = grad[:, :, None].float() * states[:, None].float()  # where there is no logit there is no gradient
        total.index_add_(0, self.ids.clamp(min=0).flatten(), parts.flatten(0, 1))


def make_logits(hidden: torch.Tensor, weight: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
    """[rows, columns] fp32."""
    return squashed(torch.matmul(hidden, weight.T).float(), scale, cap)


def squashed(logits: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
    """In place, as the model caps its logits, and divided by the temperature."""
    return logits.div_(cap).tanh_().mul_(cap * scale) if cap else logits.mul_(scale)


def pieces_of(
    targets: torch.Tensor, support: Support | None, first: int, columns: int, at_once: int, width: int
) -> Iterator[Piece]:
    """What this rank makes of each token's logits.

    targets: [T] int64 on the device. support: of these T tokens, on the host. The rank has the `columns` ids from
    `first` on, without padding, and the logits of `at_once` tokens at a time, or weights of `width` numbers for as many
    numbers at a time.
    """
    if not columns:
        return
    if support is None:
        for start in range(0, len(targets), at_once):
            yield _over_all(targets, slice(start, start + at_once), first, columns)
        return
    for rows in (support.counts == 0).nonzero()[:, 0].split(at_once):
        yield _over_all(targets, rows.to(targets.device), first, columns)
    own = (support.ids >= first) & (support.ids < first + columns)
    owner = torch.repeat_interleave(torch.arange(len(support)), support.counts)[own]
    ids = support.ids[own].long() - first
    counts = owner.bincount(minlength=len(support))
    starts = counts.cumsum(0) - counts
    order = counts.argsort(descending=True, stable=True)[: int((counts > 0).sum())]  # those alike together
    place = 0
    while place < len(order):
        most = int(counts[order[place]])
        rows = order[place : place + max(1, min(at_once, at_once * columns // (most * width)))]
        place += len(rows)
        column = torch.arange(most)
        there = column < counts[rows][:, None]
        chosen = torch.where(there, ids[(starts[rows][:, None] + column).clamp(max=len(ids) - 1)], -1)
        chosen, rows = chosen.to(targets.device), rows.to(targets.device)
        found = chosen == (targets[rows] - first)[:, None]
        yield Piece(rows, found.int().argmax(1), found.any(1), chosen, columns)


def _over_all(targets: torch.Tensor, rows: slice | torch.Tensor, first: int, columns: int) -> Piece:
    at = targets[rows] - first
    return Piece(rows, at.clamp(0, columns - 1), (at >= 0) & (at < columns), None, columns)
