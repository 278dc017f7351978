"""Per-sequence advantages (GRPO, RLOO, REINFORCE++, OPO): by hand and against loops."""

import pytest
import torch

from megarl.algorithms.advantages import (
    decoupled_advantages,
    group_advantages,
    opo_advantages,
    penalised_rewards,
    rloo_advantages,
    sequence_advantages,
    spread_to_tokens,
    whiten,
    whiten_sequences,
)

pytestmark = pytest.mark.alone

F64 = torch.float64
KINDS = ["grpo", "rloo", "reinforce_pp_baseline", "opo"]


def test_group_advantages_by_hand():
    # group 4: rewards 1, 0, 0, 1: mean 0.5, sample variance 4 * 0.25 / 3; group 7: 2, 5: mean 3.5, variance 4.5
    reward = torch.tensor([1.0, 2.0, 0.0, 0.0, 5.0, 1.0], dtype=F64)
    group = torch.tensor([4, 7, 4, 4, 7, 4])
    centred = torch.tensor([0.5, -1.5, -0.5, -0.5, 1.5, 0.5], dtype=F64)
    torch.testing.assert_close(group_advantages(reward, group, use_std=False), centred)
    expected = centred * 3**0.5
    expected[[1, 4]] = torch.tensor([-1.5, 1.5], dtype=F64) / 4.5**0.5
    torch.testing.assert_close(group_advantages(reward, group, use_std=True), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_std", [True, False])
def test_groups_with_equal_rewards_get_exactly_zero(use_std):
    reward = torch.tensor([0.1, 0.1, 0.1, 3.0, 1.0, 0.0], dtype=F64)  # 0.1 + 0.1 + 0.1 is not 3 * 0.1 in binary
    group = torch.tensor([0, 0, 0, 1, 2, 2])
    actual = group_advantages(reward, group, use_std)
    assert actual[:4].tolist() == [0, 0, 0, 0]
    assert actual[4] > 0 > actual[5]
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), use_std).tolist() == []


@pytest.mark.parametrize("seed", range(10))
def test_group_advantages_match_a_loop_in_any_order(seed):
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randn(40, generator=generator, dtype=F64)
    group = torch.randint(-3, 6, (40,), generator=generator)
    expected = torch.zeros_like(reward)
    for number in set(group.tolist()):
        members = (group == number).nonzero().squeeze(1)
        if len(members) > 1:
            expected[members] = (reward[members] - reward[members].mean()) / (reward[members].std() + 1e-6)
    torch.testing.assert_close(group_advantages(reward, group, True), expected, rtol=1e-12, atol=1e-12)


def test_rloo_by_hand():
    """In 1, 0, 0, 1 the first sample's baseline is 1/3; in 2, 5 each sample is the other's baseline."""
    reward = torch.tensor([1.0, 2.0, 0.0, 0.0, 5.0, 1.0, 3.0], dtype=F64)
    group = torch.tensor([4, 7, 4, 4, 7, 4, 8])
    expected = [2 / 3, -3.0, -2 / 3, -2 / 3, 3.0, 2 / 3, 0.0]
    assert rloo_advantages(reward, group).tolist() == pytest.approx(expected, abs=1e-12)


def test_opo_by_hand():
    """b = (10 * 1 + 30 * 0) / 40 = 1/4; a group without action tokens has baseline 0."""
    reward = torch.tensor([1.0, 0.0, 5.0, 2.0], dtype=F64)
    actual = opo_advantages(reward, torch.tensor([0, 0, 1, 1]), torch.tensor([10, 30, 0, 0]))
    assert actual.tolist() == pytest.approx([0.75, -0.25, 5.0, 2.0], abs=1e-12)


def test_penalty_leaves_groups_with_equal_rewards_at_zero():
    reward, group = torch.tensor([1.0, 0.1, 0.5, 0.1, 0.1], dtype=F64), torch.tensor([3, 1, 3, 1, 1])
    penalty = torch.tensor([0.25, 0.5, -0.125, 0.0, 1e-9], dtype=F64)
    actual = penalised_rewards(reward, penalty, group)
    assert actual.tolist() == [0.75, 0.1, 0.625, 0.1, 0.1]
    for kind in ("grpo", "rloo", "opo"):
        advantages = sequence_advantages(kind, actual, group, torch.tensor([1, 2, 3, 4, 5])).tolist()
        assert advantages[0] > 0 > advantages[2] and advantages[1::2] + advantages[4:] == [0.0] * 3


