"""Recorded rollouts: exact round trip, background writing, and damaged files."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from megarl.config import ConfigError
from megarl.observe import rollout_log
from megarl.observe.rollout_columns import COLUMNS_SINCE_FORMAT, SCHEMA
from megarl.observe.rollout_log import (
    Part,
    RolloutLog,
    is_complete,
    part_file,
    read_records,
    read_rollouts,
    recorded_steps,
    remove_after,
    write_part,
)
from megarl.observe.rollout_table import TrainerLogprobs
from megarl.observe.run_log import split_batch
from megarl.types import (
    Branch,
    Grid,
    Image,
    Prompt,
    Reward,
    RewardFailure,
    Rollout,
    Rollouts,
    SamplingMask,
    TrainBatch,
    Turn,
)
from megarl.utils import exact_json

pytestmark = pytest.mark.alone

NAN = math.nan


def as_float32(value: float) -> float:
    """Round to float32, as engines report logprobs."""
    return float(np.float32(value))


def make_rollout(group: int = 0, **changes: Any) -> Rollout:
    prompt = Prompt(
        id="p1",
        messages=({"role": "user", "content": "Was ist 1/3?\u2028 🚀 \ud800"},),
        token_ids=(1, 2, 3),
        data_source="arithmetic",
        ground_truth=7,
        tools=("calculator",),
        extra={"level": 2, "limit": math.inf},
    )
    rollout = Rollout(
        prompt=prompt,
        turns=(
            Turn((1, 2, 3)),
            Turn((7, 8), (as_float32(-1 / 3), as_float32(-1e-40)), is_action=True, weight_version=4, reward=-0.1),
            Turn((4, 5)),
            Turn((9,), (as_float32(-0.1),), is_action=True, weight_version=5),
        ),
        status="length",
        reward=0.1 + 0.2,
        reward_parts={"exact": 0.1, "format": 0.2},
        unscored={"judge": "it said\nnothing"},
        seed=2**63 - 1,
        group=group,
        messages=({"role": "user", "content": "x"}, {"role": "assistant", "content": "7", "tool_calls": []}),
        tool_calls=1,
        tool_errors=1,
        drafted=6,
        accepted=2,
    )
    return dataclasses.replace(rollout, **changes)


def write_rollouts(run_dir: Path, rollouts: Sequence[Rollout], advantages: Any = None, step: int = 12) -> Path:
    """Write a whole step as rank 0."""
    file = part_file(run_dir, step, 0)
    write_part(file, step, len(rollouts), range(len(rollouts)), rollouts, advantages)
    return file


def test_round_trip_is_exact(tmp_path: Path) -> None:
    rollouts = [make_rollout(), make_rollout(group=3), Rollout(Prompt(id="empty", messages=()), turns=(Turn((1,)),))]
    rollouts.append(make_rollout(status="aborted", failure="it was late", episode=2**40))
    rollouts += [make_rollout(branch=Branch(0, 2, False)), make_rollout(episode=1, branch=Branch(3, 2, True))]
    rollouts.append(make_rollout(turns=(Turn(()), Turn((), (), is_action=True, weight_version=3), Turn((2**31 - 1,)))))
    file = write_rollouts(tmp_path, rollouts)
    assert file == tmp_path / "rollouts/step_000012/rank_00000.parquet"
    assert read_rollouts(tmp_path, 12) == rollouts
    assert [path.name for path in file.parent.iterdir()] == ["rank_00000.parquet"]


def test_reads_trainer_columns_on_request(tmp_path: Path) -> None:
    """Routing in one or two bytes, for some or no tokens, and sampling masks."""
    draw = torch.Generator().manual_seed(1)
    shapes = ((7, 3, 2, torch.uint8, 256), (8, 3, 2, torch.int16, 300), (0, 3, 2, torch.uint8, 1))
    records = [torch.randint(0, num_experts, shape, generator=draw).to(kind) for *shape, kind, num_experts in shapes]
    mask = SamplingMask.from_rows([[7, 1], [8], [9, 2, 3]])
    rollouts = [make_rollout(routing=record) for record in records] + [make_rollout(sampling_mask=mask), make_rollout()]
    file = write_rollouts(tmp_path, rollouts)
    without_columns = read_rollouts(tmp_path, 12)
    with_columns = read_rollouts(tmp_path, 12, include_trainer_columns=True)
    assert without_columns == with_columns == rollouts  # equality ignores trainer columns
    assert all(element.routing is None and element.sampling_mask is None for element in without_columns)
    for element, record in zip(with_columns, [*records, None, None], strict=True):
        assert (element.routing is None) == (record is None)
        if record is not None and element.routing is not None:
            assert element.routing.dtype == record.dtype and torch.equal(element.routing, record)
    assert [element.sampling_mask is None for element in with_columns] == [True] * 3 + [False, True]
    result = with_columns[3].sampling_mask
    assert result is not None and result.counts.tolist() == [2, 1, 3] and result.ids.tolist() == [7, 1, 8, 9, 2, 3]
    table = pq.read_table(file, columns=["routing", "routing_shape"], partitioning=None)
    assert table["routing"].null_count == 2 and len(table["routing"][0].as_py()) == 42
    assert table["routing_shape"].to_pylist() == [[7, 3, 2], [8, 3, 2], [0, 3, 2], None, None]


def test_trainer_columns_are_optional_and_count_towards_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_log, "ROW_GROUP_TOKENS", 20)
    # The routing of a rollout has 144 bytes, which count as 12 tokens.
    rollouts = [make_rollout(routing=torch.zeros((8, 3, 6), dtype=torch.uint8)) for _ in range(4)]
    assert pq.ParquetFile(write_rollouts(tmp_path, rollouts)).num_row_groups == 4
    log = RolloutLog(tmp_path, 0, pytest.fail, save_replay_data=False, vocab_hash="words")
    log.write(1, 4, range(4), rollouts)
    log.close()
    assert [element.routing for element in read_rollouts(tmp_path, 1, include_trainer_columns=True)] == [None] * 4
    assert Part.open(part_file(tmp_path, 1, 0)).read_metadata("vocabulary") == "words"


def test_reads_rewards_of_environments(tmp_path: Path) -> None:
    verdicts = Reward(0.1, {"tries": 2.0}, (-0.01, 1 / 3)), RewardFailure("the agent: no number"), Reward(0.25), None
    write_rollouts(tmp_path, [make_rollout(env_reward=verdict) for verdict in verdicts])
    assert [rollout.env_reward for rollout in read_rollouts(tmp_path, 12)] == list(verdicts)


def test_reads_sparse_attention_indices_in_two_or_four_bytes(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    kinds = torch.int16, torch.int32
    records = [torch.randint(0, 30000, (5, 3, 2), generator=draw).to(kind) for kind in kinds]
    write_rollouts(tmp_path, [*(make_rollout(sparse_indices=record) for record in records), make_rollout()])
    *result, last = [element.sparse_indices for element in read_rollouts(tmp_path, 12, include_trainer_columns=True)]
    assert last is None
    for element, record in zip(result, records, strict=True):
        assert element is not None and element.dtype == record.dtype and torch.equal(element, record)


def test_records_each_image_of_a_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a prompt, in three row groups, share its image; a tool of the second returns another one."""
    monkeypatch.setattr(rollout_log, "ROW_GROUP_TOKENS", 10)
    shown, drawn = b"\x89PNG" * 200, b"\xff\xd8" * 300
    image = Image(shown, Grid(1, 4, 6), 2, start=1)
    prompt = Prompt("p", (), (1, 2, 3), images=(image,))
    turns = Turn((1, 2, 3), images=(image,)), Turn((7,), (-0.5,), is_action=True)
    tool = Turn((4, 5, 5, 5, 5), images=(Image(drawn, Grid(1, 4, 4), 1, 1), Image(shown, Grid(1, 4, 6), 2, 3)))
    rollouts = [
        Rollout(prompt, turns),
        Rollout(prompt, (*turns, tool, turns[1])),
        make_rollout(),
        Rollout(prompt, turns),
    ]
    file = write_rollouts(tmp_path, rollouts)
    assert pq.ParquetFile(file).num_row_groups == 3
    assert read_rollouts(tmp_path, 12, include_trainer_columns=True) == rollouts
    table = pq.read_table(file, columns=["images", "image_files"], partitioning=None)
    assert table["image_files"].to_pylist() == [[shown], [drawn], None, []]
    assert table["images"].to_pylist()[3] == [-1, 1, 2, 1, 4, 6, 0, 0, 1, 2, 1, 4, 6, 0]
    assert not any(element.images or element.prompt.images for element in read_rollouts(tmp_path, 12))
    set_cell(file, "images", [0, 1, 2, 1, 4, 6, 2])
    with pytest.raises(ConfigError, match=r"row 1, .* its images refer to 2 files by \[0, 1, 2, 1, 4, 6, 2\]"):
        read_rollouts(tmp_path, 12, include_trainer_columns=True)


