"""Convert rollouts to table rows and back. `rollout_columns` documents the columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import torch

from megarl.observe.rollout_columns import ORDER, SCHEMA, TYPES
from megarl.types import Branch, Prompt, Rollout, SamplingMask, Status, Turn, no_logprobs
from megarl.utils import exact_json


class TrainerLogprobs(NamedTuple):
    """Trainer log-probs of a rollout before its step's updates: [tokens] float32, 0 for tokens of other turns.

    `unreplayed` are those through the trainer's own experts; None unless routing was replayed.
    """

    logprobs: np.ndarray
    unreplayed: np.ndarray | None = None


class Record(NamedTuple):
    """A recorded rollout with its training values."""

    number: int
    """Index in its step."""
    rollout: Rollout
    advantage: float | None
    """Mean over the policy's tokens; None if it was not trained on."""
    advantages: np.ndarray | None
    """[tokens] float32, all turns concatenated."""
    trainer_logprobs: TrainerLogprobs | None = None


# --- rollouts to rows -----------------------------------------------------------------------------------------


def to_batch(
    numbers: Sequence[int],
    rollouts: Sequence[Rollout],
    advantages: Sequence[np.ndarray | None],
    trainer_logprobs: Sequence[TrainerLogprobs | None] | None = None,
) -> pa.RecordBatch:
    """Convert rollouts to a record batch with one row each.

    `advantages` and `trainer_logprobs` have one value per token of each rollout. Raises ValueError or OverflowError for
    values that the columns cannot hold.
    """
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    lengths = np.array([len(turn.token_ids) for turn in turns], np.int32)
    is_action = np.array([turn.is_action for turn in turns], bool)
    turn_offsets = _offsets([len(rollout.turns) for rollout in rollouts])
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[turn_offsets]
    tokens = _concat([turn.token_ids for turn in turns], np.int32)
    zeros = np.zeros(int(lengths.max(initial=0)), np.float32)
    logprobs = _concat(
        [turn.logprobs if turn.is_action else zeros[: len(turn.token_ids)] for turn in turns], np.float32
    )
    sizes = np.diff(offsets).tolist()
    recorded_logprobs = [None] * len(rollouts) if trainer_logprobs is None else trainer_logprobs
    branches = [rollout.branch for rollout in rollouts]
    spans = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    mask = np.repeat(is_action, lengths)
    is_turn_0 = [_starts_with_prompt(rollout) for rollout in rollouts]
    prompt_ids = [
        () if is_in_turns else rollout.prompt.token_ids
        for is_in_turns, rollout in zip(is_turn_0, rollouts, strict=True)
    ]
    prompt_values: dict[int, tuple[str, ...]] = {}  # samples share a prompt object
    for rollout in rollouts:
        if id(rollout.prompt) not in prompt_values:
            prompt_values[id(rollout.prompt)] = _prompt_values(rollout.prompt)
    prompts = list(zip(*(prompt_values[id(rollout.prompt)] for rollout in rollouts), strict=True))
    columns: dict[str, Any] = {
        "number": np.asarray(numbers, np.int32),
        "group": [rollout.group for rollout in rollouts],
        "episode": [rollout.episode for rollout in rollouts],
        "status": [rollout.status for rollout in rollouts],
        "failure": [_escape_surrogates(rollout.failure) for rollout in rollouts],
        "reward": [float(rollout.reward) for rollout in rollouts],
        "reward_parts": [exact_json.dumps(rollout.reward_parts) for rollout in rollouts],
        "unscored": [exact_json.dumps(rollout.unscored) for rollout in rollouts],
        "advantage": [
            None if values is None else _mean(values[mask[a:b]])
            for values, (a, b) in zip(advantages, spans, strict=True)
        ],
        "logprob": [_mean(logprobs[a:b][mask[a:b]]) for a, b in spans],
        **{
            name: [getattr(rollout, name) for rollout in rollouts]
            for name in ("tool_calls", "tool_errors", "drafted", "accepted", "seed")
        },
        "turn_lengths": (turn_offsets, lengths),
        "turn_is_action": (turn_offsets, is_action),
        "turn_weight_version": (turn_offsets, np.array([turn.weight_version for turn in turns], np.int32)),
        "turn_versions": [_dump_versions(rollout) for rollout in rollouts],
        "turn_cached_tokens": (turn_offsets, np.array([turn.cached_tokens for turn in turns], np.int32)),
        "turn_rewards": (turn_offsets, np.array([turn.reward for turn in turns], np.float64)),
        "token_ids": (offsets, tokens),
        "logprobs": (offsets, logprobs),
        "advantages": _float_lists(advantages, sizes, "advantages"),
        "messages": [exact_json.dumps(rollout.messages) for rollout in rollouts],
        **dict(zip(_PROMPT_COLUMNS, prompts, strict=True)),
        "prompt_token_ids": (_offsets(map(len, prompt_ids)), _concat(prompt_ids, np.int32), is_turn_0),
        "routing": [None if rollout.routing is None else _tensor_bytes(rollout.routing) for rollout in rollouts],
        "routing_shape": _int_lists(
            [None if rollout.routing is None else rollout.routing.shape for rollout in rollouts]
        ),
        "support_counts": _int_lists(
            [None if rollout.sampling_mask is None else rollout.sampling_mask.counts for rollout in rollouts]
        ),
        "support_ids": _int_lists(
            [None if rollout.sampling_mask is None else rollout.sampling_mask.ids for rollout in rollouts]
        ),
        "branch": [None if branch is None else branch.number for branch in branches],
        "forks": [None if branch is None else branch.forks for branch in branches],
        "drift": [None if branch is None else branch.has_drifted for branch in branches],
        "trainer_logprobs": _float_lists(
            [
                None if logprobs_of_rollout is None else logprobs_of_rollout.logprobs
                for logprobs_of_rollout in recorded_logprobs
            ],
            sizes,
            "log-probs",
        ),
        "unreplayed_logprobs": _float_lists(
            [
                None if logprobs_of_rollout is None else logprobs_of_rollout.unreplayed
                for logprobs_of_rollout in recorded_logprobs
            ],
            sizes,
            "log-probs",
        ),
    }
    return pa.record_batch([_array(columns[name], TYPES[name]) for name in ORDER], schema=SCHEMA)