def test_whiten_sequences_by_hand():
    """1 on two tokens and 4 on one: mean 2, variance (2 * 1 + 4) / 3 = 2."""
    root = 2**0.5
    actual = whiten_sequences(torch.tensor([1.0, 4.0], dtype=F64), torch.tensor([2, 1]))
    assert actual.tolist() == pytest.approx([-1 / root, 2 / root], abs=1e-8)
    assert whiten_sequences(torch.full((3,), 0.1), torch.tensor([1, 2, 3])).tolist() == [0, 0, 0]
    assert whiten_sequences(torch.tensor([1.0, 2.0]), torch.tensor([0, 0])).tolist() == [0, 0]
    assert whiten_sequences(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("seed", range(5))
def test_whiten_sequences_matches_whitening_of_action_tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    actions = torch.randint(0, 9, (20,), generator=generator)
    x = torch.randn(20, generator=generator, dtype=F64)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), actions.cumsum(0)])
    mask = torch.ones(int(cu[-1])).bool()
    expected = whiten(spread_to_tokens(x, cu, mask), mask)
    torch.testing.assert_close(spread_to_tokens(whiten_sequences(x, actions), cu, mask), expected)


def loop_advantages(kind, reward, group, actions):
    """Compute the advantages sample by sample in Python floats."""
    reward, group, actions = reward.tolist(), group.tolist(), actions.tolist()
    result = []
    for i, own_reward in enumerate(reward):
        members = [j for j, number in enumerate(group) if number == group[i]]
        rewards = [reward[j] for j in members]
        if kind == "rloo":
            other_rewards = [reward[j] for j in members if j != i]
            baseline = sum(other_rewards) / len(other_rewards) if other_rewards else own_reward
        elif kind == "opo":
            baseline = sum(actions[j] * reward[j] for j in members) / max(1, sum(actions[j] for j in members))
        else:
            baseline = sum(rewards) / len(rewards)
        centred = own_reward - baseline
        if kind == "grpo":
            variance = sum((x - baseline) ** 2 for x in rewards) / max(1, len(rewards) - 1)
            centred /= variance**0.5 + 1e-6
        result.append(0.0 if len(set(rewards)) == 1 else centred)
    if kind == "reinforce_pp_baseline":
        count = sum(actions)
        mean = sum(n * x for n, x in zip(actions, result, strict=True)) / count
        variance = sum(n * (x - mean) ** 2 for n, x in zip(actions, result, strict=True)) / count
        result = [(x - mean) / (variance + 1e-8) ** 0.5 for x in result]
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_advantages_match_a_loop_in_any_order_and_with_exclusions(kind, seed):
    """Excluded samples do not affect the others, whatever their reward."""
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randint(0, 4, (40,), generator=generator).to(F64) / 3
    group = torch.randint(-3, 6, (40,), generator=generator)
    actions = torch.randint(0, 9, (40,), generator=generator)
    expected = loop_advantages(kind, reward, group, actions)
    assert sequence_advantages(kind, reward, group, actions).tolist() == pytest.approx(expected, abs=1e-10)
    order = torch.randperm(40, generator=generator)
    permuted = sequence_advantages(kind, reward[order], group[order], actions[order])
    assert permuted.tolist() == pytest.approx([expected[i] for i in order.tolist()], abs=1e-10)

    excluded = torch.rand(40, generator=generator) < 0.4
    excluded |= group == 2  # a whole group
    with_nan = torch.where(excluded, torch.full_like(reward, float("nan")), reward)
    actual = sequence_advantages(kind, with_nan, group, actions, excluded=excluded)
    assert actual[excluded].tolist() == [0.0] * int(excluded.sum())
    included = loop_advantages(kind, reward[~excluded], group[~excluded], actions[~excluded])
    assert actual[~excluded].tolist() == pytest.approx(included, abs=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_excluded_or_no_rewards_give_zero(kind):
    equal, group, actions = torch.full((6,), 0.1), torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([1, 5, 2, 0, 3, 4])
    assert sequence_advantages(kind, equal, group, actions).tolist() == [0.0] * 6
    excluded_all = torch.ones(6).bool()
    assert sequence_advantages(kind, equal * float("nan"), group, actions, excluded=excluded_all).tolist() == [0.0] * 6
    no_samples = torch.zeros(0, dtype=torch.int64)
    assert sequence_advantages(kind, torch.zeros(0), no_samples, no_samples).tolist() == []


def test_only_grpo_divides_by_the_standard_deviation():
    reward, group, actions = torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.int64), torch.ones(3)
    for kind in KINDS:
        with_std, without = (
            sequence_advantages(kind, reward, group, actions, norm_by_std=std) for std in (True, False)
        )
        assert torch.equal(with_std, without) == (kind != "grpo")
    with pytest.raises(ValueError, match="opo, not 'remax'"):
        sequence_advantages("remax", reward, group, actions)