INVALID_TRAINER_COLUMNS: dict[str, tuple[str, Any, str]] = {
    "routing cut short": ("routing", b"123", "its routing has 3 bytes, for 8 tokens and a shape of [7, 3, 2]"),
    "routing of too many tokens": ("routing_shape", [9, 3, 2], "42 bytes, for 8 tokens and a shape of [9, 3, 2]"),
    "routing without a shape": ("routing_shape", None, "42 bytes, for 8 tokens and a shape of None"),
    "fewer mask entries than counted": (
        "support_counts",
        [2, 4],
        "of 3 tokens of the policy, 2 have sampling masks of 6",
    ),
    "a short sampling mask": ("support_ids", [1], "of 3 tokens of the policy, 3 have sampling masks of 1 in total"),
    "indices of too many tokens": (
        "sparse_shape",
        [9, 1, 2],
        "record of sparse indices has 32 bytes, for 8 tokens",
    ),
    "a negative mask token": ("support_ids", [7, 1, 8, 9, 2, -3], "of a sampling mask is negative"),
}


@pytest.mark.parametrize("name", INVALID_TRAINER_COLUMNS)
def test_rejects_invalid_trainer_columns(tmp_path: Path, name: str) -> None:
    column, value, expected = INVALID_TRAINER_COLUMNS[name]
    routing = torch.zeros((7, 3, 2), dtype=torch.uint8)
    masks = SamplingMask.from_rows([[7, 1], [8], [9, 2, 3]])
    indices = torch.zeros((8, 1, 2), dtype=torch.int16)
    rollout = make_rollout(routing=routing, sampling_mask=masks, sparse_indices=indices)
    file = write_rollouts(tmp_path, [rollout] * 2)
    set_cell(file, column, value)
    with pytest.raises(ConfigError) as error:
        read_rollouts(tmp_path, 12, include_trainer_columns=True)
    assert str(error.value).startswith(f"{file}, row 1, ") and expected in str(error.value)


