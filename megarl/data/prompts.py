"""Prompts: out of a file's rows, rendering to token ids, and the loader that remembers where it is."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from megarl.config import ConfigError
from megarl.data.chats import chat_messages, tool_names
from megarl.data.columns import present, row_id, row_source
from megarl.data.rows import read_rows
from megarl.types import Prompt, ids_of

Item = TypeVar("Item")

_ALIASES = {"prompt": "messages", "ground_truth": "label"}  # what the two columns are called elsewhere
EXTRA = ("extra_info", "metadata", "extra")  # columns whose fields are spread out into Prompt.extra


def read_prompts(
    path: str | Path,
    prompt_key: str = "prompt",
    label_key: str = "ground_truth",
    most: int | None = None,
    name: str = "",
) -> list[Prompt]:
    """All prompts of a file, or the first `most`, in its order, without token ids.

    `.parquet` with verl's columns (data_source, prompt, ability, reward_model {style, ground_truth}, extra_info), or
    `.jsonl` with {prompt | messages, ground_truth | label, tools, data_source, id, metadata | extra}; either may use
    the other's columns. `prompt_key` names the prompt, a list of chat messages or a string that becomes one user
    message; `label_key` the ground truth where there is no `reward_model.ground_truth`, "" where there is none at all.
    `tools` are names or OpenAI tool schemas. Without `id` a row's id is the file's stem and the row's number from 0.
    Any other column goes into `extra`, together with the fields of extra_info, metadata and extra. name: of the data
    set among several; ids begin with it, and it is the source of rows without `data_source`.

    Raises ConfigError for a missing, empty or unreadable file, a missing column, a malformed row, an id used twice.
    """
    file = Path(path)
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for where, row in islice(read_rows(file), most):
        number = str(len(prompts))
        prompt = _prompt(row, where, number if name else f"{file.stem}-{number}", prompt_key, label_key, name)
        if prompt.id in seen:
            raise ConfigError(f"{where}: the id {prompt.id!r} is taken by {seen[prompt.id]}; ids must be unique")
        seen[prompt.id] = where
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{file} holds no prompts")
    return prompts


def render_prompts(
    prompts: Sequence[Prompt], render: Callable[[Prompt], Sequence[int]], max_prompt_tokens: int
) -> tuple[list[Prompt], int]:
    """The prompts with their token ids, without those longer than `max_prompt_tokens`, and how many those were.

    Raises ConfigError if none is left.
    """
    kept: list[Prompt] = []
    shortest = 0
    for prompt in prompts:
        ids = ids_of(render(prompt))
        if len(ids) <= max_prompt_tokens:
            kept.append(replace(prompt, token_ids=ids))
        else:
            shortest = min(shortest or len(ids), len(ids))
    if not kept:
        raise ConfigError(
            f"all {len(prompts)} prompts are longer than {max_prompt_tokens} tokens, the shortest has {shortest}; "
            "raise rollout.max_context"
        )
    return kept, len(prompts) - len(kept)


class PromptLoader(Generic[Item]):
    """Hands out prompts for ever, epoch after epoch, each epoch in an order of its own that only the seed decides.

    A batch may take the end of one epoch and the beginning of the next, so that every prompt comes once per epoch.
    Items of another kind will do, too: they are only indexed, and only when it is their turn.
    """

    def __init__(self, prompts: Sequence[Item], prompts_per_step: int, seed: int, shuffle: bool = True) -> None:
        if not len(prompts):
            raise ConfigError("there are no prompts to train on")
        if prompts_per_step < 1:
            raise ConfigError(f"data.prompts_per_step must be at least 1, not {prompts_per_step}")
        self._prompts = prompts
        self._per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._offset = 0  # prompts of this epoch that were handed out
        self._samples = 0  # prompts handed out since the beginning
        self._last: list[Item] = []  # those that were handed out last, together
        self._order = self._order_of(0)

    def next_batch(self) -> list[Item]:
        """The next `prompts_per_step` prompts."""
        return self.further(self._per_step)

    def further(self, count: int) -> list[Item]:
        """The next so many."""
        batch: list[Item] = []
        while len(batch) < count:
            if self._offset == len(self._order):
                self._go_to(self._epoch + 1, 0)
            batch.append(self._prompts[self._order[self._offset]])
            self._offset += 1
        self._samples += len(batch)
        self._last = batch
        return batch

    def peek(self, steps: int) -> list[list[Item]]:
        """What `next_batch` will return the next times."""
        before = self._epoch, self._offset, self._samples, self._order, self._last
        batches = [self.next_batch() for _ in range(steps)]
        self._epoch, self._offset, self._samples, self._order, self._last = before
        return batches

    def give_back(self, count: int) -> None:
        """The last so many that were handed out were not used: they come first the next time, in the same order."""
        if not 0 <= count <= self._samples:
            raise ValueError(f"{self._samples} prompts were handed out, and {count} come back")
        if count:
            self._samples -= count
            self._last = []
            self._go_to(*divmod(self._samples, len(self._prompts)))

    def ends_with(self, prompts: Sequence[Item]) -> bool:
        """Whether these are the ones that were handed out last, so that `further` gives those that come after them."""
        last = self._last[-len(prompts) :] if prompts else []
        return bool(last) and len(last) == len(prompts) and all(map(operator.is_, prompts, last))

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, as plain values: the next batch of a loader that loads this is the next one of this."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "samples": self._samples,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place. Raises ConfigError if it was saved with other prompts."""
        if state["fingerprint"] != self.fingerprint:
            raise ConfigError(
                "the checkpoint was written with other training prompts than these; give data.train the file it was "
                "written with, or start a new run.dir"
            )
        self._samples = int(state["samples"])
        self._go_to(int(state["epoch"]), int(state["offset"]))

    def _go_to(self, epoch: int, offset: int) -> None:
        if epoch != self._epoch:
            self._order = self._order_of(epoch)
        self._epoch, self._offset = epoch, offset

    @cached_property
    def fingerprint(self) -> str:
        """Of the data set: its length and up to 1,000 of its items, evenly spread, for some are slow to index."""
        count = len(self._prompts)
        digest = hashlib.sha256(str(count).encode())
        for place in range(min(count, 1000)):
            digest.update(repr(self._prompts[place * count // min(count, 1000)]).encode())
        return digest.hexdigest()

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def _prompt(row: dict[str, Any], where: str, default_id: str, prompt_key: str, label_key: str, name: str) -> Prompt:
    rest = dict(row)
    messages = chat_messages(_take(rest, prompt_key, where, "data.prompt_key"), where, prompt_key)
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"{where}: {prompt_key!r} ends with the assistant's words, which leaves nothing to answer")
    reward_model = rest.get("reward_model")
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        ground_truth = reward_model["ground_truth"]
        if ground_truth is None and label_key:
            raise ConfigError(
                f'{where}: reward_model.ground_truth is empty; fill it in, or set data.label_key to "" if there is none'
            )
        rest.pop("reward_model")
    elif label_key:
        ground_truth = _take(rest, label_key, where, "data.label_key")
    else:
        ground_truth = None
    identity, source = row_id(rest, where, name, default_id), row_source(rest, where, name)
    for column in ("id", "data_source"):
        rest.pop(column, None)
    tools = tool_names(rest.pop("tools", None), where)
    extra: dict[str, Any] = {}
    for column in EXTRA:
        fields = rest.get(column)
        if isinstance(fields, dict):
            extra.update(rest.pop(column))
    return Prompt(
        id=identity,
        messages=messages,
        data_source=source,
        ground_truth=ground_truth,
        tools=tools,
        extra=rest | extra,
    )


def _take(row: dict[str, Any], key: str, where: str, option: str) -> Any:
    for name in (key, _ALIASES.get(key)):
        if name is not None and row.get(name) is not None:
            return row.pop(name)
    empty = f"; the column {key!r} is empty here" if key in row else ""
    none = ' (or to "" if there is no ground truth)' if option == "data.label_key" else ""
    raise ConfigError(f"{where}: no {key!r}{empty}; columns here: {present(row)}; set {option} to the right one{none}")