def test_gdpo_by_hand():
    """Two groups of two samples. Part a differs in the first group, by 10; part b in both, by 1. All deviations are
    the difference / sqrt(2), so that normalized differences are +-1 / sqrt(2), whatever the scale."""
    group, actions = torch.tensor([3, 3, 8, 8]), torch.tensor([2, 2, 2, 2])
    a = torch.tensor([10.0, 0.0, 5.0, 5.0], dtype=F64)
    b = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=F64)
    # Sums in units of 1 / sqrt(2): 3 - 1, -3 + 1, 1, -1, of mean 0 and variance (4 + 4 + 1 + 1) / 4 = 2.5.
    expected = [x / 2.5**0.5 for x in (2.0, -2.0, 1.0, -1.0)]
    assert decoupled_advantages([(3.0, a), (1.0, b)], group, actions).tolist() == pytest.approx(expected, rel=1e-5)
    assert sequence_advantages("gdpo", a, group, actions, parts=[(3.0, a), (1.0, b)]).tolist() == pytest.approx(
        expected, rel=1e-5
    )


def test_gdpo_separates_what_grpo_cannot():
    """The paper's example: with parts of 0 or 1, GRPO gives sums (0, 1) and (0, 2) the same advantages."""
    group, actions = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.int64)
    a, b = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=F64), torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=F64)
    grpo = group_advantages(a + b, group, True)
    torch.testing.assert_close(grpo[:2], grpo[2:], rtol=1e-5, atol=1e-5)
    gdpo = decoupled_advantages([(1.0, a), (1.0, b)], group, actions)
    assert (gdpo[2:] / gdpo[:2]).tolist() == pytest.approx([2.0, 2.0], rel=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_gdpo_matches_a_loop_with_exclusions(seed):
    generator = torch.Generator().manual_seed(seed)
    parts = [(w, torch.randint(0, 4, (40,), generator=generator).to(F64) * scale) for w, scale in ((1, 7), (0.3, 0.1))]
    group = torch.randint(-3, 6, (40,), generator=generator)
    actions = torch.randint(0, 9, (40,), generator=generator)
    excluded = torch.rand(40, generator=generator) < 0.3
    included = [i for i in range(40) if not excluded[i]]
    sums = dict.fromkeys(included, 0.0)
    for weight, values in parts:
        for i in included:
            members = torch.stack([values[j] for j in included if group[j] == group[i]])
            if len(members) > 1 and members.min() < members.max():
                sums[i] += weight * float((values[i] - members.mean()) / (members.std() + 1e-6))
    tokens = torch.cat([torch.full((int(actions[i]),), sums[i], dtype=F64) for i in included])
    expected = [(sums[i] - float(tokens.mean())) / float(tokens.var(correction=0) + 1e-8) ** 0.5 for i in included]
    with_nan = [(w, torch.where(excluded, torch.full_like(x, float("nan")), x)) for w, x in parts]
    actual = decoupled_advantages(with_nan, group, actions, excluded)
    assert actual[excluded].tolist() == [0.0] * int(excluded.sum())
    assert actual[included].tolist() == pytest.approx(expected, abs=1e-9)
