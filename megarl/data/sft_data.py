"""Finished conversations for supervised fine-tuning, tokenized turn by turn as in the rollout loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from megarl.config import ConfigError
from megarl.data.chat_columns import parse_tool_schemas
from megarl.data.conversation_columns import check_text_only, parse_conversation, row_id, row_source
from megarl.data.curriculum import OrderKeys
from megarl.data.table import Table, read_rows
from megarl.types import Message, Prompt, Rollout, Turn, as_token_ids


def read_conversations(
    path: str | Path,
    tokenizer: Any,
    max_rows: int | None = None,
    prompt_key: str = "prompt",
    answer_key: str = "",
    name: str = "",
    order: str = "",
) -> SFTDataset:
    """Read a .jsonl or .parquet file of conversations as Rollouts whose action turns are the assistant's messages.

    A row holds `messages`, ShareGPT's `conversations`, or a prompt and its answer, as `conversation_columns` reads
    them, and optionally `tools`, a list of OpenAI tool schemas or its JSON. An action turn ends with the tokenizer's
    end-of-turn token; its log-probs are 0, since it was not sampled. most: maximum number of rows. name: of the data
    set, if there are several, for ids and as the source of rows without `data_source`. order: a column of numbers.

    Raises ConfigError, naming the line, for a row without a conversation.
    """

    def read(location: str, row: dict[str, Any]) -> dict[str, Any]:
        return _normalize_row(row, location, prompt_key, answer_key, name)

    keys = OrderKeys(order)

    def check_row(location: str, row: dict[str, Any]) -> None:
        keys.add(row, location)
        read(location, row)

    rows = Table.read(Path(path), check_row, max_rows)
    if not len(rows):
        raise ConfigError(f"{path} holds no conversation")
    return SFTDataset(rows, tokenizer, read, keys.to_array())


def iter_conversations(
    file: Path, tokenizer: Any, prompt_key: str, answer_key: str, name: str
) -> Iterator[tuple[str, dict[str, Any], Rollout]]:
    """Yield (location, row, conversation) of each row, as in `read_conversations`."""
    for location, row in read_rows(file):
        yield (
            location,
            row,
            tokenize_conversation(_normalize_row(row, location, prompt_key, answer_key, name), tokenizer, location),
        )


def conversations_too_long_error(path: str, count: int, positions: int, shortest: int) -> ConfigError:
    """Return the error for a file whose conversations are all too long.

    positions: of the model. shortest: tokens of the shortest conversation.
    """
    return ConfigError(
        f"{path}: {count} of {count} conversations are longer than the model's {positions} positions, so none is left; "
        f"the shortest has {shortest} tokens"
    )


@dataclass(frozen=True)
class SFTDataset(Sequence[Rollout]):
    """The conversations of a file, read, rendered and tokenized on access (0.6 ms); nothing is cached."""

    rows: Table
    tokenizer: Any
    normalize: Callable[[str, dict[str, Any]], dict[str, Any]]
    """(location, row) -> argument of `tokenize_conversation`."""
    keys: np.ndarray | None = field(default=None, compare=False)
    """[rows] float64: sort keys of a curriculum, NaN if unknown; None without one."""

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: Sequence[int]) -> SFTDataset:
        keys = None if self.keys is None else self.keys[np.asarray(indices, np.int64)]
        return replace(self, rows=self.rows.select(indices), keys=keys)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...

    @overload
    def __getitem__(self, index: slice) -> SFTDataset: ...

    def __getitem__(self, index: int | slice) -> Rollout | SFTDataset:
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        location, row = self.rows[index]
        return tokenize_conversation(self.normalize(location, row), self.tokenizer, location, group=index)


def _normalize_row(row: dict[str, Any], location: str, prompt_key: str, answer_key: str, name: str) -> dict[str, Any]:
    """Return the row as `tokenize_conversation` takes it. Raises ConfigError if the last message is no assistant's."""
    check_text_only(row, location)
    messages = parse_conversation(row, location, prompt_key, answer_key)
    roles = [message["role"] for message in messages]
    if len(roles) < 2 or roles[0] == "assistant" or roles[-1] != "assistant":
        raise ConfigError(f"{location}: messages must begin with a prompt and end with the assistant's, not {roles}")
    for number, message in enumerate(messages):
        content_parts = [message.get(part) for part in ("content", "tool_calls", "reasoning_content")]
        if message["role"] == "assistant" and not any(map(str.strip, map(str, filter(None, content_parts)))):
            raise ConfigError(f"{location}: message {number} of 'messages', the assistant's, is empty; drop the row")
    identity, source = row_id(row, location, name, location), row_source(row, location, name)
    tools = parse_tool_schemas(row.get("tools"), location)
    return {**row, "id": identity, "data_source": source, "messages": messages, "tools": tools}


class _TemplateError(Exception):
    """The chat template cannot render a conversation."""


_PROBE_ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def tokenize_conversation(
    row: dict[str, Any], tokenizer: Any, location: str, group: int = 0, last_only: bool = False
) -> Rollout:
    """Tokenize one conversation to a Rollout: prompt, action, observation, action, ..., action.

    last_only: everything before the assistant's last message is the prompt.

    The chat template renders successively longer prefixes of the conversation. What a prefix adds to the previous one
    is tokenized by itself, because a turn's ids are fixed before the next turn is written.
    """
    try:
        return _tokenize(row, tokenizer, location, group, last_only)
    except _TemplateError as error:
        reason = error
    try:  # blames the template if it cannot render even the simplest conversation, otherwise the row
        _tokenize(_PROBE_ROW, tokenizer, location, group, last_only)
    except _TemplateError as error:
        raise ConfigError(f"model.path: {error}; this is so with any conversation") from None
    raise ConfigError(f"{location}: {reason}")


def _tokenize(row: dict[str, Any], tokenizer: Any, location: str, group: int, last_only: bool) -> Rollout:
    messages: tuple[Message, ...] = tuple(row["messages"])
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    answers = answers[-1:] if last_only else answers
    end_of_turn = tokenizer.eos_token
    if not end_of_turn:
        raise ConfigError("model.path: the tokenizer has no eos_token, by which the assistant's turns would end")
    tools = row.get("tools") or None

    def render(count: int, add_generation_prompt: bool) -> str:
        try:
            text = tokenizer.apply_chat_template(
                list(messages[:count]), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # jinja2's errors and whatever a template raises on purpose
            roles = ", ".join(str(message["role"]) for message in messages)
            reason = " ".join(str(error).split())
            raise _TemplateError(f"the chat template cannot render the roles {roles}: {reason}") from None
        return str(text)

    def new_text(text: str, known: str) -> str:
        if not text.startswith(known):
            raise _TemplateError("the chat template rewrites earlier turns once later ones are there")
        return text[len(known) :]

    turns: list[Turn] = []
    known = ""
    for index in answers:
        observed = new_text(render(index, True), known)
        known += observed
        turns.append(Turn(tokenizer.encode(observed, add_special_tokens=False)))
        response = new_text(render(index + 1, False), known)
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
    )
    calls = sum(len(message.get("tool_calls") or ()) for message in messages)
    return Rollout(prompt, tuple(turns), messages=messages, group=group, tool_calls=calls)
