"""Rollouts of earlier steps, each on the rank that made it: what algorithms that use samples again draw from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from megarl.checkpoint.manifest import Entry, Write, hash_file, sync, write_nothing
from megarl.config import ConfigError
from megarl.observe.rollout_log import part_file, read_records, step_folder, write_part
from megarl.types import Everyone, Rollouts

FOLDER = "buffer"
"""In a checkpoint: files as those of recorded rollouts, one of each rank that has some."""


class Buffer:
    """The newest `most` rollouts, an episode being one. All ranks do the same with it. Records of routing are not kept:
    they are heavy, and weights have moved on."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: Rollouts | None = None

    def __len__(self) -> int:
        return 0 if self._kept is None else len(self._kept.episodes)

    def add(self, rollouts: Rollouts) -> None:
        """Collective. The oldest go where there are too many."""
        if not len(rollouts):
            return
        light = rollouts.with_([dataclasses.replace(rollout, routing=None) for rollout in rollouts.here])
        kept = light if self._kept is None else Rollouts.joined([self._kept, light])
        episodes = kept.episodes
        newest = torch.arange(len(episodes)) >= len(episodes) - self.most
        self._kept = kept.select(episodes.each(newest))

    def drawn(self, count: int, draw: torch.Generator) -> Rollouts | None:
        """So many different ones, or all where there are fewer; None where there are none. They stay in it."""
        if self._kept is None or count < 1:
            return None
        episodes = self._kept.episodes
        chosen = torch.zeros(len(episodes), dtype=torch.bool)
        chosen[torch.randperm(len(episodes), generator=draw)[:count]] = True
        return self._kept.select(episodes.each(chosen))

    def save(self) -> Write:
        if self._kept is None or not self._kept.here:
            return write_nothing
        kept = self._kept  # which nobody changes: another takes its place

        def write(folder: Path) -> dict[Path, Entry]:
            file = part_file(folder / FOLDER, 0, kept.everyone.rank)
            numbers = kept.episode[kept.own].tolist()  # other ones in each step, which those of the generations are not
            here = [
                one if one.episode < 0 else dataclasses.replace(one, episode=number)
                for one, number in zip(kept.here, numbers, strict=True)
            ]
            write_part(file, 0, len(kept), kept.own.tolist(), here)
            sync(file)
            return {file: hash_file(file)}

        return write

    def restore(self, folder: Path, everyone: Everyone) -> None:
        """Collective. Raises ConfigError on all ranks where a file is not of this program."""
        if not step_folder(folder / FOLDER, 0).is_dir():
            return
        world, records, error = len(everyone.objects(None)), [], ""
        try:
            records = read_records(folder / FOLDER, 0, everyone.rank, world)
        except ConfigError as failure:
            error = str(failure)
        if errors := [text for text in everyone.objects(error) if text]:
            raise ConfigError(errors[0])
        self._kept = Rollouts.of([one.rollout for one in records], [one.number for one in records], everyone)
