"""Columns of recorded rollouts. `rollout_table` converts between rollouts and rows.

A file is compressed parquet, readable as it is by pandas, polars and duckdb, with one row per rollout. Per-token
columns hold the tokens of all turns concatenated; `turn_lengths` splits them:

    number               int32    index of the rollout in its step, from 0
    group                int64    prompt index in the step, shared by the samples of a prompt
    episode              int64    shared by the branches of an agent's episode within a group; -1 if there is only one
    status, failure      string   how it ended; for an aborted rollout, why
    reward               float64  total, including rewards of turns
    reward_parts         JSON     {name: value}, unweighted
    unscored             JSON     {part: reason} if it has no reward
    advantage, logprob   float64  means over the policy's tokens; null if there are none
    tool_calls, tool_errors, drafted, accepted   int32
    seed                 int64
    turn_lengths         [int32]  tokens per turn; turn 0 is the prompt
    turn_is_action       [bool]   whether the policy generated the turn
    turn_weight_version  [int32]  weight version that generated the turn; -1 for other turns
    turn_versions        JSON     {turn: [[version, tokens], ...]} for turns with a weight sync in between; else null
    turn_rewards         [double] reward of each turn
    token_ids            [int32]
    logprobs             [float]  as reported by the engine; 0 for tokens that the policy did not generate
    advantages           [float]  null if the rollout was not trained on
    messages             JSON     the conversation as text
    id, data_source      string   of the prompt, like the columns up to prompt_token_ids
    ground_truth, tools, extra, prompt_messages  JSON
    prompt_token_ids     [int32]  null if equal to turn 0
    routing              bytes    experts chosen for the first tokens, with `train.routing_replay`; 1 or 2 bytes each
    routing_shape        [int32]  its tokens, MoE layers, and experts per token
    support_counts       [int32]  truncated sampling: size of the sampling mask of each generated token
    support_ids          [int32]  the token ids in these masks, concatenated
    branch, forks        int32    agent episodes: index of the branch, from 0; how often the client diverged from the
                                  history so far, the same for all branches
    drift                bool     agent episodes: whether rendering the last request afresh gives other token ids
    trainer_logprobs     [float]  the trainer's, before the step's updates; of steps that computed them
    unreplayed_logprobs  [float]  the same through the trainer's own experts, with `train.routing_replay`
    turn_cached_tokens   [int32]  tokens before a policy turn that the engine had cached when the turn was requested; -1
                                  for other turns, and if the engine did not report it

The routing and support columns are null if not recorded or if `track.save_replay_data` is off, the next three if the
rollout is not an agent's. Files of earlier formats lack later columns (`COLUMNS_SINCE_FORMAT`), which are read as null.
JSON is `exact_json`: NaN is {"float": "nan"}. In plain strings a lone surrogate, which parquet cannot hold, is written
as \\ud800. The file's metadata have `megarl.format`, `megarl.step`, `megarl.total` (rollouts of the whole step, over
the files of all ranks) and `megarl.vocabulary` (a hash of the tokenizer's vocabulary).
"""

from __future__ import annotations

import pyarrow as pa

FORMAT = 6
"""Version of the file format; changes with the columns."""


def _list(item_type: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", item_type, nullable=False))


_COLUMNS_BY_TYPE: dict[pa.DataType, tuple[str, ...]] = {
    pa.int32(): ("number", "tool_calls", "tool_errors", "drafted", "accepted", "branch", "forks"),
    pa.int64(): ("group", "episode", "seed"),
    pa.float64(): ("reward", "advantage", "logprob"),
    pa.string(): (
        "status",
        "failure",
        "reward_parts",
        "unscored",
        "messages",
        "id",
        "data_source",
        "ground_truth",
        "tools",
    )
    + ("extra", "prompt_messages", "turn_versions"),
    _list(pa.int32()): ("turn_lengths", "turn_weight_version", "token_ids", "prompt_token_ids")
    + ("routing_shape", "support_counts", "support_ids", "turn_cached_tokens"),
    pa.large_binary(): ("routing",),
    pa.bool_(): ("drift",),
    _list(pa.bool_()): ("turn_is_action",),
    _list(pa.float32()): ("logprobs", "advantages", "trainer_logprobs", "unreplayed_logprobs"),
    _list(pa.float64()): ("turn_rewards",),
}
TYPES = {name: data_type for data_type, names in _COLUMNS_BY_TYPE.items() for name in names}
ORDER = (
    *("number", "group", "episode", "status", "failure", "reward", "reward_parts", "unscored", "advantage", "logprob"),
    "tool_calls",
    *("tool_errors", "drafted", "accepted", "seed", "turn_lengths", "turn_is_action", "turn_weight_version"),
    *("turn_versions", "turn_rewards"),
    *("token_ids", "logprobs", "advantages", "messages", "id", "data_source", "ground_truth", "tools", "extra"),
    *("prompt_messages", "prompt_token_ids", "routing", "routing_shape", "support_counts", "support_ids"),
    *("branch", "forks", "drift", "trainer_logprobs", "unreplayed_logprobs", "turn_cached_tokens"),
)
TRAINER_COLUMNS = ("routing", "support_counts", "support_ids")
"""Columns that only a trainer reads; they may be larger than all others together."""
COLUMNS_SINCE_FORMAT: dict[int, tuple[str, ...]] = {
    4: ("routing_shape", *TRAINER_COLUMNS),
    5: ("branch", "forks", "drift", "trainer_logprobs", "unreplayed_logprobs"),
    6: ("turn_cached_tokens",),
}
"""Columns by the format that introduced them. All other columns exist since format 3, the oldest that is read."""
_LATER_COLUMNS = tuple(name for names in COLUMNS_SINCE_FORMAT.values() for name in names)
NULLABLE = ("advantage", "logprob", "advantages", "turn_versions", "prompt_token_ids", *_LATER_COLUMNS)
SCHEMA = pa.schema([pa.field(name, TYPES[name], nullable=name in NULLABLE) for name in ORDER])
DICTIONARY_COLUMNS = [name for name in ORDER if TYPES[name] == pa.string() and name != "messages"]
"""Columns with many repeated values, which dictionary encoding compresses."""
