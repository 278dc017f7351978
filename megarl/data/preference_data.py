"""Preference pairs for training a reward model.

The columns are those of TRL's preference data sets, `chosen` and `rejected`:

    {"chosen": [user, assistant], "rejected": [user, assistant]}          whole chats, both with the prompt
    {"prompt": [user], "chosen": [assistant], "rejected": [assistant]}    messages after the prompt's
    {"prompt": "text", "chosen": "text", "rejected": "text"}              a user's message and two answers to it

or those of Anthropic's HH, a dialogue as text in both, or LLaMA-Factory's, ShareGPT's `conversations` followed by a
message in each. `README.md` has a row of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from megarl.config import ConfigError
from megarl.data.chat_columns import parse_chat_messages, parse_tool_schemas
from megarl.data.conversation_columns import (
    check_text_only,
    list_columns,
    parse_answer,
    parse_sharegpt,
    row_id,
    row_source,
)
from megarl.data.curriculum import OrderKeys
from megarl.data.sft_data import tokenize_conversation
from megarl.data.table import Table
from megarl.types import Message, Rollout


@dataclass(frozen=True)
class Pair:
    """Two finished conversations with the same beginning; the last turns are the compared answers."""

    chosen: Rollout
    rejected: Rollout

    @property
    def num_tokens(self) -> int:
        return self.chosen.num_tokens + self.rejected.num_tokens


@dataclass(frozen=True)
class PreferenceDataset(Sequence[Pair]):
    """The pairs of a file, read, rendered and tokenized on access (a millisecond); nothing is cached."""

    rows: Table
    tokenizer: Any
    name: str = ""
    """Name of the data set, if there are several."""
    keys: np.ndarray | None = field(default=None, compare=False)
    """[rows] float64, as in `SFTDataset`."""

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Pair: ...

    @overload
    def __getitem__(self, index: slice) -> PreferenceDataset: ...

    def __getitem__(self, index: int | slice) -> Pair | PreferenceDataset:
        if isinstance(index, slice):
            keys = None if self.keys is None else self.keys[index]
            return replace(self, rows=self.rows[index], keys=keys)
        location, row = self.rows[index]
        return make_pair(row, self.tokenizer, location, self.name, group=index)


def read_preferences(
    path: str | Path, tokenizer: Any, max_tokens: int, max_length: int, name: str = "", order: str = ""
) -> tuple[PreferenceDataset, int]:
    """Read the pairs of a .jsonl or .parquet file. Return those that are short enough, and the number dropped.

    A pair is too long with more than `max_tokens` tokens, since both answers must fit into one micro-batch, or if one
    conversation has more than `max_length`. The tokenizer's template renders a chat up to and including the end of the
    last answer's turn, where a rollout would end, too. Optional columns: `tools`, a list of OpenAI tool schemas; `id`
    and `data_source`, as for prompts. All others are ignored. name: of the data set, if there are several. order: a
    column of numbers.

    Every pair is rendered once here, so that mistakes show before training. Raises ConfigError, naming the line, for a
    row that lacks an answer, does not end with an assistant message, has two different prompts or two equal answers;
    and for a file without a pair, or with none that is short enough.
    """
    dropped = shortest = 0
    keys = OrderKeys(order)

    def fits(location: str, row: dict[str, Any]) -> bool:
        nonlocal dropped, shortest
        pair = make_pair(row, tokenizer, location, name)
        longest = max(pair.chosen.num_tokens, pair.rejected.num_tokens)
        if pair.num_tokens <= max_tokens and longest <= max_length:
            keys.add(row, location)
            return True
        dropped, shortest = dropped + 1, min(shortest or pair.num_tokens, pair.num_tokens)
        return False

    rows = Table.read(Path(path), fits)
    if dropped and not len(rows):
        raise pairs_too_long_error(str(path), dropped, max_tokens, max_length, shortest)
    if not len(rows):
        raise ConfigError(f"{path} holds no pair")
    return PreferenceDataset(rows, tokenizer, name, keys.to_array()), dropped


def pairs_too_long_error(path: str, count: int, max_tokens: int, max_length: int, shortest: int) -> ConfigError:
    """Return the error for a file whose pairs are all too long.

    max_tokens, max_length: as in `read_preferences`. shortest: tokens of the shortest pair.
    """
    return ConfigError(
        f"{path}: all {count} pairs are too long: the shortest has {shortest} tokens in its two conversations, "
        f"a micro-batch holds {max_tokens}, and the model {max_length} in one; raise train.token_budget"
    )


def check_pair(row: dict[str, Any], location: str) -> dict[str, tuple[Message, ...]]:
    """Return the two conversations. Raises ConfigError for mistakes that show without a tokenizer."""
    messages = {key: _parse_side(row, key, location) for key in ("chosen", "rejected")}
    if messages["chosen"][0] != messages["rejected"][0]:
        raise ConfigError(f"{location}: 'chosen' and 'rejected' begin differently; only answers to one prompt compare")
    return messages


def make_pair(row: dict[str, Any], tokenizer: Any, location: str, name: str = "", group: int = 0) -> Pair:
    messages, tools = check_pair(row, location), parse_tool_schemas(row.get("tools"), location)
    common_fields = {
        "id": row_id(row, location, name, location),
        "data_source": row_source(row, location, name),
        "tools": tools,
    }
    rollouts = {
        key: tokenize_conversation(
            {**common_fields, "messages": value},
            tokenizer,
            f"{location}, {key!r}",
            group,
            last_only=True,
        )
        for key, value in messages.items()
    }
    if np.array_equal(rollouts["chosen"].token_ids, rollouts["rejected"].token_ids):
        raise ConfigError(f"{location}: 'chosen' and 'rejected' are the same; there is nothing to learn from this pair")
    return Pair(**rollouts)


def _parse_side(row: dict[str, Any], key: str, location: str) -> tuple[Message, ...]:
    """Return the whole conversation of one of the two columns."""
    value, prompt, conversations = row.get(key), row.get("prompt"), row.get("conversations")
    if value is None:
        raise ConfigError(
            f"{location}: no {key!r}; a pair needs 'chosen' and 'rejected', columns here: {list_columns(row)}"
        )
    check_text_only(row, location)
    head: tuple[Message, ...] = ()
    if prompt is not None:
        head = parse_chat_messages(prompt, location, "prompt")
    elif isinstance(conversations, list) and conversations:
        head = parse_sharegpt(conversations, location, "conversations")
    messages = parse_answer(value, location, key)
    if messages[0]["role"] == "assistant":
        if not head:
            raise ConfigError(f"{location}: {key!r} begins with the answer, and there is no 'prompt' before it")
        messages = head + messages
    elif messages[: len(head)] != head:
        raise ConfigError(
            f"{location}: {key!r} begins neither with the answer nor with the row's 'prompt'; drop that one"
        )
    if messages[-1]["role"] != "assistant":
        raise ConfigError(
            f"{location}: {key!r} must end with the assistant's answer, not with role {messages[-1]['role']}"
        )
    return messages