def test_keeps_weight_versions_within_a_turn(tmp_path: Path) -> None:
    turn = Turn((9, 6, 2), (0.0, -1.0, -2.0), is_action=True, weight_version=5, versions=((3, 2), (5, 1)))
    rollouts = [make_rollout(), make_rollout(turns=(Turn((1,)), turn, Turn((4,)), turn))]
    write_rollouts(tmp_path, rollouts)
    assert read_rollouts(tmp_path, 12) == rollouts


def test_cached_tokens_are_recorded_but_not_compared(tmp_path: Path) -> None:
    """Which of two equal requests hits the cache is chance, so equality ignores it."""
    turns = make_rollout().turns
    with_cache = (*turns[:3], dataclasses.replace(turns[3], cached_tokens=5))
    write_rollouts(tmp_path, [make_rollout(turns=with_cache), make_rollout()])
    result = read_rollouts(tmp_path, 12)
    assert result == [make_rollout(), make_rollout()]
    assert [[turn.cached_tokens for turn in element.turns] for element in result] == [[-1, -1, -1, 5], [-1] * 4]
    with pytest.raises(ValueError, match="and cached tokens"):
        Turn((1,), cached_tokens=0)


def test_merges_parts_of_several_ranks_and_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_log, "ROW_GROUP_TOKENS", 20)  # three rollouts of eight tokens
    rollouts = [make_rollout(group=number, seed=number) for number in range(11)]
    for rank, numbers in ((0, [0, 10]), (3, [7, 1, 2, 3, 9]), (12, [4, 5, 6, 8])):
        advantages = [np.full(8, number, np.float32) for number in numbers]
        assert not is_complete(tmp_path, 2)
        write_part(part_file(tmp_path, 2, rank), 2, 11, numbers, [rollouts[number] for number in numbers], advantages)
    assert pq.ParquetFile(part_file(tmp_path, 2, 3)).num_row_groups == 2
    assert is_complete(tmp_path, 2) and read_rollouts(tmp_path, 2) == rollouts
    assert [(record.number, record.advantage) for record in read_records(tmp_path, 2)] == [(i, i) for i in range(11)]
    # Reading on as many ranks as wrote, then on fewer.
    seeds = [[rollout.seed for rollout in read_rollouts(tmp_path, 2, rank, 13)] for rank in (0, 1, 3, 12)]
    assert seeds == [[0, 10], [], [1, 2, 3, 7, 9], [4, 5, 6, 8]]
    seeds = [[rollout.seed for rollout in read_rollouts(tmp_path, 2, rank, 2)] for rank in range(2)]
    assert seeds == [[0, 4, 5, 6, 8, 10], [1, 2, 3, 7, 9]]


