"""How much better than expected each action token was: GAE and its kin, and whitening.

What is a number per sequence, such as GRPO's advantage, is made in `baselines.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megarl.algorithms.totals import in_blocks, picked
from megarl.types import Total, alone


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    gamma: float,
    lam: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16) over the action tokens of each sequence.

    `rewards`, `values`, `loss_mask` are [T], `cu_seqlens` [n + 1]; `lam` one for all, or [n] for each sequence its own.
    Returns (advantages, returns), both [T], 0 outside of the action tokens; returns = advantages + values.

    Only action tokens are steps of the decision process: the state after an action that a tool answers is the state of
    the next action, behind the answer, and neither gamma nor lambda count the tool's tokens. After a sequence's last
    action nothing follows, also where it was cut off at its length: the value of that end state is 0.

        delta_k = r_k + gamma * V_{k+1} - V_k,  A_k = delta_k + gamma * lam * A_{k+1}   for action k of a sequence

    Of episodes in several branches it is given the `cu_seqlens` of episodes, so that the action after the last one of a
    branch is the first one of the next. That is what came after it: the agent went on, from a history that it had
    shortened or gone back in, and V_{k+1} is the critic's word on the state that it made of it. Were a branch's end an
    end with nothing behind it, the critic would be taught that an agent which sums up what it knows has lost. Were the
    reward at each branch's end, as if it were an episode by itself, no action would be told of what later branches cost
    or were paid, such as their KL and their turns' rewards, and a summary would be judged by no critic.
    """
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    lengths = cu_seqlens.diff().tolist()
    columns = (rewards, values, loss_mask, advantages, returns)
    sequences = list(zip(*(column.split(lengths) for column in columns), strict=True))
    counts = [int(torch.count_nonzero(sequence[2])) for sequence in sequences]
    each = torch.as_tensor(lam, dtype=torch.float64).expand(len(lengths))
    for block in _blocks(counts):
        _gae_of_block([sequences[i] for i in block], [counts[i] for i in block], gamma, each[block])
    return advantages, returns


