"""Read the items of a data file: prompts, conversations for SFT, preference pairs. `README.md` has rows of each kind.

Prompts are rendered to token ids once. Conversations and pairs are read and tokenized on access, turn by turn as in the
rollout loop. `check_first_rows` finds mistakes before anything starts.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megarl.config import Config, ConfigError, DataConfig
from megarl.data.columns import (
    check_media,
    count_placeholders,
    join_images,
    list_columns,
    parse_answer,
    parse_chat_messages,
    parse_conversation,
    parse_sharegpt,
    parse_tool_names,
    parse_tool_schemas,
    row_id,
    row_source,
    take_images,
)
from megarl.data.images import ImageFormat
from megarl.data.loader import NESTED_COLUMNS, read_key
from megarl.data.table import LazySequence, Table, read_rows
from megarl.types import IMAGE_PLACEHOLDER, Image, Message, Prompt, Rollout, Turn, as_token_ids
from megarl.types.arrays import no_ids
from megarl.types.requirements import ItemKind

Item = TypeVar("Item")

_ALIASES = {"prompt": "messages", "ground_truth": "label"}  # names of the two columns in other data sets


def read_prompts(
    path: str | Path,
    prompt_key: str = "prompt",
    label_key: str = "ground_truth",
    max_rows: int | None = None,
    name: str = "",
    order: str = "",
) -> list[Prompt]:
    """Read all prompts of a file, or the first `max_rows`, in file order, without token ids.

    prompt_key, label_key: columns of the prompt, and of the ground truth if there is no `reward_model.ground_truth`; ""
    if there is none at all. name: of the data set, if there are several; prefix of ids, and the source of rows without
    `data_source`. order: a column whose values must be numbers or missing.

    Raises ConfigError for a missing, empty or unreadable file, a missing column, a malformed row, an id used twice.
    """
    file = Path(path)
    prompts: list[Prompt] = []
    location_by_id: dict[str, str] = {}
    for location, prompt in islice(iter_prompts(file, prompt_key, label_key, name), max_rows):
        if prompt.id in location_by_id:
            raise ConfigError(
                f"{location}: the id {prompt.id!r} is already used by {location_by_id[prompt.id]}; ids must be unique"
            )
        location_by_id[prompt.id] = location
        if order:
            read_key(prompt.extra, order, location)
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{file} holds no prompts")
    return prompts


def iter_prompts(
    file: Path, prompt_key: str = "prompt", label_key: str = "ground_truth", name: str = ""
) -> Iterator[tuple[str, Prompt]]:
    """Yield (location, prompt) of each row, as in `read_prompts` but without the checks across rows."""
    for index, (location, row) in enumerate(read_rows(file)):
        yield location, parse_prompt(row, location, default_id(file, name, index), prompt_key, label_key, name)


def default_id(file: Path, name: str, index: int) -> str:
    """Return the id of a prompt whose row has none. index: of the row in its file."""
    return f"{name or file.stem}-{index}"


def render_prompts(
    prompts: Sequence[Prompt],
    render: Callable[[Prompt], Sequence[int]],
    max_prompt_tokens: int,
    key: str = "rollout.max_context",
    path: str = "",
) -> tuple[list[Prompt], int]:
    """Return the prompts with token ids, and the number dropped for exceeding `max_prompt_tokens`.

    Raises ConfigError if none is left. key, path: what sets the limit, and the prompts' file, for this error.
    """
    fitting: list[Prompt] = []
    shortest = 0
    for prompt in prompts:
        ids = as_token_ids(render(prompt))
        if len(ids) <= max_prompt_tokens:
            fitting.append(replace(prompt, token_ids=ids))
        else:
            shortest = min(shortest or len(ids), len(ids))
    if not fitting:
        raise prompts_too_long_error(len(prompts), max_prompt_tokens, shortest, key, path)
    return fitting, len(prompts) - len(fitting)


def prompts_too_long_error(
    count: int, max_prompt_tokens: int, shortest: int, key: str = "rollout.max_context", path: str = ""
) -> ConfigError:
    """Return the error for prompts that are all too long."""
    return ConfigError(
        f"{path and f'{path}: '}all {count} prompts are longer than {max_prompt_tokens} tokens, the shortest has "
        f"{shortest}; raise {key}"
    )


def parse_prompt(
    row: dict[str, Any], location: str, fallback_id: str, prompt_key: str, label_key: str, name: str
) -> Prompt:
    """Return the prompt of a row, without token ids. Arguments and errors as in `read_prompts`."""
    check_media(row, location)
    rest = dict(row)
    attached, inline = take_images(rest, location), list[bytes | None]()
    prompt = _pop_column(rest, row, prompt_key, location, "data.prompt_key")
    messages = parse_chat_messages(prompt, location, prompt_key, images=inline)
    images = join_images(attached, inline, messages, location)
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"{location}: {prompt_key!r} ends with the assistant's words, so there is nothing to answer")
    reward_model = rest.get("reward_model")
    ground_truth = None
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        ground_truth = reward_model["ground_truth"]
        if ground_truth is None and label_key:
            raise ConfigError(
                f'{location}: reward_model.ground_truth is empty; fill it in, or set data.label_key to "" if there '
                "is none"
            )
        rest.pop("reward_model")
    elif label_key:
        ground_truth = _pop_column(rest, row, label_key, location, "data.label_key")
    identity, source = row_id(rest, location, name, fallback_id), row_source(rest, location, name)
    for column in ("id", "data_source"):
        rest.pop(column, None)
    tools = parse_tool_names(rest.pop("tools", None), location)
    nested = [rest.pop(column) for column in NESTED_COLUMNS if isinstance(rest.get(column), dict)]
    extra = functools.reduce(operator.or_, nested, rest)
    files = tuple(map(Image, images))
    return Prompt(identity, messages, no_ids(), source, ground_truth, tools, extra, files)


def _pop_column(row: dict[str, Any], original: dict[str, Any], key: str, location: str, option: str) -> Any:
    """Remove and return a column's value. original: the row before columns were removed."""
    for name in (key, _ALIASES.get(key)):
        if name is not None and row.get(name) is not None:
            return row.pop(name)
    empty = f"; the column {key!r} is empty here" if key in row else ""
    none = ' (or to "" if there is no ground truth)' if option == "data.label_key" else ""
    columns = f"columns here: {list_columns(original)}"
    raise ConfigError(f"{location}: no {key!r}{empty}; {columns}; set {option} to the right one{none}")


