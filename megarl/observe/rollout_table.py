"""Convert rollouts to table rows and back. `rollout_columns` documents the columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import torch

from megarl.observe.rollout_columns import SCHEMA, TRAINER_COLUMNS
from megarl.types import (
    Branch,
    Prompt,
    RewardFailure,
    RewardResult,
    Rollout,
    SamplingMask,
    Status,
    Turn,
    no_logprobs,
)
from megarl.types.arrays import concat
from megarl.types.image_tokens import Grid, Image
from megarl.types.reward_values import parse_reward
from megarl.utils import exact_json

_PLAIN_FIELDS = ("status", "seed", "group", "episode", "tool_calls", "tool_errors", "drafted", "accepted")
"""Fields of a rollout that are columns as they are."""


class TrainerLogprobs(NamedTuple):
    """Trainer log-probs of a rollout before its step's updates: [tokens] float32, 0 for tokens of other turns.

    `unreplayed` are those through the trainer's own experts; None unless routing was replayed.
    """

    logprobs: np.ndarray
    unreplayed: np.ndarray | None = None


@dataclass(frozen=True)
class StepGeneration:
    """How a step's rollouts were generated; in the metadata of each of its files."""

    greedy: tuple[bool, ...] = ()
    """By call of `generate`: whether it was greedy."""
    version: int = -1
    """Version of the policy's weights at the first call."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the rollout worker, such as staleness and failed tool calls."""

    def to_json(self) -> str:
        return exact_json.dumps(vars(self))

    @staticmethod
    def from_json(text: str) -> StepGeneration | None:
        """Parse `to_json`; None for files of earlier formats, which lack it. Raises ValueError."""
        if not text:
            return None
        tree = exact_json.loads(text)
        return StepGeneration(tuple(map(bool, tree["greedy"])), int(tree["version"]), dict(tree["metrics"]))


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
    call: int | None = None
    """Which of the step's generations it is of; None in earlier formats, and if the algorithm made it itself."""
    is_greedy: bool = False
    """Whether that generation was greedy; False where `call` is None."""


# --- rollouts to rows -----------------------------------------------------------------------------------------


