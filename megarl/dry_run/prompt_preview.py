"""Print a row of `data.train` as the engine gets it: `megarl train CONFIG [key=value ...] --show-prompt [ROW]`.

For SFT and preferences, which have no prompts, the conversations with the tokens that are trained. Rows, tools,
environments and chat template are read by the code of a run. No rank and no engine starts.
"""

from __future__ import annotations

import asyncio
import json
import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from megarl.chat_format.chat_messages import escape_schemas
from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import Config, ConfigError
from megarl.config.stages import smallest_context
from megarl.controllers.controller import load_requirements
from megarl.data.datasets import answer_key, default_id, make_pair, normalize_row, parse_prompt, tokenize_conversation
from megarl.data.loader import check_files, name_datasets
from megarl.data.table import read_rows
from megarl.dry_run.data_checks import read_chat
from megarl.dry_run.model_folders import check_tokenizer, folder_config
from megarl.environments.process_sessions import EnvironmentPool
from megarl.environments.protocol import EnvironmentInfo, SessionLost
from megarl.models.registry import family_of
from megarl.processes.children import ProcessLimits
from megarl.rollout.conversation import render_after_reset
from megarl.sandbox.box import to_environment
from megarl.types import Ids, Image, Prompt, Rollout, Turn
from megarl.types.requirements import Requirements

MAX_VALUE = 1000
"""Characters of a column that are shown."""
MIN_REPEATS = 4
"""Consecutive equal tokens from which on they are written as `id*count`."""
_WIDTH = 110
_INDENT = "  "


class DataRow(NamedTuple):
    """A row of `data.train`. position: in its file. name: of the data set, empty if there is only one."""

    file: Path
    name: str
    position: int
    location: str
    columns: dict[str, Any]


class PromptPreview(NamedTuple):
    """A prompt as its first request has it.

    row: the prompt of the data. prompt: with token ids and placed images, after `reset` of its environment, if any.
    schemas: of its tools, as the template gets them. environment: None if the row has none.
    """

    location: str
    row: Prompt
    prompt: Prompt
    schemas: Sequence[dict[str, Any]]
    environment: EnvironmentInfo | None


def describe_row(config: Config, number: int) -> str:
    """Return the text of `--show-prompt`. number: of the row, counted from 0 over all files of `data.train`.

    Raises ConfigError for a row that does not exist or cannot be rendered, a model without tokenizer, and an algorithm
    whose rows only it can read.
    """
    declared = load_requirements(config)
    if declared.item in ("rows", "requests"):
        source = "reads rows of its own format" if declared.item == "rows" else "gets requests from clients"
        raise ConfigError(f"--show-prompt: algorithm={declared.name} {source}, so there is no prompt to show")
    row = find_row(config, number)
    if not config.model.path:
        raise ConfigError("--show-prompt: model.path is not set; it must name the HF folder of the policy")
    hf = folder_config(config.model.path, "model.path")
    check_tokenizer(config.model.path, int(hf["vocab_size"]))
    chat = read_chat(hf, config, declared)
    heading = [f"row {number} of data.train: {row.location}"]
    if declared.item == "prompts":
        return "\n".join([*heading, *_describe_prompt(read_prompt(config, chat, row), config, chat)])
    positions = int(family_of(hf).gpt_kwargs(hf)["max_sequence_length"])
    if declared.item == "conversations":
        return "\n".join([*heading, *_describe_conversation(config, chat, row, positions)])
    return "\n".join([*heading, *_describe_pair(config, declared, chat, row, positions)])


def find_row(config: Config, number: int) -> DataRow:
    """Return a row of `data.train`, counted from 0 over all files. Raises ConfigError if there is none."""
    data, count = config.data, 0
    if not data.train:
        raise ConfigError("--show-prompt: data.train is not set; it must name a .parquet or .jsonl file")
    check_files(data)
    for path, name in zip(data.train, name_datasets(data.train), strict=True):
        for position, (location, columns) in enumerate(read_rows(Path(path))):
            if count == number:
                return DataRow(Path(path), name, position, location, columns)
            count += 1
    rows = f"rows 0 to {count - 1}" if count else "no rows"
    raise ConfigError(f"--show-prompt {number}: data.train has {rows}")


