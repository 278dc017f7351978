"""Files of partial rollouts: written, read, and assigned to another number of engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scripted import PROMPT, begin_rollout

from megarl.checkpoint.manifest import hash_file
from megarl.config import ConfigError
from megarl.rollout.partial_rollouts import assign_groups, read_groups, write_groups
from megarl.rollout.scheduler import Group
from megarl.types import SamplingMask, Turn

pytestmark = pytest.mark.alone


def make_group(number: int, samples: int = 2) -> Group:
    """Return samples in different states that share a prompt with NaN and a lone surrogate in its fields."""
    first = begin_rollout(replace(PROMPT, id=str(number), extra={"nan": float("nan"), "text": "\ud83d"}), seed=number)
    turns = (*first.turns, Turn((5, 6, 7), (-0.1, -1e-7, 0.0), True, 3, ((2, 1), (3, 2))))
    routing = (
        torch.arange(120, dtype=torch.int16).view(10, 4, 3)[2:7],
        torch.full((2, 4, 3), number, dtype=torch.int16),
    )
    support = SamplingMask.from_rows([[5], [6, number]]), SamplingMask.from_rows([[7, 8, 9]])
    running = replace(first, turns=turns, num_turn_tokens=3, num_turns=1, routing=routing, sampling_masks=support)
    completed = replace(running, status="stop", is_turn_complete=True, failure="none")
    return (first, running, completed, *[first] * samples)[:samples]


def groups_equal(actual: list[Group], expected: list[Group]) -> bool:
    """Compare with tensors by value and NaN equal to NaN, unlike `==` of `PartialRollout`."""

    def plain(groups: list[Group]) -> list[list[object]]:
        return [
            [
                (
                    replace(partial, routing=(), sampling_masks=(), prompt=replace(partial.prompt, extra={})),
                    repr(partial.prompt.extra),
                )
                for partial in members
            ]
            for members in groups
        ]

    def records(groups: list[Group]) -> list[torch.Tensor]:
        all_partial = [partial for members in groups for partial in members]
        sets = [
            part for partial in all_partial for record in partial.sampling_masks for part in (record.counts, record.ids)
        ]
        return [part for partial in all_partial for part in partial.routing] + sets

    pairs = list(zip(records(actual), records(expected), strict=True))
    return plain(actual) == plain(expected) and all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def test_reads_what_was_written(tmp_path: Path) -> None:
    groups = [make_group(1, 3), make_group(2, 3), ()]
    file = tmp_path / "partial_groups" / "engine_00000.bin"
    entry = write_groups(file, groups)
    assert entry == hash_file(file)
    result = read_groups(file)
    assert groups_equal(result, groups)
    first, running, _ = result[0]
    assert first.turns[0].token_ids.base is running.turns[0].token_ids.base  # shared in memory, as before
    assert not running.turns[1].token_ids.flags.writeable
    running.routing[0][0] = 1  # routing stays writable
    write_groups(file, [])
    assert read_groups(file) == []


def test_samples_of_a_group_share_the_prompt_in_the_file(tmp_path: Path) -> None:
    long = replace(PROMPT, token_ids=np.zeros(10_000, np.int32))
    item = begin_rollout(long)
    item = replace(item, prompt=long, turns=(Turn(long.token_ids),))
    assert write_groups(tmp_path / "file", [(item,) * 8]).bytes < 60_000


@pytest.mark.parametrize("cut", [1, 200, 10_000])
def test_truncated_file_is_a_config_error(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "file"
    write_groups(file, [make_group(1, 3)])
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(ConfigError, match="file does not hold conversations of this program"):
        read_groups(file)


@pytest.mark.parametrize("engines", [1, 2, 3, 5])
def test_groups_are_assigned_whole_to_another_number_of_engines(tmp_path: Path, engines: int) -> None:
    files, number = [], 0
    for engine, count in enumerate((2, 0, 5)):
        files.append(tmp_path / f"engine_{engine}")
        write_groups(files[-1], [make_group(number + i) for i in range(count)])
        number += count
    assigned = [assign_groups(files, engine, engines) for engine in range(engines)]
    seeds = [[partial[0].seed for partial in engine_groups] for engine_groups in assigned]
    assert sorted(sum(seeds, [])) == list(range(7)) and all(
        len(partial) == 2 for engine_groups in assigned for partial in engine_groups
    )
    if engines == 3:
        assert seeds == [[0, 1], [], [2, 3, 4, 5, 6]]
    else:
        assert max(map(len, seeds)) - min(map(len, seeds)) <= 1