def test_keeps_prompt_ids_that_differ_from_the_first_turn(tmp_path: Path) -> None:
    rollouts = [Rollout(Prompt("a", (), ids), turns=(Turn((1, 2, 3)),)) for ids in ((1, 2), (), (1, 2, 3))]
    write_rollouts(tmp_path, rollouts)
    assert read_rollouts(tmp_path, 12) == rollouts


def test_keeps_nan_and_infinity(tmp_path: Path) -> None:
    turns = (Turn((1,)), Turn((2, 3), (NAN, -math.inf), is_action=True))
    write_rollouts(tmp_path, [Rollout(Prompt("n", (), extra={"x": NAN}), turns, reward=NAN, reward_parts={"a": NAN})])
    (restored,) = read_rollouts(tmp_path, 12)
    assert math.isnan(restored.reward) and math.isnan(restored.turns[1].logprobs[0])
    assert restored.turns[1].logprobs[1] == -math.inf
    assert math.isnan(restored.reward_parts["a"]) and math.isnan(restored.prompt.extra["x"])


def test_lone_surrogates_are_escaped(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [make_rollout(status="aborted", failure="no file \udcff")])
    assert read_rollouts(tmp_path, 12)[0].failure == "no file \\udcff"


def test_pandas_reads_a_step(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_part(part_file(tmp_path, 1, rank), 1, 2, [rank], [make_rollout(rank)], [np.arange(8, dtype=np.float32)])
    (tmp_path / "rollouts/step_000001/.rank_00002.parquet").write_text("under way")
    table = pandas.read_parquet(tmp_path / "rollouts/step_000001")
    assert table.group.tolist() == [0, 1] and table.reward.tolist() == [0.1 + 0.2] * 2
    assert table.advantage.tolist() == [pytest.approx((3 + 4 + 7) / 3)] * 2
    assert table.logprob[0] == pytest.approx(-(1 / 3 + 0.1) / 3)
    first = table.iloc[0]
    assert first.token_ids.tolist() == [1, 2, 3, 7, 8, 4, 5, 9] and first.turn_lengths.tolist() == [3, 2, 2, 1]
    assert first.logprobs.tolist() == [0, 0, 0, as_float32(-1 / 3), as_float32(-1e-40), 0, 0, as_float32(-0.1)]
    assert first.turn_is_action.tolist() == [False, True, False, True]
    assert first.turn_weight_version.tolist() == [-1, 4, -1, 5]
    assert json.loads(first.messages)[1]["content"] == "7" and json.loads(first.ground_truth) == 7
    assert (table.token_ids[0].dtype, table.logprobs[0].dtype) == (np.int32, np.float32)


def test_advantages_belong_to_trained_rollouts_only(tmp_path: Path) -> None:
    """An aborted copy of the first rollout is recorded without advantages."""
    first, last = make_rollout(), make_rollout(group=1)
    aborted = dataclasses.replace(first, status="aborted")
    batch = TrainBatch.from_rollouts([first, last])
    batch = batch.with_(advantages=torch.arange(16, dtype=torch.float32))
    rollouts = [first, aborted, last]
    all_rollouts, trained = Rollouts.gather(rollouts), Rollouts.gather([first, last])
    write_rollouts(tmp_path, rollouts, split_batch(batch, trained, all_rollouts.local)[0])
    records = read_records(tmp_path, 12)
    assert [record.rollout.status for record in records] == ["length", "aborted", "length"]
    assert [None if r.advantages is None else r.advantages.tolist() for r in records] == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        None,
        [8, 9, 10, 11, 12, 13, 14, 15],
    ]
    assert [record.advantage for record in records] == [
        pytest.approx((3 + 4 + 7) / 3),
        None,
        pytest.approx((11 + 12 + 15) / 3),
    ]
    assert split_batch(batch.with_(advantages=None), trained, all_rollouts.local)[0] == [None] * 3


