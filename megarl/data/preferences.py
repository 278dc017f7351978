"""Pairs of answers of which one was preferred, for training a reward model.

The columns are those of TRL's preference data sets, `chosen` and `rejected`:

    {"chosen": [user, assistant], "rejected": [user, assistant]}          whole chats, the prompt inside of both
    {"prompt": [user], "chosen": [assistant], "rejected": [assistant]}    messages after the prompt's
    {"prompt": "text", "chosen": "text", "rejected": "text"}              a user's message and two answers to it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from megarl.config import ConfigError
from megarl.data.chats import chat_messages, tool_schemas
from megarl.data.rows import read_rows
from megarl.data.sft import conversation
from megarl.types import Message, Rollout


@dataclass(frozen=True)
class Pair:
    """Two finished conversations that begin alike; the last turn of each is the answer that was compared."""

    chosen: Rollout
    rejected: Rollout

    @property
    def num_tokens(self) -> int:
        return self.chosen.num_tokens + self.rejected.num_tokens


@dataclass(frozen=True)
class Preferences(Sequence[Pair]):
    """The pairs of a file, each rendered and tokenised when it is asked for (a millisecond): tokens are not kept."""

    rows: Sequence[tuple[str, dict[str, Any]]]
    tokenizer: Any

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Pair: ...

    @overload
    def __getitem__(self, index: slice) -> Preferences: ...

    def __getitem__(self, index: int | slice) -> Pair | Preferences:
        if isinstance(index, slice):
            return Preferences(self.rows[index], self.tokenizer)
        where, row = self.rows[index]
        return _pair(row, self.tokenizer, where, group=index)


def read_preferences(path: str | Path, tokenizer: Any, max_tokens: int, max_length: int) -> tuple[Preferences, int]:
    """The pairs of a .jsonl or .parquet file, without those that are too long, and how many these were.

    Too long is a pair of more than `max_tokens` tokens, for both answers must fit into one micro-batch, or with a
    conversation of more than `max_length`. A chat is rendered by the tokenizer's template up to and including the end
    of the last answer's turn, which is where a rollout ends. `tools`, a list of OpenAI tool schemas, may be another
    column; all others are ignored.

    Every pair is rendered once here, so that a mistake shows before training. Raises ConfigError, naming the line: for
    a row without one of the two answers, without an assistant's message at the end, with two different prompts or twice
    the same answer; and for a file without a pair, or with none that is short enough.
    """
    rows, dropped, shortest = [], 0, 0
    for where, row in read_rows(Path(path)):
        pair = _pair(row, tokenizer, where)
        longest = max(pair.chosen.num_tokens, pair.rejected.num_tokens)
        if pair.num_tokens <= max_tokens and longest <= max_length:
            rows.append((where, row))
        else:
            dropped, shortest = dropped + 1, min(shortest or pair.num_tokens, pair.num_tokens)
    if dropped and not rows:
        raise ConfigError(
            f"{path}: all {dropped} pairs are too long: the shortest has {shortest} tokens in its two conversations, "
            f"a micro-batch holds {max_tokens}, and the model {max_length} in one; raise train.token_budget"
        )
    if not rows:
        raise ConfigError(f"{path} holds no pair")
    return Preferences(rows, tokenizer), dropped


def check_pair(row: dict[str, Any], where: str) -> dict[str, tuple[Message, ...]]:
    """The two conversations. Raises ConfigError for what can be seen of a pair without a tokenizer."""
    messages = {key: _messages(row, key, where) for key in ("chosen", "rejected")}
    if messages["chosen"][0] != messages["rejected"][0]:
        raise ConfigError(f"{where}: 'chosen' and 'rejected' begin differently; only answers to one prompt compare")
    return messages


def _pair(row: dict[str, Any], tokenizer: Any, where: str, group: int = 0) -> Pair:
    messages, tools = check_pair(row, where), tool_schemas(row.get("tools"), where)
    talks = {
        key: conversation(
            {"id": row.get("id") or where, "messages": value, "tools": tools},
            tokenizer,
            f"{where}, {key!r}",
            group,
            last_only=True,
        )
        for key, value in messages.items()
    }
    if np.array_equal(talks["chosen"].token_ids, talks["rejected"].token_ids):
        raise ConfigError(f"{where}: 'chosen' and 'rejected' are the same; there is nothing to learn from this pair")
    return Pair(**talks)


def _messages(row: dict[str, Any], key: str, where: str) -> tuple[Message, ...]:
    """The whole conversation of one of the two columns."""
    value, prompt = row.get(key), row.get("prompt")
    if value is None:
        have = ", ".join(name for name, item in row.items() if item is not None) or "none"
        raise ConfigError(f"{where}: no {key!r}; a pair needs 'chosen' and 'rejected', columns here: {have}")
    head = () if prompt is None else chat_messages(prompt, where, "prompt")
    messages = chat_messages(value, where, key, role="assistant")
    if messages[0]["role"] == "assistant":
        if not head:
            raise ConfigError(f"{where}: {key!r} begins with the answer, and there is no 'prompt' before it")
        messages = head + messages
    elif messages[: len(head)] != head:
        raise ConfigError(f"{where}: {key!r} begins neither with the answer nor with the row's 'prompt'; drop that one")
    if messages[-1]["role"] != "assistant":
        raise ConfigError(
            f"{where}: {key!r} must end with the assistant's answer, not with role {messages[-1]['role']}"
        )
    return messages
