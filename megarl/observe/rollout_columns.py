"""Columns of recorded rollouts. `rollout_table` converts between rollouts and rows.

A file is compressed parquet, readable as it is by pandas, polars and duckdb, with one row per rollout. Per-token
columns hold the tokens of all turns concatenated; `turn_lengths` splits them. `TRAINER_COLUMNS` are null if not
recorded or if `track.save_replay_data` is off. Files of earlier formats lack later columns, which are read as null.
JSON is `exact_json`: NaN is {"float": "nan"}. In plain strings a lone surrogate, which parquet cannot hold, is written
as \\ud800. The file's metadata have `megarl.format`, `megarl.step`, `megarl.total` (rollouts of the whole step, over
the files of all ranks), `megarl.vocabulary` (a hash of the tokenizer's vocabulary) and `megarl.generation` (JSON, see
`rollout_table.StepGeneration`).
"""

from __future__ import annotations

import pyarrow as pa

FORMAT = 7
"""Version of the file format; changes with the columns."""


def _list(item_type: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", item_type, nullable=False))


INT, LONG, DOUBLE, BOOL, TEXT = pa.int32(), pa.int64(), pa.float64(), pa.bool_(), pa.string()
INTS, FLOATS = _list(INT), _list(pa.float32())
NULL = True

_COLUMNS: tuple[tuple[str, pa.DataType, bool], ...] = (
    ("number", INT, not NULL),  # index of the rollout in its step, from 0
    ("group", LONG, not NULL),  # prompt index in the step, shared by the samples of a prompt
    ("episode", LONG, not NULL),  # shared by the branches of an agent's episode within a group; -1 if there is only one
    ("status", TEXT, not NULL),  # how it ended
    ("failure", TEXT, not NULL),  # for an aborted rollout, why
    ("reward", DOUBLE, not NULL),  # total, including rewards of turns
    ("reward_parts", TEXT, not NULL),  # JSON {name: value}, unweighted
    ("unscored", TEXT, not NULL),  # JSON {part: reason} if it has no reward
    ("advantage", DOUBLE, NULL),  # mean over the policy's tokens; null if there are none
    ("logprob", DOUBLE, NULL),  # likewise
    *((name, INT, not NULL) for name in ("tool_calls", "tool_errors", "drafted", "accepted")),
    ("seed", LONG, not NULL),
    ("turn_lengths", INTS, not NULL),  # tokens per turn; turn 0 is the prompt
    ("turn_is_action", _list(BOOL), not NULL),  # whether the policy generated the turn
    ("turn_weight_version", INTS, not NULL),  # weight version that generated the turn; -1 for other turns
    # JSON {turn: [[version, tokens], ...]} for turns with a weight sync in between; else null
    ("turn_versions", TEXT, NULL),
    ("turn_rewards", _list(DOUBLE), not NULL),
    ("token_ids", INTS, not NULL),
    ("logprobs", FLOATS, not NULL),  # as reported by the engine; 0 for tokens that the policy did not generate
    ("advantages", FLOATS, NULL),  # null if the rollout was not trained on
    ("messages", TEXT, not NULL),  # JSON, the conversation as text
    ("id", TEXT, not NULL),  # of the prompt, like the columns up to prompt_token_ids
    ("data_source", TEXT, not NULL),
    *((name, TEXT, not NULL) for name in ("ground_truth", "tools", "extra", "prompt_messages")),  # JSON
    ("prompt_token_ids", INTS, NULL),  # null if equal to turn 0
    # Experts chosen for the first tokens, with `train.routing_replay`; 1 or 2 bytes each
    ("routing", pa.large_binary(), NULL),
    ("routing_shape", INTS, NULL),  # its tokens, MoE layers, and experts per token
    ("support_counts", INTS, NULL),  # truncated sampling: size of the sampling mask of each generated token
    ("support_ids", INTS, NULL),  # the token ids in these masks, concatenated
    ("branch", INT, NULL),  # agent episodes, like the next two; else null: index of the branch, from 0
    ("forks", INT, NULL),  # how often the client diverged from the history so far, the same for all branches
    ("drift", BOOL, NULL),  # whether rendering the last request afresh gives other token ids
    ("trainer_logprobs", FLOATS, NULL),  # before the step's updates; of steps that computed them
    ("unreplayed_logprobs", FLOATS, NULL),  # the same through the trainer's own experts, with `train.routing_replay`
    # Tokens before a policy turn that the engine had cached when the turn was requested; -1 for other turns, and if the
    # engine did not report it
    ("turn_cached_tokens", INTS, NULL),
    ("call", INT, NULL),  # which of the step's generations, from 0; null if the algorithm made the rollout itself
    ("greedy", BOOL, NULL),  # whether that generation was greedy
    # JSON, the environment's part of the reward as it was before weighting: {"reward", "parts", "turns"} or {"failure"}
    ("env_reward", TEXT, NULL),
    # Seven numbers per image, null without any: its turn (-1: the prompt as in the data), the start and the number of
    # its tokens, times, rows and columns of its patches, and the index of its file among the `image_files` of all rows
    # (-1: not recorded)
    ("images", INTS, NULL),
    ("image_files", _list(pa.large_binary()), NULL),  # the encoded files that no earlier row of this file has
    ("sparse_indices", pa.large_binary(), NULL),  # keys chosen by sparse attention (`train.sparse_index_replay`)
    ("sparse_shape", INTS, NULL),  # its tokens, layers with an indexer, and keys per token; 2 or 4 bytes per key
)
SCHEMA = pa.schema([pa.field(name, data_type, nullable=nullable) for name, data_type, nullable in _COLUMNS])
TRAINER_COLUMNS = ("routing", "support_counts", "support_ids", "image_files", "sparse_indices")
"""Columns that only a trainer reads; they may be larger than all others together."""
COLUMNS_SINCE_FORMAT: dict[int, tuple[str, ...]] = {
    4: ("routing_shape", "routing", "support_counts", "support_ids"),
    5: ("branch", "forks", "drift", "trainer_logprobs", "unreplayed_logprobs"),
    6: ("turn_cached_tokens",),
    7: ("call", "greedy", "env_reward", "images", "image_files", "sparse_indices", "sparse_shape"),
}
"""Columns by the format that introduced them. All other columns exist since format 3, the oldest that is read."""
DICTIONARY_COLUMNS = [name for name, data_type, _ in _COLUMNS if data_type == TEXT and name != "messages"]
"""Columns with many repeated values, which dictionary encoding compresses."""