def test_records_trainer_logprobs_of_trained_rollouts(tmp_path: Path) -> None:
    """Only for action tokens of trained rollouts, if the trainer computed them."""
    first, last = make_rollout(), make_rollout(group=1)
    aborted = dataclasses.replace(first, status="aborted")
    rollouts, trained = Rollouts.gather([first, aborted, last]), Rollouts.gather([first, last])
    batch = TrainBatch.from_rollouts([first, last])
    assert split_batch(batch, trained, rollouts.local)[1] == [None] * 3
    batch = batch.with_(trainer_logprobs=-torch.arange(1.0, 17))
    _, trainer = split_batch(batch, trained, rollouts.local)
    assert trainer[0] is not None and trainer[0].unreplayed is None
    _, trainer = split_batch(batch.with_(unreplayed_logprobs=-torch.arange(16.0)), trained, rollouts.local)
    write_part(part_file(tmp_path, 12, 0), 12, 3, range(3), rollouts.local, None, "", trainer)
    result = [record.trainer_logprobs for record in read_records(tmp_path, 12)]
    assert result[0] is not None and result[1] is None and result[2] is not None
    assert result[0].logprobs.tolist() == [0, 0, 0, -4, -5, 0, 0, -8]
    assert result[2].unreplayed is not None and result[2].unreplayed.tolist() == [0, 0, 0, -11, -12, 0, 0, -15]
    short = [TrainerLogprobs(np.zeros(7, np.float32)), None, None]
    with pytest.raises(ValueError, match="7 log-probs for a rollout of 8 tokens"):
        write_part(part_file(tmp_path, 13, 0), 13, 3, range(3), rollouts.local, None, "", short)


def test_reads_files_of_earlier_formats(tmp_path: Path) -> None:
    rollouts = [
        make_rollout(branch=Branch(1, 1, True), sampling_mask=SamplingMask.from_rows([[7], [8], [9]])),
        make_rollout(),
    ]
    file = write_rollouts(tmp_path, rollouts)
    table, schema_metadata = pq.read_table(file, partitioning=None), pq.read_schema(file).metadata
    for format in (6, 5, 4, 3):
        table = table.drop_columns(list(COLUMNS_SINCE_FORMAT[format + 1]))
        pq.write_table(
            table.replace_schema_metadata({**schema_metadata, b"megarl.format": str(format).encode()}),
            file,
            compression="zstd",
        )
        result = read_rollouts(tmp_path, 12, include_trainer_columns=True)
        expected_rollouts = [
            element if format > 4 else dataclasses.replace(element, branch=None) for element in rollouts
        ]
        assert result == expected_rollouts and is_complete(tmp_path, 12)
        assert [record.call for record in read_records(tmp_path, 12)] == [None, None]
        assert {turn.cached_tokens for element in result for turn in element.turns} == {-1}
        assert [element.sampling_mask is None for element in result] == [format < 4, True]


def test_json_converts_arrays_and_unknown_objects() -> None:
    line = exact_json.dumps({"a": torch.tensor([1, 2]), "b": torch.tensor(0.5).numpy(), "c": Path("x"), 3: {4}})
    assert exact_json.loads(line) == {"a": [1, 2], "b": 0.5, "c": "x", "3": [4]}


# --- in the background ----------------------------------------------------------------------------------------


