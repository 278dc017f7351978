"""Per-token rewards, sequence sums and the overlong penalty."""

import sys
from pathlib import Path

import pytest
import torch

from megarl.algorithms.advantages import last_action, overlong_penalty, token_rewards
from megarl.algorithms.token_stats import sequence_sums

sys.path.insert(0, str(Path(__file__).parent))

from sharded_batches import random_batch  # noqa: E402

pytestmark = pytest.mark.alone

CU = torch.tensor([0, 4, 6, 9])
# sequence 0: two actions; sequence 1: none; sequence 2: an action followed by a tool output
MASK = torch.tensor([0, 1, 1, 0, 0, 0, 0, 1, 0]).bool()


def test_outcome_reward_lands_on_the_last_action():
    rewards = token_rewards(torch.tensor([1.0, 7.0, -2.0]), CU, MASK)
    assert rewards.tolist() == [0, 0, 1, 0, 0, 0, 0, -2, 0]
    assert last_action(CU, MASK).tolist() == [2, -1, 7]


def test_kl_penalty_is_subtracted_from_every_action():
    kl = torch.tensor([float("nan"), 2.0, -4.0, 99.0, 99.0, 99.0, float("inf"), 8.0, 99.0])
    rewards = token_rewards(torch.tensor([1.0, 7.0, -2.0]), CU, MASK, kl, 0.5)
    assert rewards.tolist() == [0, -1, 3, 0, 0, 0, 0, -6, 0]  # -0.5 * 2; 1 + 0.5 * 4; -2 - 0.5 * 8


def test_turn_rewards_stay_at_their_turn_and_the_rest_at_the_end():
    """Token rewards add up to the sequence's reward; turn rewards on masked tokens are ignored."""
    turns = torch.tensor([9.0, 0.5, 0.0, 9.0, 9.0, 9.0, 0.0, 0.25, 9.0])
    outcome = torch.tensor([1.0, 7.0, -2.0])
    assert token_rewards(outcome, CU, MASK, turn_rewards=turns).tolist() == [0, 0.5, 0.5, 0, 0, 0, 0, -2, 0]
    kl = torch.ones(9)
    assert token_rewards(outcome, CU, MASK, kl, 0.5, turns).tolist() == [0, 0, 0, 0, 0, 0, 0, -2.5, 0]
    assert outcome.tolist() == [1, 7, -2] and turns[0] == 9


def test_inputs_are_not_mutated():
    reward, kl = torch.tensor([1.0, 7.0, -2.0]), torch.ones(9)
    token_rewards(reward, CU, MASK, kl, 0.5)
    assert reward.tolist() == [1, 7, -2] and kl.tolist() == [1] * 9


def test_empty_batch():
    assert token_rewards(torch.zeros(0), torch.tensor([0]), torch.zeros(0).bool()).tolist() == []


@pytest.mark.parametrize("seed", range(5))
def test_rewards_equal_the_formula_bitwise(seed):
    mask, cu = random_batch(seed)
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randn(len(cu) - 1, generator=generator)
    kl = torch.randn(len(mask), generator=generator).where(mask, float("nan"))
    expected = torch.zeros(len(mask))
    expected[mask] = -0.05 * kl[mask]
    for i, (start, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        action_indices = [t for t in range(start, end) if mask[t]]
        if action_indices:
            expected[action_indices[-1]] += reward[i]
    assert torch.equal(token_rewards(reward, cu, mask, kl, 0.05), expected)


def test_sequence_sums():
    cu = torch.tensor([0, 2, 2, 5])
    assert sequence_sums(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), cu).tolist() == [3, 0, 28]
    assert sequence_sums(torch.zeros(0), torch.tensor([0])).tolist() == []
    mask, cu = random_batch(0)
    x = torch.randn(len(mask), generator=torch.Generator().manual_seed(0))
    ids = torch.repeat_interleave(torch.arange(len(cu) - 1), cu.diff())
    assert torch.equal(sequence_sums(x, cu), torch.zeros(len(cu) - 1).index_add(0, ids, x))


def test_overlong_penalty_grows_within_the_buffer():
    """DAPO's equation 13 by hand: of at most 100 tokens, the last 40 are penalised linearly."""
    result = overlong_penalty(torch.tensor([0, 60, 61, 80, 100, 101, 10**6]), max_length=100, buffer_len=40)
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx([0, 0, -1 / 40, -0.5, -1, -1, -1])
    assert overlong_penalty(torch.zeros(0, dtype=torch.int64), 10, 10).tolist() == []
    for max_length, buffer in ((10, 0), (10, 11)):
        with pytest.raises(ValueError, match="buffer"):
            overlong_penalty(torch.tensor([1]), max_length, buffer)