@dataclass(frozen=True)
class TableDataset(LazySequence[Item]):
    """The items of a file, read and tokenized on access (about a millisecond); nothing is cached."""

    rows: Table
    make_item: Callable[[str, dict[str, Any], int], Item]
    """(location, row, index) -> item."""
    keys: np.ndarray | None = field(default=None, compare=False)
    """[rows] float64: sort keys of a curriculum, NaN if unknown; None without one."""

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int) -> Item:
        return self.make_item(*self.rows.get(index), index)

    def select(self, indices: Sequence[int]) -> TableDataset[Item]:
        keys = None if self.keys is None else self.keys[np.asarray(indices, np.int64)]
        return replace(self, rows=self.rows.select(indices), keys=keys)


def read_conversations(
    path: str | Path,
    tokenizer: Any,
    max_rows: int | None = None,
    prompt_key: str = "prompt",
    answer_key: str = "",
    name: str = "",
    order: str = "",
    images: ImageFormat | None = None,
) -> TableDataset[Rollout]:
    """Read a .jsonl or .parquet file of conversations as Rollouts whose action turns are the assistant's messages.

    An action turn ends with the tokenizer's end-of-turn token; its log-probs are 0, since it was not sampled. name: of
    the data set, if there are several, for ids and as the source of rows without `data_source`. order: a column of
    numbers. images: how the model reads images; None if it reads none. Raises ConfigError, naming the line, for a row
    without a conversation.
    """
    keys = array("d")

    def check_row(location: str, row: dict[str, Any]) -> None:
        if order:
            keys.append(read_key(row, order, location))
        normalize_row(row, location, prompt_key, answer_key, name)

    def make_item(location: str, row: dict[str, Any], index: int) -> Rollout:
        row = normalize_row(row, location, prompt_key, answer_key, name)
        return tokenize_conversation(row, tokenizer, location, index, images=images)

    rows = Table.read(Path(path), check_row, max_rows)
    if not len(rows):
        raise ConfigError(f"{path} holds no conversation")
    return TableDataset(rows, make_item, np.array(keys) if order else None)


def iter_conversations(
    file: Path, tokenizer: Any, prompt_key: str, answer_key: str, name: str, images: ImageFormat | None = None
) -> Iterator[tuple[str, dict[str, Any], Rollout]]:
    """Yield (location, row, conversation) of each row, as in `read_conversations`."""
    for location, row in read_rows(file):
        normalized = normalize_row(row, location, prompt_key, answer_key, name)
        yield location, row, tokenize_conversation(normalized, tokenizer, location, images=images)