_PROMPT_COLUMNS = ("id", "data_source", "ground_truth", "tools", "extra", "prompt_messages")


def _prompt_values(prompt: Prompt) -> tuple[str, ...]:
    json_values = map(exact_json.dumps, (prompt.ground_truth, prompt.tools, prompt.extra, prompt.messages))
    return (_escape_surrogates(prompt.id), _escape_surrogates(prompt.data_source), *json_values)


def _dump_versions(rollout: Rollout) -> str | None:
    versions = {str(number): turn.versions for number, turn in enumerate(rollout.turns) if turn.versions}
    return exact_json.dumps(versions) if versions else None


def _spans(spans: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(version), int(tokens)) for version, tokens in spans)


def _starts_with_prompt(rollout: Rollout) -> bool:
    return bool(rollout.turns) and np.array_equal(rollout.prompt.token_ids, rollout.turns[0].token_ids)


def _escape_surrogates(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean(dtype=np.float64)) if len(values) else None


def _offsets(lengths: Any) -> np.ndarray:
    """Return the [n + 1] offsets of n concatenated lists."""
    return np.cumsum([0, *lengths], dtype=np.int64)


def _concat(parts: Sequence[Any], dtype: type) -> np.ndarray:
    """Concatenate arrays or sequences of numbers."""
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def _float_lists(values: Sequence[np.ndarray | None], sizes: Sequence[int], name: str) -> tuple[Any, ...]:
    """Build a nullable column of one float per token."""
    for array, size in zip(values, sizes, strict=True):
        if array is not None and len(array) != size:
            raise ValueError(f"{len(array)} {name} for a rollout of {size} tokens")
    arrays = [np.zeros(0, np.float32) if array is None else array for array in values]
    return _offsets(map(len, arrays)), _concat(arrays, np.float32), [array is None for array in values]