def decoupled_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    gamma: float,
    lam: float | torch.Tensor,
    critic_lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages of one lambda for the policy, returns of another for the critic (VC-PPO, arXiv:2503.01491).

    With `critic_lam` 1 the critic learns from the rewards still to come and not from its own values, so that a reward
    at the end of a long sequence reaches its beginning. Otherwise as `gae`.
    """
    advantages, _ = gae(rewards, values, loss_mask, cu_seqlens, gamma, lam)
    _, returns = gae(rewards, values, loss_mask, cu_seqlens, gamma, critic_lam)
    return advantages, returns


def length_adaptive_lam(actions: torch.Tensor, alpha: float) -> torch.Tensor:
    """[n] fp64, lambda = 1 - 1 / (alpha l) of sequences of l action tokens (VAPO, arXiv:2504.05118, section 4.2).

    The weights of a sequence's TD errors, lambda^k, then add up to about alpha l: `alpha` (0.05 there) says how much of
    a sequence counts, whatever its length. Of l <= 1 / alpha it is 0; `actions` [n] are the l.
    """
    return (1.0 - 1.0 / (alpha * actions.double()).clamp(min=1.0)).clamp(min=0.0)


def rewards_to_go(
    rewards: torch.Tensor, loss_mask: torch.Tensor, cu_seqlens: torch.Tensor, gamma: float = 1.0
) -> torch.Tensor:
    """[T] return of each action token, sum_{j >= k} gamma^(j - k) r_j over the actions of its sequence; 0 elsewhere.

    REINFORCE++ (arXiv:2501.03262, eq. 9: r - coef sum_{i >= t} KL_i, with `rewards` of `token_rewards`) and ReMax
    (arXiv:2310.10505). It is `gae` with values of 0 and lambda 1; `rewards`, `loss_mask` [T], `cu_seqlens` [n + 1].
    """
    return gae(rewards, torch.zeros_like(rewards), loss_mask, cu_seqlens, gamma, 1.0)[0]


STEPS = 1 << 24
"""Actions of the sequences that `gae` goes through together: 64 MB in fp32."""


def _blocks(counts: list[int]) -> Iterator[list[int]]:
    """The numbers of those that have actions, most actions first, so many at a time that a rectangle of them, each with
    as many actions as the first, has `STEPS`; at least one."""
    order = sorted((i for i, count in enumerate(counts) if count), key=lambda i: -counts[i])
    while order:
        together = max(1, STEPS // counts[order[0]])
        yield order[:together]
        order = order[together:]


def _gae_of_block(
    sequences: list[tuple[torch.Tensor, ...]], counts: list[int], gamma: float, lam: torch.Tensor
) -> None:
    """Writes advantages and returns of sequences, each (rewards, values, mask, advantages, returns) as views, of which
    the first has the most actions and each next one at most as many as the one before; `lam` fp64, of each.

    Only the recursion itself goes step by step, with the steps as rows, the last action of each sequence in row 0: a
    row then is what one step of all sequences needs, and those that have no action left are at its end.
    """
    longest, first = counts[0], sequences[0][0]
    delta = first.new_zeros(len(sequences), longest)
    places = [mask.nonzero().squeeze(1) for _, _, mask, _, _ in sequences]
    for row, place, (rewards, values, _, _, _) in zip(delta, places, sequences, strict=True):
        value = values.index_select(0, place).to(rewards.dtype)
        following = torch.cat([value[1:], value.new_zeros(1)])
        row[: len(place)] = (rewards.index_select(0, place) + gamma * following - value).flip(0)

    steps = delta.t().contiguous()  # [longest, sequences]
    decay = (gamma * lam).to(first)  # [sequences]
    alive = len(sequences) - torch.tensor(counts).bincount().cumsum(0)  # [longest + 1] that have more than k actions
    before = steps[0]
    for step, width in zip(steps[1:].unbind(0), alive[1:].tolist(), strict=False):
        if width < len(before):
            before, decay = before[:width], decay[:width]
        if width < len(step):
            step = step[:width]
        step += before * decay  # two roundings, as written; torch.add(..., alpha=decay) may fuse them into one
        before = step

    delta.copy_(steps.t())
    for row, place, (_, values, _, advantages, returns) in zip(delta, places, sequences, strict=True):
        advantage = row[: len(place)].flip(0)
        advantages.index_copy_(0, place, advantage)
        returns.index_copy_(0, place, advantage + values.index_select(0, place).to(advantage.dtype))


def whiten(x: torch.Tensor, mask: torch.Tensor, total: Total = alone) -> torch.Tensor:
    """`x` [T] shifted and scaled to mean 0 and (population) standard deviation 1 over `mask` [T]; 0 elsewhere.

    Mean and deviation are those of all ranks' entries. Where these are all equal the result is 0.
    """
    result = torch.zeros_like(x)
    chosen = picked(
        x, mask, torch.float64
    )  # fp32 would leave rounding noise of equal entries, which the scale blows up
    count, entries = total(torch.stack([chosen.new_tensor(len(chosen)), chosen.sum()]))
    if not count:
        return result
    mean = entries / count
    scale = (total(chosen.sub_(mean).square_().sum()) / count + 1e-8).rsqrt()
    for part, numbers, where in in_blocks(result, x, mask):
        part.copy_(torch.where(where, (numbers.double() - mean) * scale, 0.0))
    return result


def spread_to_tokens(per_sequence: torch.Tensor, cu_seqlens: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """[N] -> [T]: each sequence's number on all its action tokens, 0 elsewhere."""
    spread = per_sequence.new_zeros(len(loss_mask))
    lengths = cu_seqlens.diff().tolist()
    for part, mask, number in zip(spread.split(lengths), loss_mask.split(lengths), per_sequence, strict=True):
        part.masked_fill_(mask, number)
    return spread
