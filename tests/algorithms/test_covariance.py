"""Tokens that Clip-Cov and KL-Cov mark by covariance, over the whole batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from thread_ranks import as_ranks

from megarl.algorithms.policy_losses import ClipCovOptions, KLCovOptions, mark_in_range, mark_largest
from megarl.types import BatchSharding, TrainBatch

pytestmark = pytest.mark.alone


def batch(logprobs: list[float], advantages: list[float], mask: list[int], cu: list[int]) -> TrainBatch:
    tokens, count = torch.zeros(len(mask)), len(cu) - 1
    result = TrainBatch(
        tokens, torch.tensor(cu), torch.tensor(mask).bool(), torch.arange(count), torch.zeros(count), tokens
    )
    return result.with_(old_logprobs=torch.tensor(logprobs), advantages=torch.tensor(advantages))


BY_HAND = batch(
    # Action log-probs -1, -2, -3, -6 (mean -3), advantages 2, 0, -1, -1 (mean 0): covariances 4, 0, 0, 3.
    [9.0, -1.0, -2.0, 9.0, -3.0, -6.0],
    [9.0, 2.0, 0.0, 9.0, -1.0, -1.0],
    [0, 1, 1, 0, 1, 1],
    [0, 3, 6],
)


def marked_indices(result: torch.Tensor) -> list[int]:
    assert result.dtype == torch.bool
    return result.nonzero().squeeze(1).tolist()


def test_mark_largest_by_hand() -> None:
    for fraction, expected in ((1e-6, [1]), (0.25, [1]), (0.5, [1, 5]), (1.0, [1, 5])):  # zeros never count
        assert marked_indices(mark_largest(BY_HAND, KLCovOptions(fraction), 0)) == expected


def test_mark_in_range_by_hand() -> None:
    for low, high, expected in ((1.0, 5.0, [1, 5]), (3.0, 5.0, [1]), (1.0, 4.0, [5]), (4.0, 5.0, [])):
        assert marked_indices(mark_in_range(BY_HAND, ClipCovOptions(1.0, low, high), 0)) == expected
    (item,) = marked_indices(mark_in_range(BY_HAND, ClipCovOptions(0.25, 1.0, 5.0), 0))
    assert item in (1, 5)
    drawn = {marked_indices(mark_in_range(BY_HAND, ClipCovOptions(0.25, 1.0, 5.0), seed))[0] for seed in range(20)}
    assert drawn == {1, 5}


def test_masked_tokens_are_never_marked() -> None:
    nan = float("nan")
    garbage = BY_HAND.with_(
        old_logprobs=BY_HAND.old_logprobs.where(BY_HAND.loss_mask, nan),  # type: ignore[union-attr]
        advantages=BY_HAND.advantages.where(BY_HAND.loss_mask, nan),  # type: ignore[union-attr]
    )
    assert marked_indices(mark_largest(garbage, KLCovOptions(1.0), 0)) == [1, 5]
    assert marked_indices(mark_in_range(garbage, ClipCovOptions(1.0), 0)) == [1, 5]
    all_masked = BY_HAND.with_(loss_mask=torch.zeros(6).bool())
    assert marked_indices(mark_largest(all_masked, KLCovOptions(1.0), 0)) == []
    assert marked_indices(mark_in_range(all_masked, ClipCovOptions(1.0), 0)) == []


def test_ties_are_sampled_up_to_the_requested_count() -> None:
    """Tokens with equal log-probs and advantages have equal covariances."""
    twins = batch([-1.0, -1.0, -5.0, -5.0], [1.0, 1.0, -1.0, -1.0], [1, 1, 1, 1], [0, 4])
    drawn = [marked_indices(mark_largest(twins, KLCovOptions(0.5), seed)) for seed in range(30)]
    assert all(len(result) == 2 for result in drawn) and len({tuple(result) for result in drawn}) == 6
    descending = batch([-1.0, -1.0, -1.0, -1.0, -6.0], [3.0, 2.0, 2.0, 2.0, -9.0], [1] * 5, [0, 5])
    drawn = [marked_indices(mark_largest(descending, KLCovOptions(0.6), seed)) for seed in range(30)]
    assert all(result[-1] == 4 and result[0] == 0 and len(result) == 3 for result in drawn)
    assert {result[1] for result in drawn} == {1, 2, 3}


def random_batch(sequences: int = 60) -> TrainBatch:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(0, 90, (sequences,), generator=generator)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(cu[-1])
    mask = torch.rand(total, generator=generator) < 0.6
    tokens, zeros = torch.zeros(total), torch.zeros(sequences)
    result = TrainBatch(tokens, cu, mask, torch.arange(sequences), zeros, tokens)
    columns = torch.randn(2, total, generator=generator) * 2
    return result.with_(old_logprobs=columns[0] - 3, advantages=columns[1])


@pytest.mark.parametrize("kind", ["range", "largest"])
@pytest.mark.parametrize("fraction", [1e-4, 0.01, 0.1])
def test_marks_do_not_depend_on_sharding(kind: str, fraction: float) -> None:
    """The count is as requested, and every mark satisfies the criterion over the whole batch."""
    full = random_batch()
    actions = int(full.loss_mask.sum())

    def mark(data: TrainBatch) -> torch.Tensor:
        if kind == "range":
            return mark_in_range(data, ClipCovOptions(fraction), 5)
        return mark_largest(data, KLCovOptions(fraction), 5)

    expected = mark(full)
    assert int(expected.sum()) == max(1, int(fraction * actions))
    chosen = full.loss_mask
    assert full.old_logprobs is not None and full.advantages is not None
    logprobs, advantages = (x.double() for x in (full.old_logprobs, full.advantages))
    covariance = (logprobs - logprobs[chosen].mean()) * (advantages - advantages[chosen].mean())
    if kind == "range":
        assert bool(((covariance > 1) & (covariance < 5) & chosen)[expected].all())
    else:
        low = covariance[chosen].topk(int(expected.sum())).values.min()
        assert torch.equal(expected, chosen & (covariance >= low))
    for ranks in (2, 3):
        owner = torch.randint(1, ranks, (full.num_sequences,), generator=torch.Generator().manual_seed(ranks))

        def work(comm, ranks=ranks, owner=owner):  # type: ignore[no-untyped-def]  # rank 0 has nothing
            local = (owner == comm.rank).nonzero().squeeze(1)
            part = full.select(local.tolist())
            sharding = BatchSharding(full.lengths, torch.zeros_like(owner), owner, local, comm)
            sharded = dataclasses.replace(
                part, group=full.group, sequence_reward=full.sequence_reward, sharding=sharding
            )
            return sharded.sequence_ids, sharded.positions, mark(sharded)

        result = torch.zeros_like(expected)
        for numbers, positions, marks in as_ranks(ranks, work):
            result[full.cu_seqlens[numbers] + positions] = marks
        assert torch.equal(result, expected)


def test_random_marks_are_uniform() -> None:
    """Marking a tenth of 2,400 equal tokens with 200 seeds marks each about equally often."""
    ones = torch.ones(2400)
    full = batch(ones.tolist(), ones.tolist(), [1] * 2400, list(range(0, 2401, 24)))
    signs = torch.tensor([1.0, -1.0]).repeat(1200)  # each token's covariance is then 1
    full = full.with_(old_logprobs=signs, advantages=signs)
    times = torch.zeros(2400)
    for seed in range(200):
        result = mark_in_range(full, ClipCovOptions(0.1, 0.5, 5.0), seed)
        assert int(result.sum()) == 240
        times += result
    # Binomial(200, 0.1): mean 20, deviation 4.2.
    assert float(times.std()) == pytest.approx(4.24, rel=0.1) and 2 < float(times.min()) and float(times.max()) < 42