def test_writes_a_step_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_continue, started = threading.Event(), threading.Event()
    threads = set()

    def write_slowly(file: Path, *args: Any) -> None:
        threads.add(threading.current_thread())
        started.set()
        assert may_continue.wait(60)
        write_part(file, *args)

    monkeypatch.setattr(rollout_log, "write_part", write_slowly)
    log = RolloutLog(tmp_path, 5, pytest.fail)
    log.write(1, 2, [0, 1], [make_rollout(), make_rollout(1)])
    assert started.wait(60) and recorded_steps(tmp_path) == []
    second = threading.Thread(target=log.write, args=(2, 1, [0], [make_rollout()]))
    second.start()
    second.join(0.2)
    assert second.is_alive()  # blocked: at most one step is queued behind the one being written
    may_continue.set()
    second.join(60)
    assert part_file(tmp_path, 1, 5).is_file()
    log.write(3, 1, [], [])  # a rank without rollouts in this step
    log.close()
    assert read_rollouts(tmp_path, 1) == [make_rollout(), make_rollout(1)]
    assert read_rollouts(tmp_path, 2) == [make_rollout()]
    assert recorded_steps(tmp_path) == [1, 2]
    assert len(threads) == 1 and threading.main_thread() not in threads


def test_write_failure_is_reported_once_on_the_calling_thread(tmp_path: Path) -> None:
    reported: list[tuple[str, threading.Thread]] = []
    log = RolloutLog(tmp_path, 0, lambda text: reported.append((text, threading.current_thread())))
    (tmp_path / "rollouts").write_text("in the way")
    for step in (1, 2, 3):
        log.write(step, 1, [0], [make_rollout()])
    log.close()
    ((text, thread),) = reported
    assert text.startswith("could not record rollouts: ") and text.endswith("; training continues without them")
    assert str(tmp_path / "rollouts") in text and thread is threading.main_thread()


@pytest.mark.parametrize("rollout", [make_rollout(seed=2**63), make_rollout(tool_calls=2**31)])
def test_out_of_range_values_are_not_written(tmp_path: Path, rollout: Rollout) -> None:
    reported: list[str] = []
    log = RolloutLog(tmp_path, 0, reported.append)
    log.write(1, 1, [0], [rollout])
    log.close()
    assert len(reported) == 1 and not list((tmp_path / "rollouts/step_000001").iterdir())


def test_remove_after_deletes_later_steps(tmp_path: Path) -> None:
    """A run on three ranks stops after step 3 and resumes on one rank from step 1."""
    for step in (1, 2, 3):
        for rank in range(3):
            write_part(part_file(tmp_path, step, rank), step, 3, [rank], [make_rollout(rank)])
    (tmp_path / "rollouts/notes.txt").write_text("mine")
    remove_after(tmp_path, 1)
    assert recorded_steps(tmp_path) == [1] and (tmp_path / "rollouts/notes.txt").exists()
    write_rollouts(tmp_path, [make_rollout()], step=2)
    assert read_rollouts(tmp_path, 2) == [make_rollout()]
    remove_after(tmp_path / "nowhere", 0)


# --- invalid files --------------------------------------------------------------------------------------------