def conversations_too_long_error(path: str, count: int, positions: int, shortest: int) -> ConfigError:
    """Return the error for a file whose conversations all exceed the model's `positions`."""
    return ConfigError(
        f"{path}: {count} of {count} conversations are longer than the model's {positions} positions, so none is left; "
        f"the shortest has {shortest} tokens"
    )


def normalize_row(row: dict[str, Any], location: str, prompt_key: str, answer_key: str, name: str) -> dict[str, Any]:
    """Return the row as `tokenize_conversation` takes it. Raises ConfigError if the last message is no assistant's."""
    check_media(row, location)
    row = dict(row)
    column, inline = take_images(row, location), list[bytes | None]()
    messages = parse_conversation(row, location, prompt_key, answer_key, inline)
    files = join_images(column, inline, messages, location)
    roles = [message["role"] for message in messages]
    if len(roles) < 2 or roles[0] == "assistant" or roles[-1] != "assistant":
        raise ConfigError(f"{location}: messages must begin with a prompt and end with the assistant's, not {roles}")
    for number, message in enumerate(messages):
        content_parts = [message.get(part) for part in ("content", "tool_calls", "reasoning_content")]
        if message["role"] == "assistant" and not any(map(str.strip, map(str, filter(None, content_parts)))):
            raise ConfigError(f"{location}: message {number} of 'messages', the assistant's, is empty; drop the row")
    identity, source = row_id(row, location, name, location), row_source(row, location, name)
    tools = parse_tool_schemas(row.get("tools"), location)
    return {**row, "id": identity, "data_source": source, "messages": messages, "tools": tools, "images": files}


class _TemplateError(Exception):
    """The chat template cannot render a conversation."""


_PROBE_ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def tokenize_conversation(
    row: dict[str, Any],
    tokenizer: Any,
    location: str,
    group: int = 0,
    last_only: bool = False,
    images: ImageFormat | None = None,
) -> Rollout:
    """Tokenize one conversation to a Rollout: prompt, action, observation, action, ..., action.

    row: as `normalize_row` returns it. last_only: everything before the assistant's last message is the prompt.
    images: how the model reads images; None if it reads none.

    The chat template renders successively longer prefixes of the conversation. What a prefix adds to the previous one
    is tokenized by itself, because a turn's ids are fixed before the next turn is written.
    """
    if row.get("images") and images is None:
        raise ConfigError(
            f"{location}: there are images, but the model of model.path has no vision tower; drop the row, or use "
            "another model"
        )
    try:
        return _tokenize(row, tokenizer, location, group, last_only, images)
    except _TemplateError as error:
        reason = error
    try:  # blames the template if it cannot render even the simplest conversation, otherwise the row
        _tokenize(_PROBE_ROW, tokenizer, location, group, last_only, None)
    except _TemplateError as error:
        raise ConfigError(f"model.path: {error}; this is so with any conversation") from None
    raise ConfigError(f"{location}: {reason}")


