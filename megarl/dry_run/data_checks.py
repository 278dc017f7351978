"""Check data, tokenizer, chat template, tools and environments against each other before anything starts.

Rows are read and rendered as in a run, so errors have the same text. The first `MAX_ROWS` rows of each file are
checked; more only while a question is open that a single row may settle, such as whether any row is short enough.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import Config, ConfigError
from megarl.config.keys import max_pending_groups
from megarl.config.stages import smallest_context
from megarl.data.datasets import (
    MAX_ROWS,
    answer_key,
    conversations_too_long_error,
    iter_conversations,
    iter_prompts,
    make_pair,
    pairs_too_long_error,
    prompts_too_long_error,
)
from megarl.data.loader import check_has_keys, name_datasets, read_key
from megarl.data.table import read_rows
from megarl.dry_run.rollout_checks import check_enough_prompts, rollout_settings
from megarl.engine.sglang.server_args import tool_call_parsers
from megarl.engine.sglang.sglang_parsers import ParserProcess
from megarl.engine.tool_calls import find_misread_tool, parser_name
from megarl.environments.catalog import ENVIRONMENTS_KEY, TOOLS_KEY, EnvironmentCatalog, load_catalog
from megarl.models.family import HFConfig
from megarl.models.registry import family_of
from megarl.types import Prompt
from megarl.types.requirements import Requirements

_PARSER_TIMEOUT_S = 120.0
MAX_FILE_SECONDS = 20.0
"""Maximum seconds per file. The rest of it is checked when the run starts."""


def read_chat(hf: HFConfig, config: Config, declared: Requirements) -> ChatTemplate:
    """Load tokenizer, template and tools of a run. Raises ConfigError if they do not fit together."""
    catalog = load_catalog(config.rollout) if declared.has_rollout else EnvironmentCatalog()
    chat = ChatTemplate.load(config.model.path, catalog.tools, catalog.environments)
    chat.check_vocabulary(hf["vocab_size"])
    chat.check_tools()
    if declared.has_rollout:
        assert chat.end_token_ids  # read from the template, which may lack them
    return chat


def check_tool_calls(hf: HFConfig, config: Config, chat: ChatTemplate, warnings: list[str]) -> None:
    """Raise ConfigError if SGLang's parser cannot read the template's tool calls, as `check_parser` does once engines
    have started."""
    if not chat.tools or not tool_call_parsers():
        return
    name, is_default = parser_name(config.rollout.tool_call_parser, hf), not config.rollout.tool_call_parser

    async def ask() -> str:
        async with asyncio.timeout(_PARSER_TIMEOUT_S), ParserProcess() as client:
            return await find_misread_tool(chat, client, name, await client.find_marker(name), is_default)

    try:
        with ThreadPoolExecutor(1) as thread:  # an event loop may be running in this thread
            complaint = thread.submit(asyncio.run, ask()).result()
    except (RuntimeError, TimeoutError) as error:
        warnings.append(f"whether {name} reads the template's tool calls was not tried: {error or 'it took too long'}")
        return
    if complaint:
        raise ConfigError(complaint)


def check_rows(hf: HFConfig, config: Config, declared: Requirements, chat: ChatTemplate, warnings: list[str]) -> None:
    """Check rows and files of data.

    Raises ConfigError for a row that cannot be rendered, asks for a tool or environment that is not loaded, or lacks a
    column of its `reset`; and for files without a row that is short enough, or without a number to sort by.
    """
    data, run = config.data, config.run
    min_fitting = 1
    if declared.item == "prompts" and declared.has_engines(config):
        oversample = max(rollout.oversample for rollout in rollout_settings(config, declared.roles).values())
        min_fitting = max_pending_groups(data.prompts_per_step, oversample) if oversample > 1 else 1
    checker = _RowChecker(hf, config, declared, chat, warnings, min_fitting)
    named = zip(data.train, name_datasets(data.train), strict=True)
    train = [checker.check_file(path, name, data.curriculum_key) for path, name in named]
    if all(stats.is_complete for stats in train):
        if data.curriculum_key and not any(stats.is_ordered for stats in train):
            check_has_keys(np.array([math.nan]), data.curriculum_key, data.train)
        if declared.item == "prompts":
            check_enough_prompts(sum(stats.num_fitting for stats in train), config)
    for path, name in zip(data.eval, name_datasets(data.eval), strict=True) if run.eval_every else ():
        checker.check_file(path, name)


@dataclass
class _FileStats:
    """Counts of a file: rows read, rows that are short enough, and tokens of the shortest of the others."""

    num_rows: int = 0
    num_fitting: int = 0
    shortest: int = 0
    is_ordered: bool = False
    is_complete: bool = False


@dataclass
class _RowChecker:
    hf: HFConfig
    config: Config
    declared: Requirements
    chat: ChatTemplate
    warnings: list[str]
    min_fitting: int
    """Minimum number of rows that are short enough."""

    def __post_init__(self) -> None:
        self.max_prompt_tokens = smallest_context(self.config) - 1
        self.positions = int(family_of(self.hf).gpt_kwargs(self.hf)["max_sequence_length"])
        self.max_pair_tokens = self.config.train.max_tokens_per_gpu * self.config.parallel.cp

    def check_file(self, path: str, name: str, order: str = "") -> _FileStats:
        """Check one file. Raises ConfigError if none of its rows is short enough."""
        stats = _FileStats()
        if not Path(path).exists():
            return stats
        deadline = time.monotonic() + MAX_FILE_SECONDS
        for tokens, fits, key in self._measure_rows(Path(path), name, order):
            stats.num_rows += 1
            stats.is_ordered = stats.is_ordered or not math.isnan(key)
            if fits:
                stats.num_fitting += 1
            else:
                stats.shortest = min(stats.shortest or tokens, tokens)
            is_settled = stats.num_fitting >= self.min_fitting and (not order or stats.is_ordered)
            if (stats.num_rows >= MAX_ROWS and is_settled) or time.monotonic() > deadline:
                break
        else:
            stats.is_complete = True
        if stats.is_complete and stats.num_rows and not stats.num_fitting:
            count, shortest = stats.num_rows, stats.shortest
            if self.declared.item == "prompts":
                raise prompts_too_long_error(count, self.max_prompt_tokens, shortest)
            if self.declared.item == "conversations":
                raise conversations_too_long_error(path, count, self.positions, shortest)
            raise pairs_too_long_error(path, count, self.max_pair_tokens, self.positions, shortest)
        if dropped := stats.num_rows - stats.num_fitting:
            scope = f"of {stats.num_rows}" if stats.is_complete else f"of the first {stats.num_rows}"
            self.warnings.append(f"{path}: {dropped} {scope} rows are too long and will be excluded")
        return stats

    def _measure_rows(self, file: Path, name: str, order: str) -> Iterator[tuple[int, bool, float]]:
        """Yield each row's tokens, whether it is short enough, and its number in the column `order`."""
        data, tokenizer = self.config.data, self.chat.tokenizer

        def key(row: dict[str, Any], location: str) -> float:
            return read_key(row, order, location) if order else math.nan

        if self.declared.item == "prompts":
            for _, prompt in iter_prompts(file, data.prompt_key, data.label_key, name):
                tokens = len(self.chat.encode_prompt(prompt))
                yield tokens, tokens <= self.max_prompt_tokens, key(prompt.extra, prompt.id)
        elif self.declared.item == "conversations":
            columns = data.prompt_key, answer_key(self.config), name
            conversations = iter_conversations(file, tokenizer, *columns, self.chat.images)
            for location, row, conversation in conversations:
                yield conversation.num_tokens, conversation.num_tokens <= self.positions, key(row, location)
        else:
            for location, row in read_rows(file):
                pair = make_pair(row, tokenizer, location, name, images=self.chat.images)
                longest = max(pair.chosen.num_tokens, pair.rejected.num_tokens)
                fits = pair.num_tokens <= self.max_pair_tokens and longest <= self.positions
                yield pair.num_tokens, fits, key(row, location)


