"""What engines go on with, written down, read back and dealt out anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scripted import PROMPT, begun

from megarl.checkpoint.manifest import hash_file
from megarl.config import ConfigError
from megarl.rollout.partial_rollouts import assign_groups, read_groups, write_groups
from megarl.rollout.scheduler import Group
from megarl.types import SamplingMask, Turn

pytestmark = pytest.mark.alone


def group(number: int, samples: int = 2) -> Group:
    """Of a prompt with odd things in it; the samples share it, and are in different states."""
    first = begun(replace(PROMPT, id=str(number), extra={"nan": float("nan"), "text": "\ud83d"}), seed=number)
    turns = (*first.turns, Turn((5, 6, 7), (-0.1, -1e-7, 0.0), True, 3, ((2, 1), (3, 2))))
    routing = (
        torch.arange(120, dtype=torch.int16).view(10, 4, 3)[2:7],
        torch.full((2, 4, 3), number, dtype=torch.int16),
    )
    support = SamplingMask.from_rows([[5], [6, number]]), SamplingMask.from_rows([[7, 8, 9]])
    further = replace(first, turns=turns, num_turn_tokens=3, num_turns=1, routing=routing, sampling_masks=support)
    ended = replace(further, status="stop", is_turn_complete=True, failure="none")
    return (first, further, ended, *[first] * samples)[:samples]


def same(item: list[Group], other: list[Group]) -> bool:
    """`PartialRollout` compares all but records by what is in it, and NaN is not NaN."""

    def plain(groups: list[Group]) -> list[list[object]]:
        return [
            [
                (
                    replace(each, routing=(), sampling_masks=(), prompt=replace(each.prompt, extra={})),
                    repr(each.prompt.extra),
                )
                for each in group
            ]
            for group in groups
        ]

    def records(groups: list[Group]) -> list[torch.Tensor]:
        every = [each for group in groups for each in group]
        sets = [part for each in every for record in each.sampling_masks for part in (record.counts, record.ids)]
        return [part for each in every for part in each.routing] + sets

    pairs = list(zip(records(item), records(other), strict=True))
    return plain(item) == plain(other) and all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    groups = [group(1, 3), group(2, 3), ()]
    file = tmp_path / "partial_groups" / "engine_00000.bin"
    entry = write_groups(file, groups)
    assert entry == hash_file(file)
    result = read_groups(file)
    assert same(result, groups)
    first, further, _ = result[0]
    assert first.turns[0].token_ids.base is further.turns[0].token_ids.base  # once in memory, as it was
    assert not further.turns[1].token_ids.flags.writeable
    further.routing[0][0] = 1  # and this can be written to
    write_groups(file, [])
    assert read_groups(file) == []


def test_a_prompts_tokens_are_written_once(tmp_path: Path) -> None:
    long = replace(PROMPT, token_ids=np.zeros(10_000, np.int32))
    item = begun(long)
    item = replace(item, prompt=long, turns=(Turn(long.token_ids),))
    assert write_groups(tmp_path / "file", [(item,) * 8]).bytes < 60_000


@pytest.mark.parametrize("cut", [1, 200, 10_000])
def test_a_file_that_is_not_whole_is_one_line(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "file"
    write_groups(file, [group(1, 3)])
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(ConfigError, match="file does not hold conversations of this program"):
        read_groups(file)


@pytest.mark.parametrize("engines", [1, 2, 3, 5])
def test_groups_are_dealt_out_whole_to_another_number_of_engines(tmp_path: Path, engines: int) -> None:
    files, number = [], 0
    for engine, count in enumerate((2, 0, 5)):
        files.append(tmp_path / f"engine_{engine}")
        write_groups(files[-1], [group(number + i) for i in range(count)])
        number += count
    shares = [assign_groups(files, engine, engines) for engine in range(engines)]
    seeds = [[each[0].seed for each in share] for share in shares]
    assert sorted(sum(seeds, [])) == list(range(7)) and all(len(each) == 2 for share in shares for each in share)
    if engines == 3:
        assert seeds == [[0, 1], [], [2, 3, 4, 5, 6]]
    else:
        assert max(map(len, seeds)) - min(map(len, seeds)) <= 1
