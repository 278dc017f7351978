"""Finished conversations for supervised fine-tuning, tokenised turn by turn as the rollout loop would see them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np

from megarl.config import ConfigError
from megarl.data.chats import chat_messages, tool_schemas
from megarl.data.rows import read_rows
from megarl.types import Message, Prompt, Rollout, Turn, ids_of


def sft_rollouts(path: str | Path, tokenizer: Any, most: int | None = None) -> Demonstrations:
    """Read a .jsonl or .parquet file of conversations as Rollouts whose action turns are what the assistant wrote.

    Each row holds `messages`, which end with the assistant's, and where tools are called `tools`, a list of OpenAI
    tool schemas. An action turn runs up to and including the tokenizer's end-of-turn token; its log-probs are 0, for
    nobody sampled it. most: rows that are read. Raises ConfigError, naming the line, where there is no conversation.
    """
    rows = [(where, _checked(row, where)) for where, row in islice(read_rows(Path(path)), most)]
    if not rows:
        raise ConfigError(f"{path} holds no conversation")
    return Demonstrations(rows, tokenizer)


class Demonstrations(Sequence[Rollout]):
    """The conversations of a file, each rendered and tokenised when it is asked for (0.5 ms), not all at the start."""

    def __init__(self, rows: Sequence[tuple[str, dict[str, Any]]], tokenizer: Any) -> None:
        self.rows = rows
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, indices: Sequence[int]) -> Demonstrations:
        return Demonstrations([self.rows[index] for index in indices], self.tokenizer)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...

    @overload
    def __getitem__(self, index: slice) -> Demonstrations: ...

    def __getitem__(self, index: int | slice) -> Rollout | Demonstrations:
        if isinstance(index, slice):
            return Demonstrations(self.rows[index], self.tokenizer)
        where, row = self.rows[index]
        return conversation(row, self.tokenizer, where, group=index)


def _checked(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The row in the form that `conversation` reads. Raises ConfigError where the assistant has not the last word."""
    if row.get("messages") is None:
        present = ", ".join(name for name, value in row.items() if value is not None) or "none"
        raise ConfigError(f"{where} has no list `messages`; columns here: {present}")
    if not isinstance(row["messages"], list):
        raise ConfigError(f"{where} has no list `messages`, but {str(row['messages'])[:80]!r}")
    messages = chat_messages(row["messages"], where, "messages")
    roles = [message["role"] for message in messages]
    if len(roles) < 2 or roles[0] == "assistant" or roles[-1] != "assistant":
        raise ConfigError(f"{where}: messages must begin with a prompt and end with the assistant's, not {roles}")
    for number, message in enumerate(messages):
        written = [message.get(name) for name in ("content", "tool_calls", "reasoning_content")]
        if message["role"] == "assistant" and not any(map(str.strip, map(str, filter(None, written)))):
            raise ConfigError(f"{where}: message {number} of 'messages', the assistant's, is empty; drop the row")
    return {**row, "messages": messages, "tools": tool_schemas(row.get("tools"), where)}


def conversation(row: dict[str, Any], tokenizer: Any, where: str, group: int = 0, last_only: bool = False) -> Rollout:
    """One conversation as a Rollout: prompt, action, observation, action, ..., action.

    last_only: all but the assistant's last message is prompt, as where the chat went on for a while before it.

    The chat template renders ever longer beginnings of the conversation; what a beginning adds to the one before is
    tokenised by itself, because the ids of a turn were fixed before the next one was written.
    """
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
            raise ConfigError(f"{where}: the chat template cannot render the roles {roles}: {error}") from None
        return str(text)

    def rest(text: str, known: str) -> str:
        if not text.startswith(known):
            raise ConfigError(f"{where}: the chat template rewrites earlier turns once later ones are there")
        return text[len(known) :]

    turns: list[Turn] = []
    known = ""
    for index in answers:
        observed = rest(render(index, True), known)
        known += observed
        turns.append(Turn(tokenizer.encode(observed, add_special_tokens=False)))
        written = rest(render(index + 1, False), known)
        if end_of_turn not in written:
            raise ConfigError(f"{where}: the chat template does not end the assistant's turn by {end_of_turn}")
        written = written[: written.rindex(end_of_turn) + len(end_of_turn)]
        known += written
        ids = ids_of(tokenizer.encode(written, add_special_tokens=False))
        turns.append(Turn(ids, np.zeros(len(ids), np.float32), is_action=True))
    prompt = Prompt(
        id=str(row.get("id", where)),
        messages=messages[: answers[0]],
        token_ids=turns[0].token_ids,
        ground_truth=row.get("ground_truth"),
        tools=tuple(tool["function"]["name"] for tool in tools or ()),
    )
    calls = sum(len(message.get("tool_calls") or ()) for message in messages)
    return Rollout(prompt, tuple(turns), messages=messages, group=group, tool_calls=calls)
