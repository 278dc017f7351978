"""Common prefixes of sequences on one or several ranks, and which tokens of them a micro-batch computes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from thread_ranks import ThreadRank, as_ranks

from megarl.types import SamplingMask
from megarl.types.comm import LOCAL
from megarl.types.prefixes import SAME, CommonPrefixes, Sequences, find_prefixes

pytestmark = pytest.mark.alone


def branching_rows(seed: int, count: int) -> list[list[int]]:
    """Return rows of which many begin like an earlier one, and some are equal."""
    rng = random.Random(seed)
    rows: list[list[int]] = []
    for _ in range(count):
        source = rng.choice(rows) if rows else []
        rows.append(source[: rng.randint(0, len(source))] + [rng.randint(0, 3) for _ in range(rng.randint(1, 5))])
    return rows


def common(first: Sequence[int], second: Sequence[int]) -> int:
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def sequences(rows: Sequence[Sequence[int]], num_prompt: Sequence[int] | None = None) -> Sequences:
    return Sequences([np.array(row, dtype=np.int32) for row in rows], num_prompt or [0] * len(rows))


def check(prefixes: CommonPrefixes, rows: Sequence[Sequence[int]]) -> list[int]:
    """Check the counts, and return them in the order."""
    order = prefixes.order()
    assert sorted(order) == list(range(len(rows)))
    counts = []
    for before, row in zip([None, *order[:-1]], order, strict=True):
        shared = int(prefixes.shared[row])
        longest = 0 if before is None else common(rows[before], rows[row])
        assert min(shared, len(rows[row])) <= longest
        counts.append(min(shared, len(rows[row])))
    return counts


@pytest.mark.parametrize("seed", range(20))
def test_neighbours_have_their_longest_common_prefix(seed: int) -> None:
    """In the order and in that of a part, of which some sequences may be chosen twice: as many tokens as a trie has."""
    rows, rng = branching_rows(seed, 30), random.Random(seed)
    prefixes = find_prefixes(sequences(rows), torch.arange(len(rows)), len(rows), LOCAL)
    chosen = [rng.randrange(len(rows)) for _ in range(rng.randint(0, 20))]
    for part, indices in ((prefixes, list(range(len(rows)))), (prefixes.select(torch.tensor(chosen).long()), chosen)):
        selected = [rows[index] for index in indices]
        trie = {tuple(row[: end + 1]) for row in selected for end in range(len(row))}
        assert sum(map(len, selected)) - sum(check(part, selected)) == len(trie)


def test_equal_sequences_share_all_tokens() -> None:
    prefixes = CommonPrefixes(torch.tensor([1, 0]), torch.tensor([2, 0])).select(torch.tensor([0, 1, 0]))
    assert prefixes.shared.tolist() == [2, 0, SAME]


def test_records_must_be_equal_too() -> None:
    """Routing differs at the second token; the sampling masks differ at the third."""
    tokens = [np.array([5, 6, 7, 8], dtype=np.int32), np.array([5, 6, 7, 9], dtype=np.int32)]
    routing = [np.array([[[0]], [[1]], [[1]]]), np.array([[[0]], [[2]], [[1]]])]
    masks = [SamplingMask.from_rows([[], [6, 1], [7, last], [8, 9]]) for last in (2, 3)]
    assert Sequences(tokens, [0, 0]).count_common(0, 1) == 3
    assert Sequences(tokens, [0, 0], routing=routing).count_common(0, 1) == 1
    assert Sequences(tokens, [0, 0], sampling_masks=masks).count_common(0, 1) == 2


def test_last_tokens_need_no_record() -> None:
    """Routing is recorded for all tokens but the last; a shorter sequence lacks that of a token that both have."""
    tokens = [np.array([5, 6, 7], dtype=np.int32), np.array([5, 6, 7, 9], dtype=np.int32)]
    rows = np.array([[[0]], [[1]], [[2]]])
    assert Sequences(tokens, [0, 0], routing=[rows[:2], rows]).count_common(0, 1) == 2
    equal = [tokens[0], tokens[0]]
    assert Sequences(equal, [0, 0], routing=[rows[:2], rows[:2]]).count_common(0, 1) == 3


def test_ranks_share_prompts() -> None:
    """Of a prompt's samples on two ranks, neighbours on different ranks have the prompt in common, others all."""
    prompts = [[1, 2, 3], [1, 2, 4]]
    rows = [[*prompts[number % 2], 7, 8, number // 4] for number in range(8)]

    def work(rank: ThreadRank) -> CommonPrefixes:
        local = [number for number in range(8) if number // 4 == rank.rank]
        local_rows = sequences([rows[number] for number in local], [3] * 4)
        return find_prefixes(local_rows, torch.tensor(local), 8, rank)

    first, second = as_ranks(2, work)
    assert torch.equal(first.position, second.position) and torch.equal(first.shared, second.shared)
    counts = check(first, rows)
    assert sorted(counts) == [0, 0, 3, 3, 6, 6, 6, 6]