def _tokenize(
    row: dict[str, Any], tokenizer: Any, location: str, group: int, last_only: bool, images: ImageFormat | None
) -> Rollout:
    messages: tuple[Message, ...] = tuple(row["messages"])
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    answers = answers[-1:] if last_only else answers
    tools, end_of_turn = row.get("tools") or None, tokenizer.eos_token
    if not end_of_turn:
        raise ConfigError("model.path: the tokenizer has no eos_token, by which the assistant's turns would end")
    known, files = "", [Image(data) for data in row.get("images") or ()]

    def render_new(count: int, add_generation_prompt: bool) -> str:
        """Return what the first `count` messages add to the text that is known."""
        try:
            text = tokenizer.apply_chat_template(
                list(messages[:count]), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # jinja2's errors and whatever a template raises on purpose
            roles = ", ".join(str(message["role"]) for message in messages)
            reason = " ".join(str(error).split())
            raise _TemplateError(f"the chat template cannot render the roles {roles}: {reason}") from None
        if not text.startswith(known):
            raise _TemplateError("the chat template rewrites earlier turns once later ones are there")
        return str(text[len(known) :])

    turns: list[Turn] = []
    for index in answers:
        observed = render_new(index, True)
        known += observed
        if images is not None and files:
            count = observed.count(IMAGE_PLACEHOLDER)
            observed = images.insert(observed, files[:count], location)
            ids = tokenizer.encode(observed, add_special_tokens=False)
            turns.append(Turn(ids, images=images.place(ids, files[:count], location)))
            del files[:count]
        else:
            turns.append(Turn(tokenizer.encode(observed, add_special_tokens=False)))
        response = render_new(index + 1, False)
        if end_of_turn not in response:
            raise _TemplateError(f"the chat template does not end the assistant's turn by {end_of_turn}")
        response = response[: response.rindex(end_of_turn) + len(end_of_turn)]
        known += response
        ids = as_token_ids(tokenizer.encode(response, add_special_tokens=False))
        turns.append(Turn(ids, np.zeros(len(ids), np.float32), is_action=True))
    prompt = Prompt(
        id=str(row.get("id", location)),
        messages=messages[: answers[0]],
        token_ids=turns[0].token_ids,
        data_source=row.get("data_source", ""),
        ground_truth=row.get("ground_truth"),
        tools=tuple(tool["function"]["name"] for tool in tools or ()),
        images=turns[0].images,
    )
    if files:
        raise _TemplateError(f"the chat template drops {len(files)} of the images")
    calls = sum(len(message.get("tool_calls") or ()) for message in messages)
    return Rollout(prompt, tuple(turns), messages=messages, group=group, tool_calls=calls)


@dataclass(frozen=True)
class Pair:
    """Two finished conversations with the same beginning; the last turns are the compared answers."""

    chosen: Rollout
    rejected: Rollout

    @property
    def num_tokens(self) -> int:
        return self.chosen.num_tokens + self.rejected.num_tokens


def read_preferences(
    path: str | Path,
    tokenizer: Any,
    max_tokens: int,
    max_length: int,
    name: str = "",
    order: str = "",
    images: ImageFormat | None = None,
) -> tuple[TableDataset[Pair], int]:
    """Read the pairs of a .jsonl or .parquet file. Return those that are short enough, and the number dropped.

    A pair is too long with more than `max_tokens` tokens, since both answers must fit into one micro-batch, or if one
    conversation has more than `max_length`. name: of the data set, if there are several. order: a column of numbers.
    images: how the model reads images; None if it reads none.

    Every pair is rendered once here, so that mistakes show before training. Raises ConfigError, naming the line, for a
    row that lacks an answer, does not end with an assistant message, has two different prompts or two equal answers;
    and for a file without a pair, or with none that is short enough.
    """
    dropped = shortest = 0
    keys = array("d")

    def fits(location: str, row: dict[str, Any]) -> bool:
        nonlocal dropped, shortest
        pair = make_pair(row, tokenizer, location, name, images=images)
        longest = max(pair.chosen.num_tokens, pair.rejected.num_tokens)
        if pair.num_tokens <= max_tokens and longest <= max_length:
            if order:
                keys.append(read_key(row, order, location))
            return True
        dropped, shortest = dropped + 1, min(shortest or pair.num_tokens, pair.num_tokens)
        return False

    rows = Table.read(Path(path), fits)
    if dropped and not len(rows):
        raise pairs_too_long_error(str(path), dropped, max_tokens, max_length, shortest)
    if not len(rows):
        raise ConfigError(f"{path} holds no pair")

    def make_item(location: str, row: dict[str, Any], index: int) -> Pair:
        return make_pair(row, tokenizer, location, name, index, images)

    return TableDataset(rows, make_item, np.array(keys) if order else None), dropped


def pairs_too_long_error(path: str, count: int, max_tokens: int, max_length: int, shortest: int) -> ConfigError:
    """Return the error for a file whose pairs are all too long. Limits as in `read_preferences`."""
    return ConfigError(
        f"{path}: all {count} pairs are too long: the shortest has {shortest} tokens in its two conversations, "
        f"a micro-batch holds {max_tokens}, and the model {max_length} in one; raise train.max_tokens_per_gpu"
    )


class Side(NamedTuple):
    """One of the two conversations of a pair, as text."""

    messages: tuple[Message, ...]
    images: list[bytes]
    """Files of its images, in order."""


def check_pair(row: dict[str, Any], location: str) -> dict[str, Side]:
    """Return the two conversations. Raises ConfigError for mistakes that show without a tokenizer."""
    check_media(row, location)
    row = dict(row)
    column = take_images(row, location)
    sides = {key: _parse_side(row, key, location, column) for key in ("chosen", "rejected")}
    first = {key: (messages[0], images[: count_placeholders(messages[0])]) for key, (messages, images) in sides.items()}
    if first["chosen"] != first["rejected"]:
        raise ConfigError(f"{location}: 'chosen' and 'rejected' begin differently; only answers to one prompt compare")
    return sides


def make_pair(
    row: dict[str, Any],
    tokenizer: Any,
    location: str,
    name: str = "",
    group: int = 0,
    images: ImageFormat | None = None,
) -> Pair:
    sides, tools = check_pair(row, location), parse_tool_schemas(row.get("tools"), location)
    identity, source = row_id(row, location, name, location), row_source(row, location, name)
    rollouts = {}
    for key, side in sides.items():
        fields = {"id": identity, "data_source": source, "tools": tools, **side._asdict()}
        subject = f"{location}, {key!r}"
        rollouts[key] = tokenize_conversation(fields, tokenizer, subject, group, last_only=True, images=images)
    if np.array_equal(rollouts["chosen"].token_ids, rollouts["rejected"].token_ids):
        raise ConfigError(f"{location}: 'chosen' and 'rejected' are the same; there is nothing to learn from this pair")
    return Pair(**rollouts)


def _parse_side(row: dict[str, Any], key: str, location: str, column: list[bytes]) -> Side:
    """Return the whole conversation of one of the two columns. column: images of the column `images`."""
    value, prompt, conversations = row.get(key), row.get("prompt"), row.get("conversations")
    if value is None:
        raise ConfigError(
            f"{location}: no {key!r}; a pair needs 'chosen' and 'rejected', columns here: {list_columns(row)}"
        )
    head: tuple[Message, ...] = ()
    head_images, images = list[bytes | None](), list[bytes | None]()
    if prompt is not None:
        head = parse_chat_messages(prompt, location, "prompt", images=head_images)
    elif isinstance(conversations, list) and conversations:
        head = parse_sharegpt(conversations, location, "conversations", head_images)
    messages = parse_answer(value, location, key, images)
    if messages[0]["role"] == "assistant":
        if not head:
            raise ConfigError(f"{location}: {key!r} begins with the answer, and there is no 'prompt' before it")
        messages, images = head + messages, head_images + images
    elif messages[: len(head)] != head:
        raise ConfigError(
            f"{location}: {key!r} begins neither with the answer nor with the row's 'prompt'; drop that one"
        )
    if messages[-1]["role"] != "assistant":
        last_role = messages[-1]["role"]
        raise ConfigError(f"{location}: {key!r} must end with the assistant's answer, not with role {last_role}")
    return Side(messages, join_images(column, images, messages, f"{location}, {key!r}"))


MAX_ROWS = 1000  # to check: takes milliseconds for a file of any size; the others are read once the ranks are up


class FirstRow(NamedTuple):
    """A row that was checked."""

    location: str
    """File and line, for messages."""
    text: str
    """A prompt's messages; for other rows all columns except id and data_source."""
    extra: Mapping[str, Any]
    """Extra columns of a prompt."""


def check_first_rows(config: Config, item: ItemKind, path: str, order: str = "") -> list[FirstRow]:
    """Check the first rows and return them. Raises ConfigError, naming the line, for malformed rows.

    order: column to sort by.
    """
    data = config.data
    if item == "rows":
        return []
    if item == "prompts":
        prompts = read_prompts(path, data.prompt_key, data.label_key, MAX_ROWS, order=order)
        return [FirstRow(f"{path}, {prompt.id}", _describe_prompt(prompt), prompt.extra) for prompt in prompts]
    if item == "conversations":
        read_conversations(path, None, MAX_ROWS, data.prompt_key, answer_key(config), order=order)
    first_rows = []
    for location, row in islice(read_rows(Path(path)), MAX_ROWS):
        if item == "pairs":
            check_pair(row, location)
            if order:
                read_key(row, order, location)
        text = repr(sorted((name, row[name]) for name in row.keys() - {"id", "data_source"}))
        first_rows.append(FirstRow(location, text, {}))
    if item == "pairs" and not first_rows:
        raise ConfigError(f"{path} holds no pair")
    return first_rows


def _describe_prompt(prompt: Prompt) -> str:
    """Return a text that differs for prompts with different messages or images."""
    digests = [hashlib.sha256(image.data).hexdigest() for image in prompt.images]
    return repr(prompt.messages) + (repr(digests) if digests else "")


def answer_key(config: Config) -> str:
    """Return the column of the answer in prompt/answer conversations; empty if data.label_key has its default."""
    key = config.data.label_key
    return "" if key == DataConfig.label_key else key
