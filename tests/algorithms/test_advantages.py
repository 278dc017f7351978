"""GAE, rewards to go, whitening and spreading of per-sequence values."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from thread_ranks import as_ranks

from megarl.algorithms import advantages, token_stats
from megarl.algorithms.advantages import (
    gae,
    length_adaptive_lam,
    rewards_to_go,
    spread_to_tokens,
    whiten,
)

sys.path.insert(0, str(Path(__file__).parent))

from sharded_batches import random_batch as random_mask
from sharded_batches import shard_sequences  # noqa: E402

pytestmark = pytest.mark.alone

F64 = torch.float64


def random_batch(seed: int):
    """Return (rewards, values, mask, cu_seqlens) of a few sequences with gaps between actions; some have no action."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (int(torch.randint(1, 12, (1,), generator=generator)),), generator=generator)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(cu[-1])
    mask = torch.rand(total, generator=generator) < 0.5
    if len(lengths) > 2:
        mask[cu[1] : cu[2]] = False
    rewards = torch.randn(total, generator=generator, dtype=F64)
    values = torch.randn(total, generator=generator, dtype=F64)
    return rewards, values, mask, cu


def loop_gae(rewards, values, mask, cu, gamma, lam):
    """Compute GAE as a sum: A_k = sum over j >= k of (gamma * lam)^(j - k) * delta_j."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        actions = [t for t in range(start, end) if mask[t]]
        deltas = []
        for k, t in enumerate(actions):
            following = values[actions[k + 1]] if k + 1 < len(actions) else 0.0
            deltas.append(rewards[t] + gamma * following - values[t])
        for k, t in enumerate(actions):
            advantages[t] = sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(actions)))
            returns[t] = advantages[t] + values[t]
    return advantages, returns


def test_gae_by_hand_across_a_tool_response():
    # prompt, action, action, tool, tool, action; gamma 0.5, lambda 0.5, so gamma * lambda = 0.25.
    #   delta_5 = 1 + 0 - 0.4                    = 0.6     A_5 = 0.6
    #   delta_2 = 0 + 0.5 * 0.4 - 0.6 = -0.4               A_2 = -0.4 + 0.25 * 0.6   = -0.25
    #   delta_1 = -0.1 + 0.5 * 0.6 - 0.2 = 0               A_1 = 0 + 0.25 * -0.25    = -0.0625
    # Values of prompt and tool tokens (9) are ignored.
    mask = torch.tensor([0, 1, 1, 0, 0, 1]).bool()
    rewards = torch.tensor([0, -0.1, 0, 0, 0, 1.0], dtype=F64)
    values = torch.tensor([9, 0.2, 0.6, 9, 9, 0.4], dtype=F64)
    advantages, returns = gae(rewards, values, mask, torch.tensor([0, 6]), gamma=0.5, lam=0.5)
    expected = torch.tensor([0, -0.0625, -0.25, 0, 0, 0.6], dtype=F64)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, torch.tensor([0, 0.1375, 0.35, 0, 0, 1.0], dtype=F64))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("gamma, lam", [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)])
def test_gae_matches_its_definition(seed, gamma, lam):
    rewards, values, mask, cu = random_batch(seed)
    expected = loop_gae(rewards, values, mask, cu, gamma, lam)
    for actual, expected_value in zip(gae(rewards, values, mask, cu, gamma, lam), expected, strict=True):
        torch.testing.assert_close(actual, expected_value, rtol=1e-12, atol=1e-12)
    for actual, expected_value in zip(
        gae(rewards.float(), values.float(), mask, cu, gamma, lam), expected, strict=True
    ):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected_value.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_rewards_to_go_match_a_loop(seed, gamma):
    rewards, _, mask, cu = random_batch(seed)
    expected = torch.zeros_like(rewards)
    for start, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        actions = [t for t in range(start, end) if mask[t]]
        for k, t in enumerate(actions):
            expected[t] = sum(gamma**later * rewards[j] for later, j in enumerate(actions[k:]))
    torch.testing.assert_close(rewards_to_go(rewards, mask, cu, gamma), expected)


def stepwise_gae(rewards, values, mask, cu, gamma, lam):
    """Compute GAE by the fp32 recursion, from the last action back, with one rounding per operation."""
    gamma, decay = np.float32(gamma), np.float32(gamma * lam)
    results = np.zeros((2, len(mask)), np.float32)
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        following = advantage = np.float32(0)
        for t in reversed(range(start, end)):
            if mask[t]:
                reward, value = rewards[t].numpy()[()], values[t].numpy()[()]
                advantage = ((reward + gamma * following) - value) + decay * advantage
                following = value
                results[:, t] = advantage, advantage + value
    return torch.from_numpy(results)


@pytest.mark.parametrize("steps", [1, 70, advantages.MAX_BLOCK_STEPS])
@pytest.mark.parametrize("seed", range(6))
def test_gae_equals_the_fp32_recursion_bitwise(seed, steps, monkeypatch):
    """The batch has tool outputs, sequences without actions or tokens, and NaN outside the mask. Blocks hold one, a few
    or all sequences."""
    monkeypatch.setattr(advantages, "MAX_BLOCK_STEPS", steps)
    mask, cu = random_mask(seed)
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, len(mask), generator=generator).where(mask, float("nan"))
    for gamma, lam in ((0.99, 0.95), (1.0, 1.0), (0.7, 0.3)):
        actual = torch.stack(gae(rewards, values, mask, cu, gamma, lam))
        assert torch.equal(actual, stepwise_gae(rewards, values, mask, cu, gamma, lam))


@pytest.mark.parametrize("steps", [1, 70, advantages.MAX_BLOCK_STEPS])
@pytest.mark.parametrize("seed", range(6))
def test_gae_takes_a_lambda_per_sequence(seed, steps, monkeypatch):
    """Each sequence equals GAE on it alone, bitwise; equal lambdas equal a scalar one."""
    monkeypatch.setattr(advantages, "MAX_BLOCK_STEPS", steps)
    mask, cu = random_mask(seed)
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, len(mask), generator=generator).where(mask, float("nan"))
    lam = torch.rand(len(cu) - 1, generator=generator, dtype=F64)
    actual = torch.stack(gae(rewards, values, mask, cu, 0.9, lam))
    for i, (start, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        single = gae(
            *(x[start:end] for x in (rewards, values, mask)), torch.tensor([0, end - start]), 0.9, float(lam[i])
        )
        assert torch.equal(actual[:, start:end], torch.stack(single))
    equal = gae(rewards, values, mask, cu, 0.9, torch.full_like(lam, 0.7))
    assert torch.equal(torch.stack(equal), torch.stack(gae(rewards, values, mask, cu, 0.9, 0.7)))


def test_gae_takes_a_separate_critic_lambda():
    rewards, values, mask, cu = random_batch(5)
    advantages, returns = gae(rewards, values, mask, cu, 1.0, 0.3, 1.0)
    assert torch.equal(advantages, gae(rewards, values, mask, cu, 1.0, 0.3)[0])
    torch.testing.assert_close(returns, gae(rewards, torch.zeros_like(values), mask, cu, 1.0, 1.0)[0])


def test_length_adaptive_lambda_by_hand():
    """With alpha 0.05, lambda is 0 up to 20 actions, 1 - 1/5 for 100 and 1 - 1/50 for 1000."""
    actual = length_adaptive_lam(torch.tensor([0, 1, 20, 40, 100, 1000]), 0.05)
    assert actual.tolist() == pytest.approx([0, 0, 0, 0.5, 0.8, 0.98], abs=1e-12)
    assert length_adaptive_lam(torch.zeros(0, dtype=torch.int64), 0.05).tolist() == []


def test_undiscounted_return_is_the_total_reward():
    # With gamma = lambda = 1, a return is the sum of the rewards to come, whatever the critic predicts.
    rewards, values, mask, cu = random_batch(3)
    _, returns = gae(torch.where(mask, rewards, 0.0), values, mask, cu, 1.0, 1.0)
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        actions = [t for t in range(start, end) if mask[t]]
        if actions:
            assert float(returns[actions[0]]) == pytest.approx(float(rewards[actions].sum()), abs=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_gae_ignores_packing_and_masked_tokens(seed):
    rewards, values, mask, cu = random_batch(seed)
    garbage = torch.where(mask, values, torch.full_like(values, float("nan")))
    full = torch.stack(gae(rewards, values, mask, cu, 0.99, 0.95))
    assert torch.equal(torch.stack(gae(rewards, garbage, mask, cu, 0.99, 0.95)), full)
    order = torch.randperm(len(cu) - 1, generator=torch.Generator().manual_seed(seed)).tolist()
    index = torch.cat([torch.arange(int(cu[i]), int(cu[i + 1])) for i in order])
    order_cu = torch.cat([torch.zeros(1, dtype=torch.int64), cu.diff()[order].cumsum(0)])
    actual = torch.stack(gae(rewards[index], values[index], mask[index], order_cu, 0.99, 0.95))
    assert torch.equal(actual, full[:, index])
    for i in range(len(cu) - 1):  # one sequence at a time
        tokens = slice(int(cu[i]), int(cu[i + 1]))
        single = gae(
            rewards[tokens],
            values[tokens],
            mask[tokens],
            torch.tensor([0, tokens.stop - tokens.start]),
            0.99,
            0.95,
        )
        assert torch.equal(torch.stack(single), full[:, tokens])


def test_gae_is_zero_without_actions_or_sequences():
    for total, cu in ((4, [0, 1, 4]), (0, [0])):
        zeros = torch.zeros(total)
        for result in gae(zeros + 1, zeros + 1, zeros.bool(), torch.tensor(cu), 0.99, 0.95):
            assert result.tolist() == [0.0] * total


def test_whiten_by_hand():
    x = torch.tensor([1.0, float("nan"), 3.0, 5.0])
    mask = torch.tensor([True, False, True, True])
    # mean 3, variance (4 + 0 + 4) / 3
    unit = (8 / 3) ** -0.5
    torch.testing.assert_close(whiten(x, mask), torch.tensor([-2 * unit, 0.0, 0.0, 2 * unit]))
    assert x[[0, 2, 3]].tolist() == [1, 3, 5]


def test_whiten_is_zero_for_equal_or_no_entries():
    assert whiten(torch.full((7,), 0.1), torch.ones(7).bool()).abs().max() < 1e-6
    assert whiten(torch.tensor([5.0]), torch.tensor([True])).tolist() == [0.0]
    assert whiten(torch.tensor([5.0, float("nan")]), torch.tensor([False, False])).tolist() == [0.0, 0.0]


def reference_whiten(x, mask):
    chosen = x[mask].double()
    centred = chosen - chosen.mean()
    return torch.zeros_like(x).masked_scatter(mask, (centred * (centred.square().mean() + 1e-8).rsqrt()).to(x.dtype))


@pytest.mark.parametrize("block", [16, token_stats.BLOCK])
@pytest.mark.parametrize("seed", range(5))
def test_whiten_equals_the_formula_bitwise_on_any_number_of_ranks(seed, block, monkeypatch):
    monkeypatch.setattr(token_stats, "BLOCK", block)
    mask, cu = random_mask(seed, longest=200)
    x = (torch.randn(len(mask), generator=torch.Generator().manual_seed(seed)) * 3 + 50).where(mask, float("nan"))
    full = whiten(x, mask)
    assert torch.equal(full, reference_whiten(x, mask))
    for ranks in (1, 2, 4):
        shares = shard_sequences(cu, ranks, seed)

        def work(comm, shares=shares):
            local = shares[comm.rank][1]
            return whiten(x[local], mask[local], comm.all_reduce)

        results = as_ranks(ranks, work)
        for (_, tokens, _), actual in zip(shares, results, strict=True):
            torch.testing.assert_close(actual, full[tokens], rtol=1e-6, atol=1e-6)


def test_spread_to_tokens_by_hand():
    mask = torch.tensor([0, 1, 1, 0, 1]).bool()
    spread = spread_to_tokens(torch.tensor([2.0, -3.0, float("nan")]), torch.tensor([0, 3, 5, 5]), mask)
    assert spread.tolist() == [0, 2, 2, 0, -3]


@pytest.mark.parametrize("seed", range(5))
def test_spread_to_tokens_equals_the_formula_bitwise(seed):
    mask, cu = random_mask(seed)
    numbers = torch.randn(len(cu) - 1, generator=torch.Generator().manual_seed(seed))
    expected = torch.where(mask, torch.repeat_interleave(numbers, cu.diff()), 0.0)
    assert torch.equal(spread_to_tokens(numbers, cu, mask), expected)