def check_offered_by_files(config: Config, declared: Requirements, catalog: EnvironmentCatalog) -> None:
    """Apply `check_offered` to the prompts of all files of a run, if they exist."""
    data = config.data
    files = list(zip(data.train, name_datasets(data.train), strict=True))
    files += zip(data.eval, name_datasets(data.eval), strict=True) if config.run.eval_every else ()
    if should_check_offered(config, declared) and all(Path(path).exists() for path, _ in files):
        rows = (iter_prompts(Path(path), data.prompt_key, data.label_key, name) for path, name in files)
        check_offered((prompt for _, prompt in chain.from_iterable(rows)), catalog)


def should_check_offered(config: Config, declared: Requirements) -> bool:
    """Return whether to run `check_offered`; not for an evaluation, whose tools are those of the evaluated run."""
    return declared.item == "prompts" and bool(declared.trained_roles) and not config.rollout.replay


def check_offered(prompts: Iterable[Prompt], catalog: EnvironmentCatalog) -> None:
    """Raise ConfigError for an entry of `rollout.tools` or `rollout.environments` that no prompt uses.

    Stops reading prompts once all entries are used.
    """
    tools = {tool.spec for tool in catalog.tools.values()}
    environments = {entry.spec for entry in catalog.environments.values()}
    listed: set[str] = set()
    named: set[str] = set()
    for prompt in prompts:
        if not tools and not environments:
            return
        environment = catalog.find_environment(prompt)
        if environment is not None:
            environments.discard(environment.spec)
            named.add(environment.name)
        listed.update(prompt.tools)
        if environment is None or environment.kind != "agent":
            offered = {schema["function"]["name"] for schema in catalog.select_schemas(prompt)}
            tools -= {tool.spec for name, tool in catalog.tools.items() if name in offered}
    for name, tool in catalog.tools.items():
        if tool.spec in tools:
            reason = "all prompts are for an agent, which has its own tools;"
            if listed:
                reason = (
                    f"the data's column `tools` lists {_format_names(listed)}; add {name} to it, omit the column, so "
                    "that every prompt offers all tools,"
                )
            raise ConfigError(
                f"{TOOLS_KEY}: no prompt offers {name} of {tool.spec}: {reason} or remove it from {TOOLS_KEY}"
            )
    for environment in catalog.environments.values():
        if environment.spec in environments:
            raise ConfigError(
                f"{ENVIRONMENTS_KEY}: no prompt has {environment.name} of {environment.spec}, all have "
                f"{_format_names(named)}: name it in the data's column `environment`, or remove it from "
                f"{ENVIRONMENTS_KEY}"
            )


def _format_names(names: set[str], most: int = 5) -> str:
    shown = sorted(names)[:most]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")
