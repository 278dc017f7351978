"""Every value that crosses a stage of the loop.

Host side: frozen dataclasses, one per notion (`Prompt`, `Turn`, `Rollout`). Training side: one packed batch
(`TrainBatch`) of `[T]` tensors, T tokens of sequences laid end to end without padding.

**What is of a sequence is everywhere, what is of a token is where it was made.** Of N rollouts every rank has the
figures, as [N] tensors: lengths, groups, rewards, how they ended. The texts, tokens and records of one are on one rank,
its home, which leads the engine that wrote it. There its tokens' columns are computed and kept, and from there a model
is sent the rows that it computes. Functions of tokens (`algorithms/`) are functions of each sequence, so they are right
on a part of them; what is said of all tokens, a mean or a sum, goes through `total`, which adds up the parts:

    kl_mean = token_mean(kl, batch.loss_mask, batch.total)         and not kl.mean(), which is of this rank's tokens

On one rank all is here, and `total` gives back what it is given.

Alignment, written down here once and meant everywhere else: **index t speaks about token t.**
`logprobs[t]` is log p(tokens[t] | tokens before it), `values[t]` is the critic's value of the state in which
token t was chosen (that is, before it), `advantages[t]`, `returns[t]` and `rewards[t]` belong to the choice of
token t, and `loss_mask[t]` is True when the policy chose token t. The first token of a sequence has no
prediction: its entries are 0 and its mask is False. Models emit at index t what they predict for t + 1; the
shift happens in `megarl/megatron/` and nowhere else. `scores[t]`, of a reward model, is about the
conversation up to and including token t, which is where it is emitted: there is no shift, and the score of the whole is
at its last token.

A worked example, one tool call in two turns (ids made up; A = action):

    turn 0  prompt       [1 2 3]      is_action=False
    turn 1  tool call    [7 8]        is_action=True    logprobs [-.1 -.2]
    turn 2  tool answer  [4 5]        is_action=False
    turn 3  statement    [9]          is_action=True    logprobs [-.3]

    tokens            1  2  3  7    8    4  5  9
    positions         0  1  2  3    4    5  6  7
    loss_mask         .  .  .  A    A    .  .  A
    rollout_logprobs  0  0  0  -.1  -.2  0  0  -.3
    rewards           0  0  0  0    0    0  0  r        (an outcome reward sits on the last action)
    turn_rewards      0  0  0  0    a    0  0  b        (a turn's own reward on the last token of it)

One thing is about what becomes of a token, not of its choice: `routing[t]` names the experts that token t went through
as an input, on the way to what predicts token t + 1. The engine never runs the last token; a
record covers those before it.

`support[t]`, where sampling was cut off, are the ids that token t could have had: log-probs and entropies are of the
distribution over these.

`rollouts.py` has the host side, `batch.py` the training side; `arrays.py`, `sampling_mask.py` and `comm.py` what they
are made of. Where an agent's conversation became several sequences, these are one episode: `episodes.py`.
"""

from megarl.types.arrays import Ids, Logprobs, as_token_ids, no_logprobs
from megarl.types.batch import TOKEN_COLUMNS, BatchSharding, Counts, ModelOutput, TokenLoss, TrainBatch, reads
from megarl.types.comm import LOCAL, AllReduce, Comm, LocalComm, local_all_reduce
from megarl.types.episodes import Branch, Episodes
from megarl.types.reward_values import Reward, RewardFailure, RewardResult
from megarl.types.rollouts import ROLLOUT_STATS, STATUSES, Message, Prompt, Rollout, Rollouts, Status, Turn, as_branches
from megarl.types.sampling_mask import SamplingMask

__all__ = [
    "LOCAL",
    "TOKEN_COLUMNS",
    "Counts",
    "Episodes",
    "ROLLOUT_STATS",
    "STATUSES",
    "LocalComm",
    "Branch",
    "Comm",
    "RewardFailure",
    "Ids",
    "Logprobs",
    "Message",
    "ModelOutput",
    "Prompt",
    "Reward",
    "Rollout",
    "Rollouts",
    "BatchSharding",
    "Status",
    "SamplingMask",
    "TokenLoss",
    "AllReduce",
    "TrainBatch",
    "Turn",
    "RewardResult",
    "local_all_reduce",
    "as_branches",
    "as_token_ids",
    "no_logprobs",
    "reads",
]