def _int_lists(values: Sequence[Any]) -> tuple[Any, ...]:
    """Build a nullable column of integer lists."""
    arrays = [np.zeros(0, np.int32) if value is None else np.asarray(value, np.int32) for value in values]
    return _offsets(map(len, arrays)), _concat(arrays, np.int32), [value is None for value in values]


def _tensor_bytes(record: torch.Tensor) -> memoryview:
    return record.contiguous().view(-1).view(torch.uint8).numpy().data


def _array(column: Any, data_type: pa.DataType) -> pa.Array:
    if not isinstance(column, tuple) or not pa.types.is_list(data_type):
        return pa.array(column, data_type)
    offsets, values, *missing = column
    mask = pa.array(*missing, pa.bool_()) if missing else None
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values), type=data_type, mask=mask)


# --- rows to rollouts -----------------------------------------------------------------------------------------


def iter_table_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield each row as a dict; lists are numpy views."""
    columns = [_column_values(column.combine_chunks()) for column in table.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(table.column_names, values, strict=True))


def to_record(row: dict[str, Any]) -> Record:
    """Convert a row back to a record.

    Values are None if the row lacks their columns, be it `TRAINER_COLUMNS` or columns newer than its format. Raises
    ValueError for an invalid row.
    """
    check_turns(row)
    tokens, logprobs = row["token_ids"], row["logprobs"]
    offsets = _offsets(row["turn_lengths"]).tolist()
    if not offsets[-1] == len(tokens) == len(logprobs):
        raise ValueError(f"turns of {offsets[-1]} tokens with {len(tokens)} token ids and {len(logprobs)} logprobs")
    if len(tokens) and tokens.min() < 0:
        raise ValueError("a token id is negative")
    columns = (row[name].tolist() for name in ("turn_is_action", "turn_weight_version", "turn_rewards"))
    cached = row.get("turn_cached_tokens")
    cached_tokens = [-1] * (len(offsets) - 1) if cached is None else cached.tolist()
    spans = zip(offsets, offsets[1:], *columns, cached_tokens, strict=False)
    version_spans = {} if row["turn_versions"] is None else _load_json(row, "turn_versions", dict)
    turn_versions = [_spans(version_spans.get(str(number), ())) for number in range(len(offsets) - 1)]
    turns = tuple(
        Turn(
            tokens[a:b], logprobs[a:b] if is_action else no_logprobs(), is_action, version, versions, reward, num_cached
        )
        for (a, b, is_action, version, reward, num_cached), versions in zip(spans, turn_versions, strict=True)
    )
    prompt_ids, reward_parts = row["prompt_token_ids"], _load_json(row, "reward_parts", dict)
    if invalid := [name for name, value in reward_parts.items() if type(value) not in (int, float)]:
        raise ValueError(f"its reward part {invalid[0]} is {reward_parts[invalid[0]]!r}, not a number")
    unscored = _load_json(row, "unscored", dict)
    if invalid := [part for part, reason in unscored.items() if not isinstance(reason, str)]:
        raise ValueError(f"the reason why it has no {invalid[0]} is {unscored[invalid[0]]!r}, not text")
    prompt = Prompt(
        id=row["id"],
        messages=tuple(_load_json(row, "prompt_messages", list)),
        token_ids=turns[0].token_ids if prompt_ids is None else prompt_ids,
        data_source=row["data_source"],
        ground_truth=_load_json(row, "ground_truth"),
        tools=tuple(_load_json(row, "tools", list)),
        extra=_load_json(row, "extra", dict),
    )
    fields = ("status", "reward", "seed", "group", "episode", "failure")
    names = (*fields, "tool_calls", "tool_errors", "drafted", "accepted")
    rollout = Rollout(
        prompt=prompt,
        turns=turns,
        messages=tuple(_load_json(row, "messages", list)),
        reward_parts=reward_parts,
        unscored=unscored,
        routing=_read_routing(row, len(tokens)),
        sampling_mask=_read_sampling_mask(row),
        branch=_read_branch(row),
        **{name: row[name] for name in names},
    )
    for name in ("advantages", "trainer_logprobs", "unreplayed_logprobs"):
        if (values := row.get(name)) is not None and len(values) != len(tokens):
            raise ValueError(f"{len(values)} {name} for a rollout of {len(tokens)} tokens")
    trainer_logprobs = row.get("trainer_logprobs")
    trainer = None if trainer_logprobs is None else TrainerLogprobs(trainer_logprobs, row.get("unreplayed_logprobs"))
    return Record(row["number"], rollout, row["advantage"], row["advantages"], trainer)


def _read_branch(row: dict[str, Any]) -> Branch | None:
    number, forks, drift = (row.get(name) for name in ("branch", "forks", "drift"))
    return None if number is None or forks is None or drift is None else Branch(number, forks, drift)


def _read_routing(row: dict[str, Any], tokens: int) -> torch.Tensor | None:
    content, shape = row.get("routing"), row.get("routing_shape")
    if content is None:
        return None
    size = 0 if shape is None or len(shape) != 3 or shape.min() < 0 else int(np.prod(shape, dtype=np.int64))
    if shape is None or len(content) not in (size, 2 * size) or shape[0] > tokens:
        shape_list = None if shape is None else shape.tolist()
        raise ValueError(f"its routing has {len(content)} bytes, for {tokens} tokens and a shape of {shape_list}")
    routing = torch.from_numpy(content.copy())  # a copy, so as not to keep the whole row group in memory
    return (routing if len(content) == size else routing.view(torch.int16)).view(shape.tolist())


def _read_sampling_mask(row: dict[str, Any]) -> SamplingMask | None:
    counts, ids = row.get("support_counts"), row.get("support_ids")
    if counts is None or ids is None:
        return None
    num_actions = int(row["turn_lengths"][row["turn_is_action"]].sum())
    if len(counts) != num_actions or (num_actions and counts.min() < 0) or counts.sum() != len(ids):
        raise ValueError(
            f"of {num_actions} tokens of the policy, {len(counts)} have sampling masks of {len(ids)} in total"
        )
    if len(ids) and ids.min() < 0:
        raise ValueError("a token of a sampling mask is negative")
    return SamplingMask(torch.from_numpy(counts.copy()), torch.from_numpy(ids.copy()))


def check_turns(row: dict[str, Any]) -> None:
    """Raise ValueError if the per-rollout and per-turn columns are inconsistent."""
    lengths, is_action = row["turn_lengths"], row["turn_is_action"]
    if row["status"] not in get_args(Status):
        raise ValueError(f"a rollout does not end as {row['status']!r}")
    names = ("turn_weight_version", "turn_rewards", "turn_cached_tokens")
    turn_columns = [row[name] for name in names if row.get(name) is not None]
    if any(len(column) != len(lengths) for column in (is_action, *turn_columns)):
        raise ValueError("its columns disagree on the number of turns")
    if not len(lengths) or is_action[0]:
        raise ValueError("its first turn is not a prompt")
    if lengths.min() < 0:
        raise ValueError("a turn has a negative length")


def _load_json(row: dict[str, Any], name: str, expected_type: Callable[..., Any] | None = None) -> Any:
    try:
        value = exact_json.loads(row[name])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: {error}") from None
    if expected_type is not None and type(value) is not expected_type:
        raise ValueError(f"{name} is {row[name][:50]}, not a {expected_type.__name__}")
    return value


def _column_values(column: pa.Array) -> list[Any]:
    if pa.types.is_large_binary(column.type):
        return [None if not value.is_valid else np.frombuffer(value.as_buffer(), np.uint8) for value in column]
    if not pa.types.is_list(column.type):
        return column.to_pylist()
    values, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_pylist()
    validity = column.is_valid().to_pylist()
    return [values[a:b] if is_valid else None for a, b, is_valid in zip(offsets, offsets[1:], validity, strict=False)]