def read_prompt(config: Config, chat: ChatTemplate, row: DataRow) -> PromptPreview:
    """Render a prompt as a run does, after `reset` of its environment in a process of its own.

    Raises ConfigError if the prompt cannot be rendered, or if `reset` fails.
    """
    data = config.data
    fallback_id = default_id(row.file, row.name, row.position)
    task = parse_prompt(row.columns, row.location, fallback_id, data.prompt_key, data.label_key, row.name)
    environment = chat.catalog.find_environment(task)
    rendered = chat.render_prompt(task)
    if environment is None or environment.kind == "agent":
        return PromptPreview(row.location, task, rendered, chat.catalog.select_schemas(task), environment)
    os.environ.update(to_environment(config.sandbox))
    try:
        prompt, schemas = asyncio.run(_reset(config, chat, rendered))
    except SessionLost as error:
        raise ConfigError(f"{row.location}: {error}") from None
    return PromptPreview(row.location, task, prompt, schemas, environment)


async def _reset(config: Config, chat: ChatTemplate, task: Prompt) -> tuple[Prompt, Sequence[dict[str, Any]]]:
    """Return the prompt and the tools' schemas after `reset`."""
    rollout = config.rollout
    limits = ProcessLimits(rollout.pass_env, rollout.tool_memory_mb)
    pool = EnvironmentPool(chat.catalog, rollout.tool_timeout, 1, limits=limits)
    try:
        session = await pool.open_session(task)
        try:
            return render_after_reset(task, session, chat, rollout.max_context), session.schemas
        finally:
            session.close()
    finally:
        await pool.aclose()


# --- as text ----------------------------------------------------------------------------------------------------


def _describe_prompt(preview: PromptPreview, config: Config, chat: ChatTemplate) -> Iterator[str]:
    row, prompt = preview.row, preview.prompt
    yield from _describe_columns(row)
    if (environment := preview.environment) is not None:
        if environment.kind == "agent":
            text = "an agent, which writes its requests itself; below is the row, of which only the length counts"
        else:
            text = "messages and tools below are those after reset"
        yield f"{_INDENT}{'environment':<13} {environment.spec}: {text}"
    yield from _section("messages", (_format_message(message) for message in prompt.messages))
    if preview.schemas:
        schemas = escape_schemas(preview.schemas, chat.control_tokens)
        yield from _section("tools", (json.dumps(schema, ensure_ascii=False, default=str) for schema in schemas))
    yield from _section("text", [format_text(chat, prompt.token_ids, prompt.images)])
    yield from _section(f"{len(prompt.token_ids)} tokens", [format_ids(prompt.token_ids)])
    if prompt.images:
        yield from _section("images", map(_format_image, prompt.images))
    yield from ("", _describe_room(len(prompt.token_ids), config))


def _describe_columns(prompt: Prompt) -> Iterator[str]:
    """Yield what only the reward and the environment get."""
    yield f"{_INDENT}{'id':<13} {prompt.id}"
    columns = {"data_source": prompt.data_source, "ground_truth": prompt.ground_truth, **prompt.extra}
    for name, value in columns.items():
        if value not in (None, ""):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            yield f"{_INDENT}{name:<13} {_shorten(text)}"


def _describe_room(num_tokens: int, config: Config) -> str:
    """Return how many tokens the policy may answer with."""
    rollout, smallest = config.rollout, smallest_context(config)
    if num_tokens >= smallest:
        return f"room for the answer: none, so the prompt is excluded; raise rollout.max_context={smallest}"
    room = rollout.max_context - num_tokens
    return (
        f"room for the answer: {min(room, rollout.max_new_tokens)} tokens in the first turn "
        f"(rollout.max_context={rollout.max_context} leaves {room}, {rollout.max_new_tokens=})"
    )


