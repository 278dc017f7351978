"""Prompts: read from a file's rows, rendered to token ids, and dealt out by a resumable loader."""

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

_ALIASES = {"prompt": "messages", "ground_truth": "label"}  # names of the two columns in other data sets


def read_prompts(
    path: str | Path,
    prompt_key: str = "prompt",
    label_key: str = "ground_truth",
    max_rows: int | None = None,
    name: str = "",
    order: str = "",
) -> list[Prompt]:
    """Read all prompts of a file, or the first `max_rows`, in file order, without token ids.

    `.parquet` with verl's columns (data_source, prompt, ability, reward_model {style, ground_truth}, extra_info), or
    `.jsonl` with {prompt | messages, ground_truth | label, tools, data_source, id, metadata | extra}; either may use
    the other's columns. `prompt_key` names the prompt, a list of chat messages or a string that becomes one user
    message; `label_key` the ground truth if there is no `reward_model.ground_truth`, "" if there is none at all.
    `tools` are names or OpenAI tool schemas. Without `id`, a row's id is the file's stem and the row's index from 0.
    Any other column goes into `extra`, together with the fields of extra_info, metadata and extra. name: of the data
    set, if there are several; prefix of ids, and the source of rows without `data_source`. order: a column whose values
    must be numbers or missing.

    Raises ConfigError for a missing, empty or unreadable file, a missing column, a malformed row, an id used twice.
    """
    file = Path(path)
    prompts: list[Prompt] = []
    location_by_id: dict[str, str] = {}
    keys = OrderKeys(order)
    for location, prompt in islice(iter_prompts(file, prompt_key, label_key, name), max_rows):
        if prompt.id in location_by_id:
            raise ConfigError(
                f"{location}: the id {prompt.id!r} is taken by {location_by_id[prompt.id]}; ids must be unique"
            )
        location_by_id[prompt.id] = location
        keys.add(prompt.extra, location)
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{file} holds no prompts")
    return prompts


def iter_prompts(
    file: Path, prompt_key: str = "prompt", label_key: str = "ground_truth", name: str = ""
) -> Iterator[tuple[str, Prompt]]:
    """Yield (location, prompt) of each row, as in `read_prompts` but without the checks across rows."""
    for index, (location, row) in enumerate(read_rows(file)):
        yield location, _parse_prompt(row, location, f"{name or file.stem}-{index}", prompt_key, label_key, name)


def render_prompts(
    prompts: Sequence[Prompt], render: Callable[[Prompt], Sequence[int]], max_prompt_tokens: int
) -> tuple[list[Prompt], int]:
    """Return the prompts with token ids, and the number dropped for exceeding `max_prompt_tokens`.

    Raises ConfigError if none is left.
    """
    fitting: list[Prompt] = []
    shortest = 0
    for prompt in prompts:
        ids = as_token_ids(render(prompt))
        if len(ids) <= max_prompt_tokens:
            fitting.append(replace(prompt, token_ids=ids))
        else:
            shortest = min(shortest or len(ids), len(ids))
    if not fitting:
        raise prompts_too_long_error(len(prompts), max_prompt_tokens, shortest)
    return fitting, len(prompts) - len(fitting)


def prompts_too_long_error(count: int, max_prompt_tokens: int, shortest: int) -> ConfigError:
    """Return the error for prompts that are all too long. shortest: tokens of the shortest."""
    return ConfigError(
        f"all {count} prompts are longer than {max_prompt_tokens} tokens, the shortest has {shortest}; raise "
        "rollout.max_context"
    )


