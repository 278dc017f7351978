"""Beginnings of prompts: what the last message of a user says, for a table of prompts by their words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megarl.utils import exact_json
from megarl.view.rollout_files import READ_ERRORS, Notes, iter_groups, open_parts, read_group
from megarl.view.rollout_index import Index

MAX_CHARS = 200
"""Characters of a prompt's beginning."""


class PromptTexts:
    """Reads the beginning of each prompt of a run once, from the first rollout of the prompt."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._texts: dict[int, str] = {}
        """By index of the prompt in the index's `texts`."""

    def read(self, index: Index) -> list[str]:
        """Return the beginning of each prompt in `index.texts["prompt"]`; empty if it cannot be read."""
        prompts, first_rows = np.unique(index.columns["prompt"], return_index=True)
        by_step: dict[int, dict[int, int]] = {}
        for prompt, row in zip(prompts.tolist(), first_rows.tolist(), strict=True):
            if prompt not in self._texts:
                step, number = (int(index.columns[name][row]) for name in ("step", "number"))
                by_step.setdefault(step, {})[number] = prompt
        for step, prompt_by_number in by_step.items():
            self._read_step(step, prompt_by_number)
        return [self._texts.get(prompt, "") for prompt in range(len(index.texts["prompt"]))]

    def _read_step(self, step: int, prompt_by_number: dict[int, int]) -> None:
        notes = Notes()  # the index has noted what cannot be read
        for part in open_parts(self._run_dir, step, notes):
            for group, table in iter_groups(part, ["number"], notes):
                numbers = table.column("number").to_pylist()
                rows = [row for row, number in enumerate(numbers) if number in prompt_by_number]
                messages = read_group(part, group, ["prompt_messages"], notes) if rows else None
                if messages is None or not messages.num_columns:
                    continue
                texts = messages.column(0).take(rows).to_pylist()
                for row, text in zip(rows, texts, strict=True):
                    self._texts[prompt_by_number[numbers[row]]] = begin_prompt(text)


def begin_prompt(messages: str) -> str:
    """Return the beginning of the last user message of a conversation in JSON, on one line; of its last message if none
    is a user's, and nothing if it is not a conversation."""
    try:
        tree = [message for message in exact_json.loads(messages) if isinstance(message, dict)]
    except (*READ_ERRORS, RecursionError):
        return ""
    users = [message for message in tree if message.get("role") == "user"]
    content = (users or tree)[-1].get("content") if tree else ""
    if isinstance(content, list):
        content = " ".join(_part_text(part) for part in content)
    return " ".join(str(content or "")[: 4 * MAX_CHARS].split())[:MAX_CHARS]


def _part_text(part: Any) -> str:
    return str(part.get("text", "")) if isinstance(part, dict) else str(part)