def rewrite(file: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Rewrite a Parquet file with a changed table."""
    pq.write_table(change(pq.read_table(file, partitioning=None)), file)


def set_cell(file: Path, name: str, value: Any) -> None:
    """Replace a value in the second row."""

    def change(table: pa.Table) -> pa.Table:
        values = table.column(name).to_pylist()
        values[1] = value
        field = table.schema.field(name)
        return table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))

    rewrite(file, change)


INVALID_CELLS: dict[str, tuple[str, Any, str]] = {
    "an unknown status": ("status", "done", "does not end as 'done'"),
    "no turns": ("turn_lengths", [], "disagree on the number"),
    "first turn is an action": ("turn_is_action", [True, True, False, True], "first turn is not a prompt"),
    "fewer tokens than turns": ("token_ids", [1, 2], "turns of 8 tokens with 2 token ids and 8 logprobs"),
    "fewer log-probs": ("logprobs", [1.0] * 7, "8 token ids and 7 logprobs"),
    "more advantages": ("advantages", [1.0] * 9, "9 advantages for a rollout of 8 tokens"),
    "a negative token": ("token_ids", [1, 2, 3, 7, -8, 4, 5, 9], "a token id is negative"),
    "messages not JSON": ("messages", "[{", "messages: Expecting"),
    "messages nested too deep": ("messages", "[" * 100000, "messages: "),
    "messages a number": ("messages", "3", "messages is 3, not a list"),
    "prompt messages a string": ("prompt_messages", '"hello"', "not a list"),
    "reward parts in a list": ("reward_parts", "[1]", "not a dict"),
    "a reward part a string": ("reward_parts", '{"a": "high"}', "its reward part a is 'high', not a number"),
    "empty extra": ("extra", "", "extra: Expecting"),
}


@pytest.mark.parametrize("name", INVALID_CELLS)
def test_rejects_invalid_rows(tmp_path: Path, name: str) -> None:
    column, value, expected = INVALID_CELLS[name]
    file = write_rollouts(tmp_path, [make_rollout(), make_rollout(), make_rollout()])
    set_cell(file, column, value)
    with pytest.raises(ConfigError) as error:
        read_rollouts(tmp_path, 12)
    assert str(error.value).startswith(f"{file}, row 1, ") and expected in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_rejects_missing_and_inconsistent_parts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no rollouts of step 1: .*rank_\*.parquet in .*step_000001"):
        read_rollouts(tmp_path, 1)
    write_part(part_file(tmp_path, 1, 1), 1, 4, [1, 2], [make_rollout(), make_rollout()])
    with pytest.raises(ConfigError, match="2 of the 4 rollouts of its step, rollout 0 is missing"):
        read_rollouts(tmp_path, 1)
    write_part(part_file(tmp_path, 1, 2), 1, 4, [2, 3], [make_rollout(), make_rollout()])
    with pytest.raises(ConfigError, match="has rollout 2 twice: its files are from two runs"):
        read_rollouts(tmp_path, 1)
    write_part(part_file(tmp_path, 1, 2), 1, 5, [3], [make_rollout()])
    with pytest.raises(ConfigError, match="of 4 and of 5 rollouts: from two runs"):
        read_rollouts(tmp_path, 1)
    write_part(part_file(tmp_path, 1, 2), 1, 4, [0, 3, 4], [make_rollout()] * 3)
    with pytest.raises(ConfigError, match="has a rollout 4, but its step has 4"):
        read_rollouts(tmp_path, 1)


def test_rejects_damaged_and_foreign_files(tmp_path: Path) -> None:
    file = write_rollouts(tmp_path, [make_rollout(messages=({"role": "user", "content": "x" * 50},))] * 2)
    content = file.read_bytes()

    def assert_rejected(replacement: bytes | Callable[[pa.Table], pa.Table], *parts: str) -> None:
        file.write_bytes(replacement if isinstance(replacement, bytes) else content)
        if not isinstance(replacement, bytes):
            rewrite(file, replacement)
        with pytest.raises(ConfigError) as error:
            read_rollouts(tmp_path, 12)
        for part in (str(file), *parts):
            assert part in str(error.value)
        assert "\n" not in str(error.value)

    damaged = "is not a file of recorded rollouts, or is damaged: "
    for invalid in (b"", b"{}", bytes(4096), content[:-40], content[: len(content) // 2], content[-400:]):
        assert_rejected(invalid, damaged)
    file.write_bytes(content)
    schema_metadata, group = pq.read_schema(file).metadata, pq.ParquetFile(file).metadata.row_group(0)
    for name in ("token_ids.list.element", "messages"):
        (column,) = (result for result in map(group.column, range(group.num_columns)) if result.path_in_schema == name)
        last = column.data_page_offset + column.total_compressed_size - 1  # the last byte of its only page
        assert_rejected(content[:last] + bytes([content[last] ^ 1]) + content[last + 1 :], damaged)
    assert_rejected(lambda table: table.replace_schema_metadata(None), "no megarl.format")
    assert_rejected(
        lambda table: table.replace_schema_metadata({**schema_metadata, b"megarl.format": b"8"}),
        "format 8",
        "formats 3 to 7",
    )
    assert_rejected(
        lambda table: table.replace_schema_metadata({**schema_metadata, b"megarl.step": b"3"}), "is of step 3"
    )
    assert_rejected(
        lambda table: table.replace_schema_metadata({**schema_metadata, b"megarl.total": b"-1"}), "no megarl.total"
    )
    assert_rejected(lambda table: table.drop_columns("seed"), "has no column 'seed'")
    assert_rejected(
        lambda table: table.set_column(SCHEMA.names.index("reward"), "reward", pa.array(["high", "low"])),
        "its column 'reward' is of string, not of double",
    )
    cast = [item.with_nullable(True) for item in SCHEMA]
    assert_rejected(lambda table: table.cast(pa.schema(cast, schema_metadata)), "its column 'number' may be null")
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match=damaged):
        read_rollouts(tmp_path, 12)
