"""Which sequences of a batch begin with the same tokens, so that a model can compute these once.

Samples share their prompt, branches of an episode their earlier turns, and a chosen answer its prompt with a rejected
one. Only what a model would compute from equal inputs is shared: a token counts as common to two sequences if its
recorded routing and its sampling mask are equal, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from megarl.types.arrays import SamplingMask
from megarl.types.comm import Comm

SAME = np.iinfo(np.int64).max
"""Tokens in common with the sequence itself."""


@dataclass(frozen=True)
class CommonPrefixes:
    """An order of N sequences in which those with the longest common prefixes are neighbours."""

    position: torch.Tensor  # [N] int64, of each sequence in the order
    shared: torch.Tensor  # [N] int64 tokens in common with the sequence before it in the order; 0 for the first

    def select(self, indices: torch.Tensor) -> CommonPrefixes:
        """Return the order of the given sequences, [n] int64, of which some may be equal."""
        positions = self.position[indices].numpy()
        order = np.argsort(positions, kind="stable")
        places = positions[order]
        distinct, counts = np.unique(places, return_counts=True)
        by_place = np.zeros(len(self.shared), dtype=np.int64)
        by_place[self.position.numpy()] = self.shared.numpy()
        shared = np.full(len(places), SAME)
        if len(distinct):
            firsts = counts.cumsum() - counts
            shared[firsts[0]] = 0
            if len(distinct) > 1:
                shared[firsts[1:]] = np.minimum.reduceat(by_place[: distinct[-1] + 1], distinct[:-1] + 1)
        position, result = np.empty_like(positions), np.empty_like(positions)
        position[order], result[order] = np.arange(len(order)), shared
        return CommonPrefixes(torch.from_numpy(position), torch.from_numpy(result))

    def order(self) -> list[int]:
        """Return the sequences in the order."""
        return torch.argsort(self.position).tolist()


@dataclass(frozen=True)
class Sequences:
    """Inputs of a model for several sequences, one row each."""

    tokens: Sequence[np.ndarray]  # [length] int32
    num_prompt: Sequence[int]  # tokens of the prompt, which samples on other ranks may have, too
    routing: Sequence[np.ndarray] | None = None  # [at most length, layers, topk]
    sampling_masks: Sequence[SamplingMask] | None = None

    def key(self, row: int) -> bytes:
        """Return bytes that are in the order of the tokens."""
        return self.tokens[row].astype(">i4").tobytes()

    def count_common(self, first: int, second: int) -> int:
        """Return how many first tokens of two rows, and their records, are equal."""
        count = _equal_rows(self.tokens[first], self.tokens[second])
        if self.routing is not None:
            records = self.routing[first], self.routing[second]
            recorded = [len(record) for record in records]
            equal = _equal_rows(*(record[:count] for record in records))
            # The last token of a sequence has no record, and needs none.
            if equal < min(count, *recorded) or recorded[0] != recorded[1]:
                count = min(count, equal)
        if self.sampling_masks is not None:
            masks = self.sampling_masks[first], self.sampling_masks[second]
            count = min(count, _equal_rows(*(mask.counts.numpy() for mask in masks)))
            ids = _equal_rows(*(mask.ids.numpy() for mask in masks))
            if ids < int(masks[0].counts[:count].sum()):
                count = int((masks[0].counts.cumsum(0) <= ids).sum())
        return count

    def prompt_digest(self, row: int) -> int:
        """Return a hash of the prompt of a row, and of its records."""
        count, digest = self.num_prompt[row], hashlib.blake2b(digest_size=8)
        digest.update(self.tokens[row][:count].astype("<i4").tobytes())
        if self.routing is not None:
            digest.update(np.ascontiguousarray(self.routing[row][:count]).tobytes())
        return int.from_bytes(digest.digest(), "little", signed=True)


def _equal_rows(first: np.ndarray, second: np.ndarray) -> int:
    """Return how many first rows of two arrays are equal."""
    count = min(len(first), len(second))
    if first.shape[1:] != second.shape[1:]:
        return 0
    differs = first[:count] != second[:count]
    differs = differs.any(axis=tuple(range(1, differs.ndim)))
    return int(differs.argmax()) if differs.any() else count


def find_prefixes(local: Sequences, local_indices: torch.Tensor, total: int, comm: Comm) -> CommonPrefixes:
    """Return the common prefixes of `total` sequences, of which this rank has the `local` ones. Collective.

    Of sequences on different ranks at most the prompt is common.

    local_indices: [n] int64, the numbers of the local sequences.
    """
    rows = sorted(range(len(local.tokens)), key=local.key)
    common = [0, *(local.count_common(*pair) for pair in pairwise(rows))][: len(rows)]
    table = torch.zeros(len(rows), 6, dtype=torch.int64)
    for place, (row, shared) in enumerate(zip(rows, common, strict=True)):
        values = int(local_indices[row]), comm.rank, place, shared, local.num_prompt[row], local.prompt_digest(row)
        table[place] = torch.tensor(values)
    return order_prefixes(comm.all_gather_rows(table), total)


def order_prefixes(table: torch.Tensor, total: int) -> CommonPrefixes:
    """Order the sequences of all ranks.

    table: [total, 6] int64: a sequence's number, its rank, its place in the order of this rank's sequences, the tokens
    in common with the sequence at the place before, the tokens of its prompt, and a hash of them. By rank and place.
    """
    index, rank, place, shared, prompt, digest = (column.tolist() for column in table.T)
    firsts: dict[tuple[int, int], int] = {}
    prompts = [firsts.setdefault((prompt[row], digest[row]), row) for row in range(total)]
    order = sorted(range(total), key=lambda row: (prompts[row], row))
    position, result = torch.arange(total), torch.zeros(total, dtype=torch.int64)  # a rehearsal lacks others' rows
    for number, row in enumerate(order):
        position[index[row]] = number
        if not number:
            continue
        before = order[number - 1]
        if rank[before] == rank[row]:
            low, high = sorted((before, row))
            count = min(shared[low + 1 : high + 1])
        else:
            count = prompt[row] if prompts[before] == prompts[row] else 0
        result[index[row]] = count
    return CommonPrefixes(position, result)