def to_batch(
    numbers: Sequence[int],
    rollouts: Sequence[Rollout],
    advantages: Sequence[np.ndarray | None],
    trainer_logprobs: Sequence[TrainerLogprobs | None],
    calls: Sequence[int | None],
    greedy: Sequence[bool],
    image_numbers: dict[bytes, int],
    save_replay_data: bool = True,
) -> pa.RecordBatch:
    """Convert rollouts to a record batch with one row each.

    `advantages` and `trainer_logprobs` have one value per token of each rollout. Raises ValueError or OverflowError for
    values that the columns cannot hold.

    Args:
        calls: which of the step's generations each rollout is of. greedy: by call.
        image_numbers: the index of each image in the file so far; updated.
        save_replay_data: whether to fill `TRAINER_COLUMNS`.
    """
    without = {} if save_replay_data else dict.fromkeys((*TRAINER_COLUMNS, "routing_shape", "sparse_shape"))
    prompts = {id(rollout.prompt): rollout.prompt for rollout in rollouts}  # samples share a prompt object
    prompt_columns = {key: _prompt_columns(prompt) for key, prompt in prompts.items()}
    rows = [
        {
            "number": number,
            **prompt_columns[id(rollout.prompt)],
            **_rollout_columns(rollout),
            **_image_columns(rollout, image_numbers if save_replay_data else None),
            **_training_columns(rollout, values, trainer),
            "call": call,
            "greedy": None if call is None else greedy[call],
            **without,
        }
        for number, rollout, values, trainer, call in zip(
            numbers, rollouts, advantages, trainer_logprobs, calls, strict=True
        )
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def _prompt_columns(prompt: Prompt) -> dict[str, Any]:
    return {
        "id": _escape_surrogates(prompt.id),
        "data_source": _escape_surrogates(prompt.data_source),
        "ground_truth": exact_json.dumps(prompt.ground_truth),
        "tools": exact_json.dumps(prompt.tools),
        "extra": exact_json.dumps(prompt.extra),
        "prompt_messages": exact_json.dumps(prompt.messages),
    }


def _rollout_columns(rollout: Rollout) -> dict[str, Any]:
    turns, prompt, mask, branch = rollout.turns, rollout.prompt, rollout.sampling_mask, rollout.branch
    indices = rollout.sparse_indices
    logprobs = [turn.logprobs if turn.is_action else np.zeros(len(turn.token_ids), np.float32) for turn in turns]
    versions = {str(number): turn.versions for number, turn in enumerate(turns) if turn.versions}
    starts_with_prompt = bool(turns) and np.array_equal(prompt.token_ids, turns[0].token_ids)
    return {
        **{name: getattr(rollout, name) for name in _PLAIN_FIELDS},
        "failure": _escape_surrogates(rollout.failure),
        "reward": float(rollout.reward),
        "reward_parts": exact_json.dumps(rollout.reward_parts),
        "unscored": exact_json.dumps(rollout.unscored),
        "logprob": _mean(concat([turn.logprobs for turn in turns], np.float32)),
        "turn_lengths": [len(turn.token_ids) for turn in turns],
        "turn_is_action": [turn.is_action for turn in turns],
        "turn_weight_version": [turn.weight_version for turn in turns],
        "turn_versions": exact_json.dumps(versions) if versions else None,
        "turn_cached_tokens": [turn.cached_tokens for turn in turns],
        "turn_rewards": [float(turn.reward) for turn in turns],
        "token_ids": rollout.token_ids,
        "logprobs": concat(logprobs, np.float32),
        "messages": exact_json.dumps(rollout.messages),
        "prompt_token_ids": None if starts_with_prompt else prompt.token_ids,
        "routing": None if rollout.routing is None else _tensor_bytes(rollout.routing),
        "routing_shape": None if rollout.routing is None else list(rollout.routing.shape),
        "support_counts": None if mask is None else mask.counts.numpy(),
        "support_ids": None if mask is None else mask.ids.numpy(),
        "sparse_indices": None if indices is None else _tensor_bytes(indices),
        "sparse_shape": None if indices is None else list(indices.shape),
        "env_reward": None if rollout.env_reward is None else exact_json.dumps(_reward_tree(rollout.env_reward)),
        "branch": None if branch is None else branch.number,
        "forks": None if branch is None else branch.forks,
        "drift": None if branch is None else branch.has_drifted,
    }


def _reward_tree(reward: RewardResult) -> dict[str, Any]:
    return {"failure": reward.reason} if isinstance(reward, RewardFailure) else vars(reward)


def _image_columns(rollout: Rollout, numbers: dict[bytes, int] | None) -> dict[str, Any]:
    """Return the places of a rollout's images, and the files that `numbers`, which is extended, does not contain.

    numbers: None to leave out the files.
    """
    spans: list[int] = []
    files = []
    for turn, images in enumerate((rollout.prompt.images, *(turn.images for turn in rollout.turns)), -1):
        for image in images:
            if numbers is not None and image.data not in numbers:
                numbers[image.data] = len(numbers)
                files.append(image.data)
            number = -1 if numbers is None else numbers[image.data]
            spans += turn, image.start, image.num_tokens, *image.grid, number
    return {"images": spans, "image_files": files} if spans else {"images": None, "image_files": None}


def _training_columns(
    rollout: Rollout, advantages: np.ndarray | None, trainer: TrainerLogprobs | None
) -> dict[str, Any]:
    logprobs, unreplayed = (None, None) if trainer is None else trainer
    for name, values in (("advantages", advantages), ("log-probs", logprobs), ("log-probs", unreplayed)):
        if values is not None and len(values) != rollout.num_tokens:
            raise ValueError(f"{len(values)} {name} for a rollout of {rollout.num_tokens} tokens")
    is_action = concat([np.full(len(turn.token_ids), turn.is_action) for turn in rollout.turns], bool)
    return {
        "advantage": None if advantages is None else _mean(advantages[is_action]),
        "advantages": advantages,
        "trainer_logprobs": logprobs,
        "unreplayed_logprobs": unreplayed,
    }


def _escape_surrogates(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean(dtype=np.float64)) if len(values) else None


def _tensor_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


# --- rows to rollouts -----------------------------------------------------------------------------------------


def iter_table_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield each row as a dict; lists are numpy views."""
    columns = [_column_values(column.combine_chunks()) for column in table.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(table.column_names, values, strict=True))


def to_record(row: dict[str, Any], image_files: Sequence[bytes] = ()) -> Record:
    """Convert a row back to a record.

    Values are None if the row lacks their columns, be it `TRAINER_COLUMNS` or columns newer than its format. Raises
    ValueError for an invalid row.

    image_files: the `image_files` of the file's rows up to this one; without any, the rollout has no images.
    """
    check_turns(row)
    images = _read_images(row, image_files)
    tokens, turns = row["token_ids"], _read_turns(row, images)
    for name in ("advantages", "trainer_logprobs", "unreplayed_logprobs"):
        if (values := row.get(name)) is not None and len(values) != len(tokens):
            raise ValueError(f"{len(values)} {name} for a rollout of {len(tokens)} tokens")
    reward_parts, unscored = _load_json(row, "reward_parts", dict), _load_json(row, "unscored", dict)
    if invalid := [name for name, value in reward_parts.items() if type(value) not in (int, float)]:
        raise ValueError(f"its reward part {invalid[0]} is {reward_parts[invalid[0]]!r}, not a number")
    if invalid := [part for part, reason in unscored.items() if not isinstance(reason, str)]:
        raise ValueError(f"the reason why it has no {invalid[0]} is {unscored[invalid[0]]!r}, not text")
    prompt = Prompt(
        id=row["id"],
        messages=tuple(_load_json(row, "prompt_messages", list)),
        token_ids=turns[0].token_ids if row["prompt_token_ids"] is None else row["prompt_token_ids"],
        data_source=row["data_source"],
        ground_truth=_load_json(row, "ground_truth"),
        tools=tuple(_load_json(row, "tools", list)),
        extra=_load_json(row, "extra", dict),
        images=images.get(-1, ()),
    )
    branch = [row.get(name) for name in ("branch", "forks", "drift")]
    rollout = Rollout(
        prompt=prompt,
        turns=turns,
        messages=tuple(_load_json(row, "messages", list)),
        failure=row["failure"],
        reward=row["reward"],
        reward_parts=reward_parts,
        unscored=unscored,
        routing=_read_routing(row, len(tokens)),
        sparse_indices=_read_sparse_indices(row, len(tokens)),
        sampling_mask=_read_sampling_mask(row),
        env_reward=_read_env_reward(row),
        branch=None if None in branch else Branch(*branch),  # type: ignore[arg-type]
        **{name: row[name] for name in _PLAIN_FIELDS},
    )
    trainer_logprobs = row.get("trainer_logprobs")
    trainer = None if trainer_logprobs is None else TrainerLogprobs(trainer_logprobs, row.get("unreplayed_logprobs"))
    call, is_greedy = row.get("call"), bool(row.get("greedy"))
    return Record(row["number"], rollout, row["advantage"], row["advantages"], trainer, call, is_greedy)


def _read_images(row: dict[str, Any], files: Sequence[bytes]) -> dict[int, tuple[Image, ...]]:
    """Return the images by turn, those of the prompt as in the data under -1."""
    spans = row.get("images")
    if spans is None or not files:
        return {}
    if len(spans) % 7 or spans.min() < -1 or (len(spans) and spans[6::7].max() >= len(files)):
        raise ValueError(f"its images refer to {len(files)} files by {spans.tolist()[:21]}")
    images: dict[int, tuple[Image, ...]] = {}
    for turn, start, num_tokens, t, h, w, number in spans.reshape(-1, 7).tolist():
        images[turn] = (*images.get(turn, ()), Image(files[number], Grid(t, h, w), num_tokens, start))
    return images


def _read_env_reward(row: dict[str, Any]) -> RewardResult | None:
    if row.get("env_reward") is None:
        return None
    tree = _load_json(row, "env_reward", dict)
    if "failure" in tree:
        return RewardFailure(str(tree["failure"]))
    return parse_reward(tree, int(row["turn_is_action"].sum()), "the environment")


def _read_turns(row: dict[str, Any], images: Mapping[int, tuple[Image, ...]]) -> tuple[Turn, ...]:
    tokens, logprobs = row["token_ids"], row["logprobs"]
    ends = np.cumsum(row["turn_lengths"], dtype=np.int64).tolist()
    if not ends[-1] == len(tokens) == len(logprobs):
        raise ValueError(f"turns of {ends[-1]} tokens with {len(tokens)} token ids and {len(logprobs)} logprobs")
    if len(tokens) and tokens.min() < 0:
        raise ValueError("a token id is negative")
    columns = [row[name].tolist() for name in ("turn_is_action", "turn_weight_version", "turn_rewards")]
    cached = row.get("turn_cached_tokens")
    columns.append([-1] * len(ends) if cached is None else cached.tolist())
    spans = {} if row["turn_versions"] is None else _load_json(row, "turn_versions", dict)
    turns = []
    for number, (start, end, is_action, version, reward, num_cached) in enumerate(
        zip([0, *ends[:-1]], ends, *columns, strict=True)
    ):
        versions = tuple((int(span_version), int(count)) for span_version, count in spans.get(str(number), ()))
        turn_logprobs = logprobs[start:end] if is_action else no_logprobs()
        turn_images = images.get(number, ())
        turns.append(
            Turn(tokens[start:end], turn_logprobs, is_action, version, versions, reward, num_cached, turn_images)
        )
    return tuple(turns)


def _read_routing(row: dict[str, Any], tokens: int) -> torch.Tensor | None:
    return _read_tensor("routing", row.get("routing"), row.get("routing_shape"), tokens, (torch.uint8, torch.int16))


def _read_sparse_indices(row: dict[str, Any], tokens: int) -> torch.Tensor | None:
    dtypes = torch.int16, torch.int32
    return _read_tensor("record of sparse indices", row.get("sparse_indices"), row.get("sparse_shape"), tokens, dtypes)


def _read_tensor(
    name: str, content: np.ndarray | None, shape: np.ndarray | None, tokens: int, dtypes: Sequence[torch.dtype]
) -> torch.Tensor | None:
    """Return a [recorded tokens, layers, topk] tensor of the one of `dtypes` that its bytes fit."""
    if content is None:
        return None
    size = 0 if shape is None or len(shape) != 3 or shape.min() < 0 else int(np.prod(shape, dtype=np.int64))
    dtype = next((dtype for dtype in dtypes if len(content) == size * dtype.itemsize), None)
    if shape is None or dtype is None or shape[0] > tokens:
        shape_list = None if shape is None else shape.tolist()
        raise ValueError(f"its {name} has {len(content)} bytes, for {tokens} tokens and a shape of {shape_list}")
    values = torch.from_numpy(content.copy())  # a copy, so as not to keep the whole row group in memory
    return values.view(dtype).view(shape.tolist())


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
