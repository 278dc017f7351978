"""The columns of recorded rollouts: what a file of them holds (`rollout_table` has how a rollout becomes a row).

One row per rollout, compressed parquet, which pandas, polars and duckdb read as it is. Columns of tokens have the
tokens of all turns of a rollout end to end; `turn_lengths` says where one turn ends and the next begins:

    number               int32    which rollout of its step, from 0
    group                int64    which prompt of its step: samples of one prompt share it
    episode              int64    branches of one episode of an agent share it within a group; -1 for what is alone
    status, failure      string   how it ended; of an aborted one, what cut it off
    reward               float64  that of its turns included
    reward_parts         JSON     {name: value}, before their weights
    unscored             JSON     {part: why} where it has no reward
    advantage, logprob   float64  means over the policy's tokens; null where there are none
    tool_calls, tool_errors, drafted, accepted   int32
    seed                 int64
    turn_lengths         [int32]  tokens of each turn; turn 0 is the prompt
    turn_is_action       [bool]   whether the policy wrote the turn
    turn_weight_version  [int32]  -1 for what no policy wrote
    turn_versions        JSON     {turn: [[version, tokens], ...]} of turns whose weights changed within; else null
    turn_rewards         [double] what each turn itself was found to be worth
    token_ids            [int32]
    logprobs             [float]  as the engine reported them, 0 for what the policy did not write
    advantages           [float]  null where the rollout was not trained on
    messages             JSON     the conversation in words
    id, data_source      string   of the prompt, as all that follow
    ground_truth, tools, extra, prompt_messages  JSON
    prompt_token_ids     [int32]  null where they are those of turn 0
    routing              bytes    of the first tokens the experts that each went through, with `train.replay_routing`
    routing_shape        [int32]  its tokens, MoE layers and experts of a token; of a byte each, or of two
    support_counts       [int32]  of each token that the policy wrote, how many it could have been, where it was cut off
    support_ids          [int32]  which, token after token
    branch, forks        int32    of an agent's episode which branch it is, from 0; how often its client has left the
                                  history that it had begun, the same on all branches
    drift                bool     whether its last answer would have been asked for with other ids, rendered afresh
    trainer_logprobs     [float]  the trainer's before the step's updates, as those are; of steps that have looked
    unreplayed_logprobs  [float]  likewise, of experts that the trainer chose itself; with `train.replay_routing`
    turn_cached_tokens   [int32]  of all tokens before a turn of the policy those that the engine had in its cache when
                                  it was asked for it; -1 for others' turns, and where it did not say

The four of records are null where there is none, or `track.records` is off; the next three of what is no agent's. Files
of earlier formats lack the columns of later ones (`COLUMNS_SINCE_FORMAT`), which are read as null. JSON is `exact_json`: NaN is
{"float": "nan"}. In a plain string half a surrogate pair, which parquet cannot hold, is written as \\ud800. The file's
metadata say `megarl.format`, `megarl.step`, `megarl.total`, the number of rollouts of the whole step, of which other
files have those that are not in this one, and `megarl.vocabulary`, a hash of the words that the ids stand for.
"""

from __future__ import annotations

import pyarrow as pa

FORMAT = 6
"""Another number for other columns."""


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


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
TYPES = {name: kind for kind, names in _COLUMNS_BY_TYPE.items() for name in names}
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
"""Columns that only a trainer reads, and which may be larger than all others."""
COLUMNS_SINCE_FORMAT: dict[int, tuple[str, ...]] = {
    4: ("routing_shape", *TRAINER_COLUMNS),
    5: ("branch", "forks", "drift", "trainer_logprobs", "unreplayed_logprobs"),
    6: ("turn_cached_tokens",),
}
"""Columns by the first format that has them; those of format 3 are in all that are read."""
_LATER_COLUMNS = tuple(name for names in COLUMNS_SINCE_FORMAT.values() for name in names)
NULLABLE = ("advantage", "logprob", "advantages", "turn_versions", "prompt_token_ids", *_LATER_COLUMNS)
SCHEMA = pa.schema([pa.field(name, TYPES[name], nullable=name in NULLABLE) for name in ORDER])
DICTIONARY_COLUMNS = [name for name in ORDER if TYPES[name] == pa.string() and name != "messages"]
"""Columns in which values come again and again, which a dictionary makes small."""
