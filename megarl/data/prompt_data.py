"""Prompts: out of a file's rows, rendering to token ids, and the loader that remembers where it is."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from megarl.config import Config, ConfigError
from megarl.data.chat_columns import parse_chat_messages, parse_tool_names
from megarl.data.conversation_columns import check_text_only, list_columns, row_id, row_source
from megarl.data.curriculum import NESTED_COLUMNS, OrderKeys, sort_by_key
from megarl.data.mixture import ConcatDataset, Stream
from megarl.data.table import read_rows
from megarl.types import Prompt, as_token_ids

Item = TypeVar("Item")

_ALIASES = {"prompt": "messages", "ground_truth": "label"}  # what the two columns are called elsewhere


def read_prompts(
    path: str | Path,
    prompt_key: str = "prompt",
    label_key: str = "ground_truth",
    most: int | None = None,
    name: str = "",
    order: str = "",
) -> list[Prompt]:
    """All prompts of a file, or the first `most`, in its order, without token ids.

    `.parquet` with verl's columns (data_source, prompt, ability, reward_model {style, ground_truth}, extra_info), or
    `.jsonl` with {prompt | messages, ground_truth | label, tools, data_source, id, metadata | extra}; either may use
    the other's columns. `prompt_key` names the prompt, a list of chat messages or a string that becomes one user
    message; `label_key` the ground truth where there is no `reward_model.ground_truth`, "" where there is none at all.
    `tools` are names or OpenAI tool schemas. Without `id` a row's id is the file's stem and the row's number from 0.
    Any other column goes into `extra`, together with the fields of extra_info, metadata and extra. name: of the data
    set among several; ids begin with it, and it is the source of rows without `data_source`. order: a column whose
    values must be numbers where there are some.

    Raises ConfigError for a missing, empty or unreadable file, a missing column, a malformed row, an id used twice.
    """
    file = Path(path)
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    keys = OrderKeys(order)
    for where, prompt in islice(iter_prompts(file, prompt_key, label_key, name), most):
        if prompt.id in seen:
            raise ConfigError(f"{where}: the id {prompt.id!r} is taken by {seen[prompt.id]}; ids must be unique")
        seen[prompt.id] = where
        keys.add(prompt.extra, where)
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{file} holds no prompts")
    return prompts


def iter_prompts(
    file: Path, prompt_key: str = "prompt", label_key: str = "ground_truth", name: str = ""
) -> Iterator[tuple[str, Prompt]]:
    """(where it stands, prompt) of each row; as of `read_prompts`, but for what concerns several rows."""
    for number, (where, row) in enumerate(read_rows(file)):
        yield where, _parse_prompt(row, where, f"{name or file.stem}-{number}", prompt_key, label_key, name)


def render_prompts(
    prompts: Sequence[Prompt], render: Callable[[Prompt], Sequence[int]], max_prompt_tokens: int
) -> tuple[list[Prompt], int]:
    """The prompts with their token ids, without those longer than `max_prompt_tokens`, and how many those were.

    Raises ConfigError if none is left.
    """
    kept: list[Prompt] = []
    shortest = 0
    for prompt in prompts:
        ids = as_token_ids(render(prompt))
        if len(ids) <= max_prompt_tokens:
            kept.append(replace(prompt, token_ids=ids))
        else:
            shortest = min(shortest or len(ids), len(ids))
    if not kept:
        raise prompts_too_long_error(len(prompts), max_prompt_tokens, shortest)
    return kept, len(prompts) - len(kept)


def prompts_too_long_error(count: int, max_prompt_tokens: int, shortest: int) -> ConfigError:
    """shortest: tokens of the shortest of so many prompts."""
    return ConfigError(
        f"all {count} prompts are longer than {max_prompt_tokens} tokens, the shortest has {shortest}; raise "
        "rollout.max_context"
    )


class PromptLoader(Generic[Item]):
    """Hands out prompts for ever, epoch after epoch, each epoch in an order of its own that only the seed decides.

    A batch may take the end of one epoch and the beginning of the next, so that every prompt comes once per epoch.
    Items of another kind will do, too: they are only indexed, and only when it is their turn.

    weights: of the data sets that the prompts are `ConcatDataset` of, which then have epochs of their own. order: the column
    of their keys, by which each set's first epoch goes, and without shuffling all of them. sizes: bytes of the files
    that the prompts were read from, as a part of what the data are known by.
    """

    def __init__(
        self,
        prompts: Sequence[Item],
        prompts_per_step: int,
        seed: int,
        shuffle: bool = True,
        weights: Sequence[float] = (),
        order: str = "",
        sizes: Sequence[int] = (),
    ) -> None:
        if not len(prompts):
            raise ConfigError("there are no prompts to train on")
        if prompts_per_step < 1:
            raise ConfigError(f"data.prompts_per_step must be at least 1, not {prompts_per_step}")
        joined = prompts if isinstance(prompts, ConcatDataset) else ConcatDataset((prompts,), ("",))
        if weights and len(weights) != len(joined.parts):
            raise ConfigError(f"data.weights has {len(weights)} numbers, but there are {len(joined.parts)} data sets")
        if order and joined.keys is None:
            raise ConfigError(
                f"data.order={order}: this algorithm's items have no columns to order them by; leave it out"
            )
        self._prompts = joined
        self._stream = Stream(joined.sizes, weights)
        self._names = joined.names if weights else ("",)
        self._keys = joined.keys if order else None
        self._per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._sizes = tuple(sizes)
        self._samples = 0  # prompts handed out since the beginning
        self._last: Sequence[Item] = []  # those that were handed out last, together
        self._orders: dict[tuple[int, int], list[int]] = {}  # by set and epoch: the numbers of the set's prompts

    @staticmethod
    def from_config(items: Sequence[Item], config: Config) -> PromptLoader[Item]:
        """As a configuration has it."""
        data = config.data
        sizes = [file.stat().st_size for file in map(Path, data.train) if file.is_file()]
        seed, shuffle = config.run.seed, data.shuffle
        return PromptLoader(items, data.prompts_per_step, seed, shuffle, data.weights, data.order, sizes)

    def next_batch(self) -> Sequence[Item]:
        """The next `prompts_per_step` prompts."""
        return self.next_items(self._per_step)

    def next_items(self, count: int) -> Sequence[Item]:
        """The next so many."""
        batch = self._items_at(self._samples, count)
        self._samples += count
        self._last = batch
        return batch

    def peek(self, steps: int) -> list[Sequence[Item]]:
        """What `next_batch` will return the next times."""
        return [self._items_at(self._samples + step * self._per_step, self._per_step) for step in range(steps)]

    def return_unused(self, count: int) -> None:
        """The last so many that were handed out were not used: they come first the next time, in the same order."""
        if not 0 <= count <= self._samples:
            raise ValueError(f"{self._samples} prompts were handed out, and {count} come back")
        if count:
            self._samples -= count
            self._last = []

    def is_last_batch(self, prompts: Sequence[Item]) -> bool:
        """Whether these are the ones that were handed out last, so that `further` gives those that come after them."""
        last = self._last[-len(prompts) :] if prompts else []
        return bool(last) and len(last) == len(prompts) and all(map(operator.is_, prompts, last))

    def epoch_metrics(self) -> dict[str, float]:
        """How often the prompts were handed out, all of them or those of each set: `data/epoch`, `data/epoch/<set>`."""
        counts = zip(self._names, self._stream.count_before(self._samples), self._stream.sizes, strict=True)
        return {f"data/epoch/{name}".rstrip("/"): count / size for name, count, size in counts}

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, as plain values: the next batch of a loader that loads this is the next one of this."""
        return {"samples": self._samples, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any], forced: bool = False) -> None:
        """Go to a saved place. Raises ConfigError if it was saved with other prompts, unless forced to go on there."""
        self.check(state, forced)
        self._samples = int(state["samples"])
        self._last = []

    def check(self, state: dict[str, Any], forced: bool = False) -> None:
        """What `load_state_dict` would say of a state."""
        if state.get("fingerprint") != self.fingerprint and not forced:
            raise ConfigError(
                "the checkpoint was written with other training prompts than these; give data.train the files it was "
                "written with, and data.weights and data.order what they were, or start a new run.dir, or go on all "
                "the same by run.resume=forced"
            )

    def _items_at(self, place: int, count: int) -> Sequence[Item]:
        return self._prompts.select([self._index(one) for one in range(place, place + count)])

    def _index(self, place: int) -> int:
        """Among all prompts, of the one that is handed out after so many others."""
        chosen, epoch, number = self._stream.locate(place)
        return self._stream.offsets[chosen] + self._epoch_order(chosen, epoch)[number]

    @cached_property
    def fingerprint(self) -> str:
        """Of the data and its shares: the length, up to 1,000 of the items, evenly spread, for some are slow to index,
        and the sizes of the files. What it does not see is a change in other rows of more than 1,000 that leaves the
        file as long as it was."""
        count = len(self._prompts)
        digest = hashlib.sha256(str(count).encode())
        for place in range(min(count, 1000)):
            digest.update(repr(self._prompts[place * count // min(count, 1000)]).encode())
        digest.update(repr(self._sizes).encode())
        if len(self._stream.sizes) > 1:
            digest.update(repr(self._stream.describe()).encode())
        if self._keys is not None:
            digest.update(self._keys.tobytes())
        return digest.hexdigest()

    def _epoch_order(self, chosen: int, epoch: int) -> list[int]:
        """Of a set in an epoch; the two that were used last are kept, for a batch may take of both."""
        if (order := self._orders.get((chosen, epoch))) is None:
            begin, size = self._stream.offsets[chosen], self._stream.sizes[chosen]
            order = list(range(size))
            if self._shuffle:
                which = f"/{chosen}" if len(self._stream.sizes) > 1 else ""
                random.Random(f"{self._seed}/{epoch}{which}").shuffle(order)
            if self._keys is not None and (epoch == 0 or not self._shuffle):
                order = sort_by_key(order, self._keys[begin : begin + size])
            for other in [key for key in self._orders if key[0] == chosen and abs(key[1] - epoch) > 1]:
                del self._orders[other]
            self._orders[chosen, epoch] = order
        return order


def _parse_prompt(
    row: dict[str, Any], where: str, default_id: str, prompt_key: str, label_key: str, name: str
) -> Prompt:
    check_text_only(row, where)
    rest = dict(row)
    messages = parse_chat_messages(_pop_column(rest, row, prompt_key, where, "data.prompt_key"), where, prompt_key)
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
        ground_truth = _pop_column(rest, row, label_key, where, "data.label_key")
    else:
        ground_truth = None
    identity, source = row_id(rest, where, name, default_id), row_source(rest, where, name)
    for column in ("id", "data_source"):
        rest.pop(column, None)
    tools = parse_tool_names(rest.pop("tools", None), where)
    extra: dict[str, Any] = {}
    for column in NESTED_COLUMNS:
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


def _pop_column(row: dict[str, Any], whole: dict[str, Any], key: str, where: str, option: str) -> Any:
    """The value of a column, which is no longer in `row` then. whole: the row as it was."""
    for name in (key, _ALIASES.get(key)):
        if name is not None and row.get(name) is not None:
            return row.pop(name)
    empty = f"; the column {key!r} is empty here" if key in row else ""
    none = ' (or to "" if there is no ground truth)' if option == "data.label_key" else ""
    here = f"columns here: {list_columns(whole)}"
    raise ConfigError(f"{where}: no {key!r}{empty}; {here}; set {option} to the right one{none}")
