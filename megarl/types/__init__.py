"""Values that cross a stage of the loop.

Host side: frozen dataclasses, one per concept (`Prompt`, `Turn`, `Rollout`). Training side: one packed batch
(`TrainBatch`) of `[T]` tensors: the T tokens of its sequences, laid end to end without padding.

**Per-sequence values are on every rank; per-token values stay on the rank that generated them.** Every rank has [N]
tensors over all N rollouts: lengths, groups, rewards, statuses. The text, tokens and records of a rollout are on one
rank, its home, which leads the engine that generated it. The home rank computes and stores the columns of its tokens,
and sends a model the rows that it needs. Functions of tokens (`algorithms/`) treat each sequence by itself, so they are
correct on a subset of the sequences. A mean or sum over all tokens goes through an all-reduce of the partial results:

    kl_mean = token_mean(kl, batch.loss_mask, batch.all_reduce)    not kl.mean(), which covers this rank's tokens only

On a single rank `all_reduce` is the identity.

Alignment, defined here once and used everywhere: **index t speaks about token t.**
`logprobs[t]` is log p(tokens[t] | tokens before it), `values[t]` is the critic's value of the state in which
token t was sampled (that is, before it), `advantages[t]`, `returns[t]` and `rewards[t]` belong to the choice of
token t, and `loss_mask[t]` is True when the policy sampled token t. The first token of a sequence has no
prediction: its entries are 0 and its mask is False. Models emit at index t what they predict for t + 1; the
shift happens in `megarl/megatron/` and nowhere else. A reward model's `scores[t]` rates the conversation up to and
including token t, where it is emitted: there is no shift, and the score of the whole conversation is at its last token.

A worked example, one tool call in two turns (ids made up; A = action):

    turn 0  prompt         [1 2 3]      is_action=False
    turn 1  tool call      [7 8]        is_action=True    logprobs [-.1 -.2]
    turn 2  tool response  [4 5]        is_action=False
    turn 3  answer         [9]          is_action=True    logprobs [-.3]

    tokens            1  2  3  7    8    4  5  9
    positions         0  1  2  3    4    5  6  7
    loss_mask         .  .  .  A    A    .  .  A
    rollout_logprobs  0  0  0  -.1  -.2  0  0  -.3
    rewards           0  0  0  0    0    0  0  r        (an outcome reward sits on the last action)
    turn_rewards      0  0  0  0    a    0  0  b        (a turn's own reward sits on its last token)

`routing[t]` is the exception: it describes token t as an input, not as a choice. It names the experts that processed
token t on the way to the prediction of token t + 1. The engine never runs the last token, so a record covers the
tokens before it.

With truncated sampling, `sampling_mask` holds the ids that could have been sampled at t. Log-probs and entropies are
then those of the distribution over these ids.

A prompt or a tool result may hold images. Each stands for a run of image tokens in the turn, which the vision tower's
features replace as inputs; like all tokens that the policy did not sample, they are outside of the loss mask.

`rollouts.py` has the host side, `batch.py` the training side; `arrays.py`, `image_tokens.py` and `comm.py` have their
building blocks. An agent's conversation may become several sequences, which form one episode: `episodes.py`.
"""

# ruff: noqa: F401
from megarl.types.arrays import Ids, Logprobs, SamplingMask, as_token_ids, no_logprobs
from megarl.types.batch import TOKEN_COLUMNS, BatchSharding, Counts, ModelOutput, TokenLoss, TrainBatch, reads
from megarl.types.comm import LOCAL, AllReduce, Comm, LocalComm, local_all_reduce
from megarl.types.episodes import Branch, Episodes
from megarl.types.image_tokens import IMAGE_PLACEHOLDER, Grid, Image, mrope_positions, pack_images, unpack_images
from megarl.types.reward_values import Reward, RewardFailure, RewardResult
from megarl.types.rollouts import (
    ROLLOUT_STATS,
    STATUSES,
    Message,
    Prompt,
    Rollout,
    Rollouts,
    Status,
    Turn,
    as_branches,
    sequence_images,
)
