"""Recorded rollouts come back as they were."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from megarl.config import ConfigError
from megarl.observe import exact_json
from megarl.observe.rollout_log import read_records, read_rollouts, rollout_file, write_rollouts
from megarl.types import Prompt, Rollout, TrainBatch, Turn


def example(group: int = 0) -> Rollout:
    prompt = Prompt(
        id="p1",
        messages=({"role": "user", "content": "Was ist 1/3?\u2028 🚀 \ud800"},),
        token_ids=(1, 2, 3),
        data_source="arithmetic",
        ground_truth=7,
        tools=("calculator",),
        extra={"level": 2, "limit": math.inf},
    )
    third = float(torch.tensor(-1 / 3))  # a float32, as engines report them
    return Rollout(
        prompt=prompt,
        turns=(
            Turn((1, 2, 3)),
            Turn((7, 8), (third, -1e-300), is_action=True, weight_version=4, versions=((3, 1), (4, 1))),
            Turn((4, 5)),
            Turn((9,), (-0.1,), is_action=True, weight_version=5),
        ),
        status="length",
        reward=0.1 + 0.2,
        reward_parts={"exact": 0.1, "format": 0.2},
        seed=2**63 - 1,
        group=group,
        messages=({"role": "user", "content": "x"}, {"role": "assistant", "content": "7", "tool_calls": []}),
        tool_calls=1,
        tool_errors=1,
    )


def test_round_trip_is_exact(tmp_path: Path) -> None:
    rollouts = [example(), example(group=3), Rollout(Prompt(id="empty", messages=()), turns=(Turn((1,)),))]
    rollouts.append(dataclasses.replace(example(), status="aborted", failure="it was late"))
    file = rollout_file(tmp_path, 12)
    write_rollouts(file, rollouts)
    assert file == tmp_path / "rollouts/step_000012.jsonl"
    assert read_rollouts(file) == rollouts
    assert not list(tmp_path.rglob("*.tmp"))


def test_prompt_ids_that_are_not_the_first_turn_are_kept(tmp_path: Path) -> None:
    rollout = Rollout(Prompt(id="a", messages=(), token_ids=(1, 2)), turns=(Turn((1, 2, 3)),))
    write_rollouts(tmp_path / "r.jsonl", [rollout])
    assert read_rollouts(tmp_path / "r.jsonl") == [rollout]


def test_values_that_are_no_numbers_survive_and_the_file_stays_json(tmp_path: Path) -> None:
    rollout = Rollout(
        Prompt(id="n", messages=()),
        turns=(Turn((1,)), Turn((2, 3), (math.nan, -math.inf), is_action=True)),
        reward=math.nan,
    )
    write_rollouts(tmp_path / "r.jsonl", [rollout])
    json.loads((tmp_path / "r.jsonl").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (back,) = read_rollouts(tmp_path / "r.jsonl")
    assert math.isnan(back.reward) and math.isnan(back.turns[1].logprobs[0]) and back.turns[1].logprobs[1] == -math.inf


def test_advantages_and_texts_are_written_by_turn(tmp_path: Path) -> None:
    rollouts = [example(), example()]
    batch = TrainBatch.from_rollouts(rollouts)
    batch = batch.with_(advantages=torch.arange(16, dtype=torch.float32))
    write_rollouts(tmp_path / "r.jsonl", rollouts, batch, decode=lambda ids: "-".join(map(str, ids)))
    first, second = read_records(tmp_path / "r.jsonl")
    assert [turn["text"] for turn in first["turns"]] == ["1-2-3", "7-8", "4-5", "9"]
    assert [turn.get("advantages") for turn in first["turns"]] == [None, [3.0, 4.0], None, [7.0]]
    assert [turn.get("advantages") for turn in second["turns"]] == [None, [11.0, 12.0], None, [15.0]]
    assert first["advantage"] == pytest.approx((3 + 4 + 7) / 3)


def test_arrays_and_objects_that_json_does_not_know_are_written_somehow() -> None:
    line = exact_json.dumps({"a": torch.tensor([1, 2]), "b": torch.tensor(0.5).numpy(), "c": Path("x"), 3: {4}})
    assert exact_json.loads(line) == {"a": [1, 2], "b": 0.5, "c": "x", "3": [4]}


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone.jsonl"):
        read_rollouts(tmp_path / "gone.jsonl")
    (tmp_path / "cut.jsonl").write_text('{"turns": [')
    with pytest.raises(ConfigError, match="cut.jsonl"):
        read_rollouts(tmp_path / "cut.jsonl")
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match="not a recorded rollout"):
        read_rollouts(tmp_path / "other.jsonl")


def test_advantages_stand_beside_the_rollouts_that_were_trained_on(tmp_path: Path) -> None:
    """An aborted one between two others, equal to the first but for that, is on record without an advantage."""
    first, last = example(), example(group=1)
    aborted = dataclasses.replace(first, status="aborted")
    taken = [first, last]
    batch = TrainBatch.from_rollouts(taken)
    batch = batch.with_(advantages=torch.arange(float(len(batch.tokens))))
    write_rollouts(tmp_path / "r.jsonl", [first, aborted, last], batch, trained=taken)
    records = read_records(tmp_path / "r.jsonl")
    assert [record["status"] for record in records] == ["length", "aborted", "length"]
    found = [[turn.get("advantages") for turn in record["turns"]] for record in records]
    assert found[0] == [None, [3.0, 4.0], None, [7.0]]
    assert found[1] == [None] * 4 and records[1]["advantage"] is None
    assert found[2] == [None, [11.0, 12.0], None, [15.0]]
