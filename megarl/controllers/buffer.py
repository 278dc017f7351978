"""Rollouts of earlier steps, each on the rank that made it: what algorithms that use samples again draw from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from megarl.checkpoint.manifest import Entry, hash_file
from megarl.config import ConfigError
from megarl.observe.rollout_log import part_file, read_records, step_folder, write_part
from megarl.types import Everyone, Rollouts

FOLDER = "buffer"
"""In a checkpoint: files as those of recorded rollouts, one of each rank that has some."""


class Buffer:
    """The newest `most` rollouts. All ranks do the same with it. Records of routing are not kept: they are heavy, and
    weights have moved on."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: Rollouts | None = None

    def __len__(self) -> int:
        return 0 if self._kept is None else len(self._kept)

    def add(self, rollouts: Rollouts) -> None:
        """Collective. The oldest go where there are too many."""
        if not len(rollouts):
            return
        light = rollouts.with_([dataclasses.replace(rollout, routing=None) for rollout in rollouts.here])
        kept = light if self._kept is None else Rollouts.joined([self._kept, light])
        newest = torch.arange(len(kept)) >= len(kept) - self.most
        self._kept = kept.select(newest)

    def drawn(self, count: int, draw: torch.Generator) -> Rollouts | None:
        """So many different ones, or all where there are fewer; None where there are none. They stay in it."""
        if self._kept is None or count < 1:
            return None
        chosen = torch.zeros(len(self._kept), dtype=torch.bool)
        chosen[torch.randperm(len(self._kept), generator=draw)[:count]] = True
        return self._kept.select(chosen)

    def save(self, folder: Path) -> dict[Path, Entry]:
        """Raises OSError."""
        if self._kept is None or not self._kept.here:
            return {}
        everyone = self._kept.everyone
        file = part_file(folder / FOLDER, 0, everyone.rank)
        write_part(file, 0, len(self._kept), self._kept.own.tolist(), self._kept.here)
        return {file: hash_file(file)}

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
