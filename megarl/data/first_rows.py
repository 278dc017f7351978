"""What shows a mistake in a data file before anything starts: its first rows, read as the algorithm will read them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from megarl.config import Config, ConfigError
from megarl.data.preferences import check_pair
from megarl.data.prompts import read_prompts
from megarl.data.rows import read_rows
from megarl.data.sft import sft_rollouts
from megarl.types.declared import ItemKind

MOST = 1000
"""Rows: milliseconds of a file of any size. The others are read as soon as the ranks are there."""


def check_first_rows(config: Config, item: ItemKind, path: str) -> None:
    """Raise ConfigError, naming the line, for what is wrong with the form of the first rows."""
    if item == "conversations":
        sft_rollouts(path, None, MOST)
    elif item == "pairs":
        pairs = [check_pair(row, where) for where, row in islice(read_rows(Path(path)), MOST)]
        if not pairs:
            raise ConfigError(f"{path} holds no pair")
    elif item == "prompts":
        read_prompts(path, config.data.prompt_key, config.data.label_key, MOST)