class PromptLoader(Generic[Item]):
    """Deals out prompts endlessly, in a shuffled order per epoch that only the seed determines.

    A batch may span two epochs, so that every prompt comes once per epoch. Items may be of any type: they are only
    indexed, and only when they are dealt out.

    weights: of the data sets in a `ConcatDataset`, which then have their own epochs. order: column of their sort keys,
    which order each set's first epoch, and without shuffling all epochs. sizes: bytes of the prompt files, as part of
    the fingerprint.
    """

    def __init__(
        self,
        prompts: Sequence[Item],
        prompts_per_step: int,
        seed: int,
        shuffle: bool = True,
        weights: Sequence[float] = (),
        order: str = "",
        file_sizes: Sequence[int] = (),
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
        self._sizes = tuple(file_sizes)
        self._samples = 0  # prompts dealt out since the beginning
        self._last: Sequence[Item] = []  # the batch dealt out last
        self._orders: dict[tuple[int, int], list[int]] = {}  # by set and epoch: order of the set's prompts

    @staticmethod
    def from_config(items: Sequence[Item], config: Config) -> PromptLoader[Item]:
        """Create the loader of a configuration."""
        data = config.data
        sizes = [file.stat().st_size for file in map(Path, data.train) if file.is_file()]
        seed, shuffle = config.run.seed, data.shuffle
        return PromptLoader(items, data.prompts_per_step, seed, shuffle, data.weights, data.order, sizes)

    def next_batch(self) -> Sequence[Item]:
        """Return the next `prompts_per_step` prompts."""
        return self.next_items(self._per_step)

    def next_items(self, count: int) -> Sequence[Item]:
        """Return the next `count` items."""
        batch = self._items_at(self._samples, count)
        self._samples += count
        self._last = batch
        return batch

    def peek(self, steps: int) -> list[Sequence[Item]]:
        """Return the batches that the next `steps` calls of `next_batch` will return."""
        return [self._items_at(self._samples + step * self._per_step, self._per_step) for step in range(steps)]

    def return_unused(self, count: int) -> None:
        """Return the last `count` items unused: they are dealt out again next time, in the same order."""
        if not 0 <= count <= self._samples:
            raise ValueError(f"{self._samples} prompts were handed out, and {count} come back")
        if count:
            self._samples -= count
            self._last = []

    def is_last_batch(self, prompts: Sequence[Item]) -> bool:
        """Return whether these prompts end the last batch, so that `next_items` continues after them."""
        last = self._last[-len(prompts) :] if prompts else []
        return bool(last) and len(last) == len(prompts) and all(map(operator.is_, prompts, last))

    def epoch_metrics(self) -> dict[str, float]:
        """Return how often the prompts were dealt out: `data/epoch`, or `data/epoch/<set>` for each set."""
        counts = zip(self._names, self._stream.count_before(self._samples), self._stream.sizes, strict=True)
        return {f"data/epoch/{name}".rstrip("/"): count / size for name, count, size in counts}

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position as plain values. A loader that loads them continues with the same batch."""
        return {"samples": self._samples, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any], forced: bool = False) -> None:
        """Restore a saved position. Raises ConfigError if it was saved with other prompts, unless forced."""
        self.check(state, forced)
        self._samples = int(state["samples"])
        self._last = []

    def check(self, state: dict[str, Any], forced: bool = False) -> None:
        """Raise the error that `load_state_dict` would raise."""
        if state.get("fingerprint") != self.fingerprint and not forced:
            raise ConfigError(
                "the checkpoint was written with other training prompts than these; give data.train the files it was "
                "written with, and data.weights and data.order what they were, or start a new run.dir, or go on all "
                "the same by run.resume=forced"
            )

    def _items_at(self, start: int, count: int) -> Sequence[Item]:
        return self._prompts.select([self._index(position) for position in range(start, start + count)])

    def _index(self, position: int) -> int:
        """Return the index among all prompts of the prompt at a position of the stream."""
        chosen, epoch, number = self._stream.locate(position)
        return self._stream.offsets[chosen] + self._epoch_order(chosen, epoch)[number]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the data and their shares.

        Covers the number of items, up to 1,000 evenly spaced items, as some are slow to index, and the sizes of the
        files. A change in other rows of a larger file that keeps its size is not detected.
        """
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
        """Return the order of a set in an epoch. The last two are cached, because a batch may span both."""
        if (order := self._orders.get((chosen, epoch))) is None:
            start, size = self._stream.offsets[chosen], self._stream.sizes[chosen]
            order = list(range(size))
            if self._shuffle:
                set_suffix = f"/{chosen}" if len(self._stream.sizes) > 1 else ""
                random.Random(f"{self._seed}/{epoch}{set_suffix}").shuffle(order)
            if self._keys is not None and (epoch == 0 or not self._shuffle):
                order = sort_by_key(order, self._keys[start : start + size])
            for other in [key for key in self._orders if key[0] == chosen and abs(key[1] - epoch) > 1]:
                del self._orders[other]
            self._orders[chosen, epoch] = order
        return order


def _parse_prompt(
    row: dict[str, Any], location: str, default_id: str, prompt_key: str, label_key: str, name: str
) -> Prompt:
    check_text_only(row, location)
    rest = dict(row)
    messages = parse_chat_messages(
        _pop_column(rest, row, prompt_key, location, "data.prompt_key"), location, prompt_key
    )
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"{location}: {prompt_key!r} ends with the assistant's words, which leaves nothing to answer")
    reward_model = rest.get("reward_model")
    if isinstance(reward_model, dict) and "ground_truth" in reward_model:
        ground_truth = reward_model["ground_truth"]
        if ground_truth is None and label_key:
            raise ConfigError(
                f'{location}: reward_model.ground_truth is empty; fill it in, or set data.label_key to "" if there '
                "is none"
            )
        rest.pop("reward_model")
    elif label_key:
        ground_truth = _pop_column(rest, row, label_key, location, "data.label_key")
    else:
        ground_truth = None
    identity, source = row_id(rest, location, name, default_id), row_source(rest, location, name)
    for column in ("id", "data_source"):
        rest.pop(column, None)
    tools = parse_tool_names(rest.pop("tools", None), location)
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


def _pop_column(row: dict[str, Any], original: dict[str, Any], key: str, location: str, option: str) -> Any:
    """Remove and return a column's value. whole: the original row."""
    for name in (key, _ALIASES.get(key)):
        if name is not None and row.get(name) is not None:
            return row.pop(name)
    empty = f"; the column {key!r} is empty here" if key in row else ""
    none = ' (or to "" if there is no ground truth)' if option == "data.label_key" else ""
    columns = f"columns here: {list_columns(original)}"
    raise ConfigError(f"{location}: no {key!r}{empty}; {columns}; set {option} to the right one{none}")
