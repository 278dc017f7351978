import torch

from megarl.algorithms.rewards import last_action, token_rewards

CU = torch.tensor([0, 4, 6, 9])
# sequence 0: two actions; sequence 1: none; sequence 2: an action in its middle and a tool's answer after it
MASK = torch.tensor([0, 1, 1, 0, 0, 0, 0, 1, 0]).bool()


def test_outcome_sits_on_the_last_action():
    rewards = token_rewards(torch.tensor([1.0, 7.0, -2.0]), CU, MASK)
    assert rewards.tolist() == [0, 0, 1, 0, 0, 0, 0, -2, 0]
    assert last_action(CU, MASK).tolist() == [2, -1, 7]


def test_kl_is_taken_off_every_action():
    kl = torch.tensor([float("nan"), 2.0, -4.0, 99.0, 99.0, 99.0, float("inf"), 8.0, 99.0])
    rewards = token_rewards(torch.tensor([1.0, 7.0, -2.0]), CU, MASK, kl, 0.5)
    assert rewards.tolist() == [0, -1, 3, 0, 0, 0, 0, -6, 0]  # -0.5 * 2; 1 + 0.5 * 4; -2 - 0.5 * 8


def test_inputs_are_left_alone():
    reward, kl = torch.tensor([1.0, 7.0, -2.0]), torch.ones(9)
    token_rewards(reward, CU, MASK, kl, 0.5)
    assert reward.tolist() == [1, 7, -2] and kl.tolist() == [1] * 9


def test_nothing_at_all():
    assert token_rewards(torch.zeros(0), torch.tensor([0]), torch.zeros(0).bool()).tolist() == []
