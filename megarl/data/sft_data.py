"""Finished conversations for supervised fine-tuning, tokenised turn by turn as the rollout loop would see them."""

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
    most: int | None = None,
    prompt_key: str = "prompt",
    answer_key: str = "",
    name: str = "",
    order: str = "",
) -> SFTDataset:
    """The conversations of a .jsonl or .parquet file as Rollouts whose action turns are what the assistant wrote.

    A row holds `messages`, ShareGPT's `conversations`, or a prompt and the answer to it, as `columns` reads them; where
    tools are called `tools`, a list of OpenAI tool schemas or its JSON. An action turn runs up to and including the
    tokenizer's end-of-turn token; its log-probs are 0, for nobody sampled it. most: rows that are read. name: of the
    data set among several, for ids and as the source of rows without `data_source`. order: a column of numbers.

    Raises ConfigError, naming the line, where there is no conversation.
    """

    def read(where: str, row: dict[str, Any]) -> dict[str, Any]:
        return _normalize_row(row, where, prompt_key, answer_key, name)

    keys = OrderKeys(order)

    def look(where: str, row: dict[str, Any]) -> None:
        keys.add(row, where)
        read(where, row)

    rows = Table.read(Path(path), look, most)
    if not len(rows):
        raise ConfigError(f"{path} holds no conversation")
    return SFTDataset(rows, tokenizer, read, keys.to_array())


def iter_conversations(
    file: Path, tokenizer: Any, prompt_key: str, answer_key: str, name: str
) -> Iterator[tuple[str, dict[str, Any], Rollout]]:
    """(where it stands, row, conversation) of each row, as of `read_conversations`."""
    for where, row in read_rows(file):
        yield (
            where,
            row,
            tokenize_conversation(_normalize_row(row, where, prompt_key, answer_key, name), tokenizer, where),
        )


def conversations_too_long_error(path: str, count: int, positions: int, shortest: int) -> ConfigError:
    """positions: of the model. shortest: tokens of the shortest of so many conversations."""
    return ConfigError(
        f"{path}: {count} of {count} conversations are longer than the model's {positions} positions, so none is left; "
        f"the shortest has {shortest} tokens"
    )


@dataclass(frozen=True)
class SFTDataset(Sequence[Rollout]):
    """The conversations of a file, each read, rendered and tokenised when it is asked for (0.6 ms): neither rows nor
    tokens are kept."""

    rows: Table
    tokenizer: Any
    normalize: Callable[[str, dict[str, Any]], dict[str, Any]]
    """(where, row) to what `conversation` takes."""
    keys: np.ndarray | None = field(default=None, compare=False)
    """[rows] float64, the numbers of the column that they are ordered by, NaN where unknown; None without one."""

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
        where, row = self.rows[index]
        return tokenize_conversation(self.normalize(where, row), self.tokenizer, where, group=index)


def _normalize_row(row: dict[str, Any], where: str, prompt_key: str, answer_key: str, name: str) -> dict[str, Any]:
    """The row in the form that `conversation` reads. Raises ConfigError where the assistant has not the last word."""
    check_text_only(row, where)
    messages = parse_conversation(row, where, prompt_key, answer_key)
    roles = [message["role"] for message in messages]
    if len(roles) < 2 or roles[0] == "assistant" or roles[-1] != "assistant":
        raise ConfigError(f"{where}: messages must begin with a prompt and end with the assistant's, not {roles}")
    for number, message in enumerate(messages):
        written = [message.get(part) for part in ("content", "tool_calls", "reasoning_content")]
        if message["role"] == "assistant" and not any(map(str.strip, map(str, filter(None, written)))):
            raise ConfigError(f"{where}: message {number} of 'messages', the assistant's, is empty; drop the row")
    identity, source = row_id(row, where, name, where), row_source(row, where, name)
    tools = parse_tool_schemas(row.get("tools"), where)
    return {**row, "id": identity, "data_source": source, "messages": messages, "tools": tools}


class _TemplateError(Exception):
    """What the chat template cannot do with a conversation."""


_PROBE_ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def tokenize_conversation(
    row: dict[str, Any], tokenizer: Any, where: str, group: int = 0, last_only: bool = False
) -> Rollout:
    """One conversation as a Rollout: prompt, action, observation, action, ..., action.

    last_only: all but the assistant's last message is prompt, as where the chat went on for a while before it.

    The chat template renders ever longer beginnings of the conversation; what a beginning adds to the one before is
    tokenised by itself, because the ids of a turn were fixed before the next one was written.
    """
    try:
        return _tokenize(row, tokenizer, where, group, last_only)
    except _TemplateError as error:
        reason = error
    try:  # the row's fault, or that of the template, which then cannot hold the plainest conversation
        _tokenize(_PROBE_ROW, tokenizer, where, group, last_only)
    except _TemplateError as error:
        raise ConfigError(f"model.path: {error}; this is so with any conversation") from None
    raise ConfigError(f"{where}: {reason}")


def _tokenize(row: dict[str, Any], tokenizer: Any, where: str, group: int, last_only: bool) -> Rollout:
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

    def rest(text: str, known: str) -> str:
        if not text.startswith(known):
            raise _TemplateError("the chat template rewrites earlier turns once later ones are there")
        return text[len(known) :]

    turns: list[Turn] = []
    known = ""
    for index in answers:
        observed = rest(render(index, True), known)
        known += observed
        turns.append(Turn(tokenizer.encode(observed, add_special_tokens=False)))
        written = rest(render(index + 1, False), known)
        if end_of_turn not in written:
            raise _TemplateError(f"the chat template does not end the assistant's turn by {end_of_turn}")
        written = written[: written.rindex(end_of_turn) + len(end_of_turn)]
        known += written
        ids = as_token_ids(tokenizer.encode(written, add_special_tokens=False))
        turns.append(Turn(ids, np.zeros(len(ids), np.float32), is_action=True))
    prompt = Prompt(
        id=str(row.get("id", where)),
        messages=messages[: answers[0]],
        token_ids=turns[0].token_ids,
        data_source=row.get("data_source", ""),
        ground_truth=row.get("ground_truth"),
        tools=tuple(tool["function"]["name"] for tool in tools or ()),
    )
    calls = sum(len(message.get("tool_calls") or ()) for message in messages)
    return Rollout(prompt, tuple(turns), messages=messages, group=group, tool_calls=calls)
