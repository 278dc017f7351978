"""What shows a mistake in a data file before anything starts: its first rows, read as the algorithm will read them."""

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
"""Rows: milliseconds of a file of any size. The others are read as soon as the ranks are there."""


class FirstRow(NamedTuple):
    """where: it stands, for messages. said: a prompt's messages; of another row all columns but those that name it, as
    text. extra: of a prompt."""

    where: str
    text: str
    extra: Mapping[str, Any]


def check_first_rows(config: Config, item: ItemKind, path: str, order: str = "") -> list[FirstRow]:
    """The first rows. Raises ConfigError, naming the line, for what is wrong with their form. order: the column by
    which they are to be ordered."""
    data = config.data
    if item == "prompts":
        prompts = read_prompts(path, data.prompt_key, data.label_key, MAX_ROWS, order=order)
        return [FirstRow(f"{path}, {prompt.id}", repr(prompt.messages), prompt.extra) for prompt in prompts]
    if item == "conversations":
        read_conversations(path, None, MAX_ROWS, data.prompt_key, answer_key(config), order=order)
    elif item == "pairs":
        keys, pairs = OrderKeys(order), 0
        for where, row in islice(read_rows(Path(path)), MAX_ROWS):
            check_pair(row, where)
            keys.add(row, where)
            pairs += 1
        if not pairs:
            raise ConfigError(f"{path} holds no pair")
    else:
        return []
    rows = islice(read_rows(Path(path)), MAX_ROWS)
    return [
        FirstRow(where, repr(sorted((name, row[name]) for name in row.keys() - {"id", "data_source"})), {})
        for where, row in rows
    ]


def answer_key(config: Config) -> str:
    """The column of the answer in a conversation of a prompt and an answer; empty where nobody has said which."""
    key = config.data.label_key
    return "" if key == DataConfig.label_key else key
