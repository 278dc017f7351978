"""Read the first rows of a data file as the algorithm will, to find mistakes before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config import Config, ConfigError, DataConfig
from megarl.data.curriculum import OrderKeys
from megarl.data.preference_data import check_pair
from megarl.data.prompt_data import read_prompts
from megarl.data.sft_data import read_conversations
from megarl.data.table import read_rows
from megarl.types.requirements import ItemKind

MAX_ROWS = 1000
"""Rows to check: takes milliseconds for a file of any size. The others are read once the ranks are up."""


class FirstRow(NamedTuple):
    """A row that was checked.

    location: file and line, for messages. text: a prompt's messages; for other rows all columns except id and
    data_source. extra: extra columns of a prompt.
    """

    location: str
    text: str
    extra: Mapping[str, Any]


def check_first_rows(config: Config, item: ItemKind, path: str, order: str = "") -> list[FirstRow]:
    """Check the first rows and return them. Raises ConfigError, naming the line, for malformed rows.

    order: column to sort by.
    """
    data = config.data
    if item == "prompts":
        prompts = read_prompts(path, data.prompt_key, data.label_key, MAX_ROWS, order=order)
        return [FirstRow(f"{path}, {prompt.id}", repr(prompt.messages), prompt.extra) for prompt in prompts]
    if item == "conversations":
        read_conversations(path, None, MAX_ROWS, data.prompt_key, answer_key(config), order=order)
    elif item == "pairs":
        keys, pairs = OrderKeys(order), 0
        for location, row in islice(read_rows(Path(path)), MAX_ROWS):
            check_pair(row, location)
            keys.add(row, location)
            pairs += 1
        if not pairs:
            raise ConfigError(f"{path} holds no pair")
    else:
        return []
    rows = islice(read_rows(Path(path)), MAX_ROWS)
    return [
        FirstRow(location, repr(sorted((name, row[name]) for name in row.keys() - {"id", "data_source"})), {})
        for location, row in rows
    ]


def answer_key(config: Config) -> str:
    """Return the column of the answer in prompt/answer conversations; empty if data.label_key has its default."""
    key = config.data.label_key
    return "" if key == DataConfig.label_key else key
