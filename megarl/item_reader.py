"""Data loading for controllers: prompts, conversations and preference pairs, in the form that the run's model takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import Config, ConfigError
from megarl.config.stages import smallest_context
from megarl.data.datasets import (
    Pair,
    TableDataset,
    answer_key,
    conversations_too_long_error,
    read_conversations,
    read_preferences,
    read_prompts,
    render_prompts,
)
from megarl.data.loader import ConcatDataset, Stream, check_has_keys, name_datasets, read_key
from megarl.data.table import Table
from megarl.models.registry import family_of
from megarl.parallel import ranks, row_exchange
from megarl.types import Prompt, Rollout, Rollouts

T = TypeVar("T")


class PromptLimit(NamedTuple):
    """How long prompts of a model besides the first may be."""

    render: Callable[[Prompt], Sequence[int]]
    """Returns the token ids of a prompt."""
    max_tokens: int
    key: str
    """The key that sets the limit."""


class ItemReader:
    """Loads the data of a run for its controller. Each filter that drops items adds a line to `notes`."""

    def __init__(self, config: Config, hf_config: dict[str, Any], chat: ChatTemplate, job: ranks.Job) -> None:
        self.config, self.chat, self.job = config, chat, job
        self.max_positions = int(family_of(hf_config).gpt_kwargs(hf_config)["max_sequence_length"])
        self.notes: list[str] = []

    def load_prompts(
        self,
        files: str | Sequence[str],
        whole: bool = False,
        limits: Sequence[PromptLimit] = (),
    ) -> ConcatDataset[Prompt]:
        """Read and render prompts. Prompts that leave no room for a response are dropped and counted in a note.

        whole: one step takes all prompts; none are dealt out over steps. limits: of models besides the first that
        answer the same prompts.
        """
        data, longest = self.config.data, smallest_context(self.config) - 1
        file_of_id: dict[str, str] = {}

        def load(path: str, name: str, order: str) -> tuple[list[Prompt], np.ndarray | None]:
            prompts = read_prompts(path, data.prompt_key, data.label_key, name=name, order=order)
            for prompt in prompts:
                if (other_path := file_of_id.setdefault(prompt.id, path)) != path:
                    raise ConfigError(
                        f"{path}: the id {prompt.id!r} is already used by a row of {other_path}; rename that file"
                    )
            by_agent = [p.id for p in prompts if p.images and self.chat.catalog.is_run_by_agent(p)]
            if by_agent:
                raise ConfigError(
                    f"{path}, {by_agent[0]}: there are images, but an agent runs this prompt, and the server that "
                    "agents query takes text alone; use tools or an environment"
                )
            fitting, _ = render_prompts(prompts, self.chat.encode_prompt, longest, path=path)
            for limit in limits:
                rendered, _ = render_prompts(fitting, *limit, path=path)
                fitting_ids = {prompt.id for prompt in rendered}
                fitting = [prompt for prompt in fitting if prompt.id in fitting_ids]
            dropped = len(prompts) - len(fitting)
            fitting = [
                replace(prompt, images=self.chat.place_images(prompt.token_ids, prompt.images))
                if prompt.images
                else prompt
                for prompt in fitting
            ]
            if dropped:
                self.notes.append(
                    f"{path}: {dropped} of {len(prompts)} prompts are longer than rollout.max_context and are excluded"
                )
            keys = [read_key(prompt.extra, order, prompt.id) for prompt in fitting] if order else None
            return fitting, None if keys is None else np.array(keys)

        return self._load_files(files, load, whole)

    def load_conversations(self, files: str | Sequence[str]) -> ConcatDataset[Rollout]:
        """Read conversations for SFT. Those longer than the model's positions are dropped and counted in a note."""
        data, longest = self.config.data, self.max_positions

        def load(path: str, name: str, order: str) -> tuple[TableDataset[Rollout], np.ndarray | None]:
            answers = answer_key(self.config)
            columns = data.prompt_key, answers, name, order
            conversations = read_conversations(path, self.chat.tokenizer, None, *columns, self.chat.images)
            lengths = ranks.split_work(len(conversations), lambda index: conversations[index].num_tokens)
            fitting = [index for index, length in enumerate(lengths) if length <= longest]
            dropped = len(conversations) - len(fitting)
            if not fitting:
                raise conversations_too_long_error(path, len(conversations), longest, min(lengths))
            if dropped:
                self.notes.append(
                    f"{path}: {dropped} of {len(conversations)} conversations are longer than the model's {longest} "
                    "positions and are excluded"
                )
            self._note_slow(conversations.rows)
            conversations = conversations.select(fitting)
            return conversations, conversations.keys

        return self._load_files(files, load)

    def load_preferences(self, files: str | Sequence[str]) -> ConcatDataset[Pair]:
        """Read preference pairs. Pairs that exceed a micro-batch or the model are dropped and counted in a note."""
        budget = self.config.train.max_tokens_per_gpu * self.config.parallel.cp
        longest = self.max_positions

        def load(path: str, name: str, order: str) -> tuple[TableDataset[Pair], np.ndarray | None]:
            limits = budget, longest
            pairs, dropped = read_preferences(path, self.chat.tokenizer, *limits, name, order, self.chat.images)
            if dropped:
                self.notes.append(
                    f"{path}: {dropped} of {len(pairs) + dropped} pairs are excluded: together longer than the "
                    f"{budget} of a micro-batch (train.max_tokens_per_gpu), or one beyond the model's {longest} "
                    f"positions"
                )
            self._note_slow(pairs.rows)
            return pairs, pairs.keys

        return self._load_files(files, load)

    def _load_files(
        self,
        files: str | Sequence[str],
        load: Callable[[str, str, str], tuple[Sequence[T], np.ndarray | None]],
        whole: bool = False,
    ) -> ConcatDataset[T]:
        """Load each file with `load(path, name, order)`, which also returns the sort keys of training items."""
        paths, data = (files,) if isinstance(files, str) else tuple(files), self.config.data
        order = data.curriculum_key if paths == data.train else ""
        names = name_datasets(paths)
        loaded = [load(path, name, order) for path, name in zip(paths, names, strict=True)]
        numbers = [keys for _, keys in loaded if keys is not None]
        keys = np.concatenate(numbers) if numbers else None
        check_has_keys(keys, order, paths)
        joined = ConcatDataset(tuple(items for items, _ in loaded), names, keys)
        if whole:
            self.notes.append(f"{len(joined):,} prompts of {', '.join(paths)}")
        elif paths == data.train:
            self.notes.append(self._describe_epochs(joined))
        return joined

    def _describe_epochs(self, joined: ConcatDataset[Any]) -> str:
        """Return a line that says how many passes over its data the run makes."""
        data, steps = self.config.data, self.config.run.num_rollout
        stream = Stream(joined.sizes, data.mixture_weights)
        names = joined.names if data.mixture_weights else ("",)
        counts = stream.count_before(steps * data.prompts_per_step)
        parts = [
            f"{name} {size:,} rows, {_format_passes(count / size)} passes".lstrip()
            for name, size, count in zip(names, stream.sizes, counts, strict=True)
        ]
        return f"data.train: {'; '.join(parts)} in {steps} steps of {data.prompts_per_step}"

    def _note_slow(self, rows: Table) -> None:
        if rows.slow_read_warning:
            self.notes.append(f"warning: {rows.slow_read_warning}")

    def shard(self, conversations: Sequence[Rollout], group_size: int = 1) -> Rollouts:
        """Deal conversations that every rank can read out to the ranks; each rank tokenizes only its share.

        group_size: number of consecutive conversations that stay on the same rank.
        """
        units = range(self.job.rank, -(-len(conversations) // group_size), self.job.world)
        local_indices = [
            i for unit in units for i in range(unit * group_size, min((unit + 1) * group_size, len(conversations)))
        ]
        return Rollouts.gather([conversations[i] for i in local_indices], local_indices, row_exchange.WorldComm())


def _format_passes(passes: float) -> str:
    return f"{passes:.2f}" if passes >= 0.01 else f"{passes:.1g}"