def _describe_conversation(config: Config, chat: ChatTemplate, row: DataRow, positions: int) -> Iterator[str]:
    normalized = normalize_row(row.columns, row.location, config.data.prompt_key, answer_key(config), row.name)
    conversation = tokenize_conversation(normalized, chat.tokenizer, row.location, images=chat.images)
    yield f"{_INDENT}{'id':<13} {conversation.prompt.id}"
    yield from _describe_turns(chat, conversation, "trained")
    if conversation.num_tokens > positions:
        yield from ("", f"the conversation is excluded: it is longer than the model's {positions} positions")


def _describe_pair(
    config: Config, declared: Requirements, chat: ChatTemplate, row: DataRow, positions: int
) -> Iterator[str]:
    pair = make_pair(row.columns, chat.tokenizer, row.location, row.name, images=chat.images)
    yield f"{_INDENT}{'id':<13} {pair.chosen.prompt.id}"
    label = "scored" if declared.has_scalar_head else "trained"
    for name, side in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        yield from ("", f"--- {name}")
        yield from _describe_turns(chat, side, label)
    budget = config.train.max_tokens_per_gpu * config.parallel.cp
    longest = max(pair.chosen.num_tokens, pair.rejected.num_tokens)
    if pair.num_tokens > budget or longest > positions:
        yield from (
            "",
            f"the pair is excluded: it has {pair.num_tokens} tokens, of which a micro-batch holds {budget}, and "
            f"{longest} in one conversation, of which the model reads {positions}",
        )


def _describe_turns(chat: ChatTemplate, conversation: Rollout, label: str) -> Iterator[str]:
    """Yield text and ids of each turn, those of the assistant with the label."""
    for turn in conversation.turns:
        yield from _section(_turn_title(turn, label), [format_text(chat, turn.token_ids, turn.images)])
        yield textwrap.indent(format_ids(turn.token_ids), _INDENT)
    yield from ("", f"{conversation.num_tokens} tokens, {conversation.num_actions} of them {label}")


def _turn_title(turn: Turn, label: str) -> str:
    return f"{label if turn.is_action else f'not {label}'}: {len(turn.token_ids)} tokens"


def _section(title: str, parts: Iterable[str]) -> Iterator[str]:
    yield from ("", title)
    for part in parts:
        yield textwrap.indent(part, _INDENT, lambda line: True)


def _format_message(message: dict[str, Any]) -> str:
    others = {name: value for name, value in message.items() if name not in ("role", "content")}
    extra = [json.dumps(others, ensure_ascii=False, default=str)] if others else []
    return "\n".join([f"{message['role']}: {message.get('content') or ''}", *extra])


def format_text(chat: ChatTemplate, ids: Ids, images: Sequence[Image] = ()) -> str:
    """Decode ids with their control tokens. The tokens of an image are written once, with their number."""
    parts, start = [], 0
    for image in images:
        parts.append(chat.decode(ids[start : image.start]))
        parts.append(f"{chat.decode(ids[image.start : image.start + 1])}*{image.num_tokens}")
        start = image.stop
    return "".join([*parts, chat.decode(ids[start:])])


def format_ids(ids: Ids) -> str:
    """Return ids in lines, with `id*count` for `MIN_REPEATS` or more of the same."""
    words = []
    for token, group in groupby(ids.tolist()):
        count = len(list(group))
        words += [f"{token}*{count}"] if count >= MIN_REPEATS else [str(token)] * count
    return textwrap.fill(" ".join(words), _WIDTH, break_long_words=False)


def _format_image(image: Image) -> str:
    grid = image.grid
    return (
        f"tokens {image.start} to {image.stop - 1}: {image.num_tokens} tokens of {grid.h} x {grid.w} patches, "
        f"{len(image.data)} bytes"
    )


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}... ({len(text)} characters)"
