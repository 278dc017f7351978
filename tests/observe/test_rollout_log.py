"""Recorded rollouts come back as they were, from however many files."""

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
from megarl.types import Branch, Prompt, Rollout, Rollouts, SamplingMask, TrainBatch, Turn
from megarl.utils import exact_json

pytestmark = pytest.mark.alone

NAN = math.nan


def single(value: float) -> float:
    """A float32, as engines report them."""
    return float(np.float32(value))


def example(group: int = 0, **changes: Any) -> Rollout:
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
            Turn((7, 8), (single(-1 / 3), single(-1e-40)), is_action=True, weight_version=4, reward=-0.1),
            Turn((4, 5)),
            Turn((9,), (single(-0.1),), is_action=True, weight_version=5),
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


def written(run_dir: Path, rollouts: Sequence[Rollout], advantages: Any = None, step: int = 12) -> Path:
    """All of a step, by rank 0."""
    file = part_file(run_dir, step, 0)
    write_part(file, step, len(rollouts), range(len(rollouts)), rollouts, advantages)
    return file


def test_round_trip_is_exact(tmp_path: Path) -> None:
    rollouts = [example(), example(group=3), Rollout(Prompt(id="empty", messages=()), turns=(Turn((1,)),))]
    rollouts.append(example(status="aborted", failure="it was late", episode=2**40))
    rollouts += [example(branch=Branch(0, 2, False)), example(episode=1, branch=Branch(3, 2, True))]
    rollouts.append(example(turns=(Turn(()), Turn((), (), is_action=True, weight_version=3), Turn((2**31 - 1,)))))
    file = written(tmp_path, rollouts)
    assert file == tmp_path / "rollouts/step_000012/rank_00000.parquet"
    assert read_rollouts(tmp_path, 12) == rollouts
    assert [path.name for path in file.parent.iterdir()] == ["rank_00000.parquet"]


def test_records_are_read_where_they_are_asked_for(tmp_path: Path) -> None:
    """Experts in a byte or in two, of fewer tokens than there are or of none; what tokens could have been."""
    draw = torch.Generator().manual_seed(1)
    shapes = ((7, 3, 2, torch.uint8, 256), (8, 3, 2, torch.int16, 300), (0, 3, 2, torch.uint8, 1))
    records = [torch.randint(0, most, of, generator=draw).to(kind) for *of, kind, most in shapes]
    support = SamplingMask.from_rows([[7, 1], [8], [9, 2, 3]])
    rollouts = [example(routing=record) for record in records] + [example(sampling_mask=support), example()]
    file = written(tmp_path, rollouts)
    light, full = read_rollouts(tmp_path, 12), read_rollouts(tmp_path, 12, include_trainer_columns=True)
    assert light == full == rollouts  # which are not compared by their records
    assert all(element.routing is None and element.sampling_mask is None for element in light)
    for element, record in zip(full, [*records, None, None], strict=True):
        assert (element.routing is None) == (record is None)
        if record is not None and element.routing is not None:
            assert element.routing.dtype == record.dtype and torch.equal(element.routing, record)
    assert [element.sampling_mask is None for element in full] == [True] * 3 + [False, True]
    result = full[3].sampling_mask
    assert result is not None and result.counts.tolist() == [2, 1, 3] and result.ids.tolist() == [7, 1, 8, 9, 2, 3]
    table = pq.read_table(file, columns=["routing", "routing_shape"], partitioning=None)
    assert table["routing"].null_count == 2 and len(table["routing"][0].as_py()) == 42
    assert table["routing_shape"].to_pylist() == [[7, 3, 2], [8, 3, 2], [0, 3, 2], None, None]


def test_records_can_be_left_out_and_fill_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_log, "ROW_GROUP_TOKENS", 20)
    rollouts = [example(routing=torch.zeros((8, 3, 6), dtype=torch.uint8)) for _ in range(4)]  # 144 bytes, as 12 tokens
    assert pq.ParquetFile(written(tmp_path, rollouts)).num_row_groups == 4
    log = RolloutLog(tmp_path, 0, pytest.fail, save_replay_data=False, vocab_hash="words")
    log.write(1, 4, range(4), rollouts)
    log.close()
    assert [element.routing for element in read_rollouts(tmp_path, 1, include_trainer_columns=True)] == [None] * 4
    assert Part.open(part_file(tmp_path, 1, 0)).read_metadata("vocabulary") == "words"


RECORDS: dict[str, tuple[str, Any, str]] = {
    "routing cut short": ("routing", b"123", "its routing has 3 bytes, for 8 tokens and a shape of [7, 3, 2]"),
    "routing of more tokens": ("routing_shape", [9, 3, 2], "42 bytes, for 8 tokens and a shape of [9, 3, 2]"),
    "routing of no shape": ("routing_shape", None, "42 bytes, for 8 tokens and a shape of None"),
    "fewer tokens that could be": ("support_counts", [2, 4], "of 3 tokens of the policy, 2 have sampling masks of 6"),
    "fewer words": ("support_ids", [1], "of 3 tokens of the policy, 3 have sampling masks of 1 in total"),
    "a negative word": ("support_ids", [7, 1, 8, 9, 2, -3], "of a sampling mask is negative"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records_that_are_none(tmp_path: Path, name: str) -> None:
    column, value, says = RECORDS[name]
    routing = torch.zeros((7, 3, 2), dtype=torch.uint8)
    file = written(
        tmp_path, [example(routing=routing, sampling_mask=SamplingMask.from_rows([[7, 1], [8], [9, 2, 3]]))] * 2
    )
    cell(file, column, value)
    with pytest.raises(ConfigError) as error:
        read_rollouts(tmp_path, 12, include_trainer_columns=True)
    assert str(error.value).startswith(f"{file}, row 1, ") and says in str(error.value)


def test_the_weights_may_change_within_a_turn(tmp_path: Path) -> None:
    turn = Turn((9, 6, 2), (0.0, -1.0, -2.0), is_action=True, weight_version=5, versions=((3, 2), (5, 1)))
    rollouts = [example(), example(turns=(Turn((1,)), turn, Turn((4,)), turn))]
    written(tmp_path, rollouts)
    assert read_rollouts(tmp_path, 12) == rollouts


def test_what_was_cached_is_on_record_and_makes_no_difference(tmp_path: Path) -> None:
    """Which of two equal requests came first is chance: turns are equal all the same."""
    turns = example().turns
    served = (*turns[:3], dataclasses.replace(turns[3], cached_tokens=5))
    written(tmp_path, [example(turns=served), example()])
    result = read_rollouts(tmp_path, 12)
    assert result == [example(), example()]
    assert [[turn.cached_tokens for turn in element.turns] for element in result] == [[-1, -1, -1, 5], [-1] * 4]
    with pytest.raises(ValueError, match="and cached tokens"):
        Turn((1,), cached_tokens=0)


def test_parts_of_several_ranks_and_row_groups_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_log, "ROW_GROUP_TOKENS", 20)  # three rollouts of eight tokens
    rollouts = [example(group=number, seed=number) for number in range(11)]
    for rank, numbers in ((0, [0, 10]), (3, [7, 1, 2, 3, 9]), (12, [4, 5, 6, 8])):
        local = [np.full(8, number, np.float32) for number in numbers]
        assert not is_complete(tmp_path, 2)
        write_part(part_file(tmp_path, 2, rank), 2, 11, numbers, [rollouts[number] for number in numbers], local)
    assert pq.ParquetFile(part_file(tmp_path, 2, 3)).num_row_groups == 2
    assert is_complete(tmp_path, 2) and read_rollouts(tmp_path, 2) == rollouts
    assert [(record.number, record.advantage) for record in read_records(tmp_path, 2)] == [(i, i) for i in range(11)]
    # Each rank of as many as there were, and of fewer, by number of the rank that wrote them.
    had = [[rollout.seed for rollout in read_rollouts(tmp_path, 2, rank, 13)] for rank in (0, 1, 3, 12)]
    assert had == [[0, 10], [], [1, 2, 3, 7, 9], [4, 5, 6, 8]]
    had = [[rollout.seed for rollout in read_rollouts(tmp_path, 2, rank, 2)] for rank in range(2)]
    assert had == [[0, 4, 5, 6, 8, 10], [1, 2, 3, 7, 9]]


def test_prompt_ids_that_are_not_the_first_turn_are_kept(tmp_path: Path) -> None:
    rollouts = [Rollout(Prompt("a", (), ids), turns=(Turn((1, 2, 3)),)) for ids in ((1, 2), (), (1, 2, 3))]
    written(tmp_path, rollouts)
    assert read_rollouts(tmp_path, 12) == rollouts


def test_values_that_are_no_numbers_survive(tmp_path: Path) -> None:
    turns = (Turn((1,)), Turn((2, 3), (NAN, -math.inf), is_action=True))
    written(tmp_path, [Rollout(Prompt("n", (), extra={"x": NAN}), turns, reward=NAN, reward_parts={"a": NAN})])
    (back,) = read_rollouts(tmp_path, 12)
    assert math.isnan(back.reward) and math.isnan(back.turns[1].logprobs[0]) and back.turns[1].logprobs[1] == -math.inf
    assert math.isnan(back.reward_parts["a"]) and math.isnan(back.prompt.extra["x"])


def test_half_a_letter_in_a_plain_text_is_written_in_words(tmp_path: Path) -> None:
    written(tmp_path, [example(status="aborted", failure="no file \udcff")])
    assert read_rollouts(tmp_path, 12)[0].failure == "no file \\udcff"


def test_pandas_reads_a_step_as_a_table(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_part(part_file(tmp_path, 1, rank), 1, 2, [rank], [example(rank)], [np.arange(8, dtype=np.float32)])
    (tmp_path / "rollouts/step_000001/.rank_00002.parquet").write_text("under way")
    table = pandas.read_parquet(tmp_path / "rollouts/step_000001")
    assert table.group.tolist() == [0, 1] and table.reward.tolist() == [0.1 + 0.2] * 2
    assert table.advantage.tolist() == [pytest.approx((3 + 4 + 7) / 3)] * 2
    assert table.logprob[0] == pytest.approx(-(1 / 3 + 0.1) / 3)
    first = table.iloc[0]
    assert first.token_ids.tolist() == [1, 2, 3, 7, 8, 4, 5, 9] and first.turn_lengths.tolist() == [3, 2, 2, 1]
    assert first.logprobs.tolist() == [0, 0, 0, single(-1 / 3), single(-1e-40), 0, 0, single(-0.1)]
    assert first.turn_is_action.tolist() == [False, True, False, True]
    assert first.turn_weight_version.tolist() == [-1, 4, -1, 5]
    assert json.loads(first.messages)[1]["content"] == "7" and json.loads(first.ground_truth) == 7
    assert (table.token_ids[0].dtype, table.logprobs[0].dtype) == (np.int32, np.float32)


def test_advantages_stand_beside_the_rollouts_that_were_trained_on(tmp_path: Path) -> None:
    """An aborted one between two others, equal to the first but for that, is on record without an advantage."""
    first, last = example(), example(group=1)
    aborted = dataclasses.replace(first, status="aborted")
    batch = TrainBatch.from_rollouts([first, last])
    batch = batch.with_(advantages=torch.arange(16, dtype=torch.float32))
    rollouts = [first, aborted, last]
    every, trained = Rollouts.gather(rollouts), Rollouts.gather([first, last])
    written(tmp_path, rollouts, split_batch(batch, trained, every)[0])
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
    assert split_batch(batch.with_(advantages=None), trained, every)[0] == [None] * 3


def test_what_the_trainer_says_stands_beside_what_the_engine_said(tmp_path: Path) -> None:
    """Of the tokens that the policy wrote, of the rollouts that were trained on, where the trainer has looked."""
    first, last = example(), example(group=1)
    aborted = dataclasses.replace(first, status="aborted")
    rollouts, trained = Rollouts.gather([first, aborted, last]), Rollouts.gather([first, last])
    batch = TrainBatch.from_rollouts([first, last])
    assert split_batch(batch, trained, rollouts)[1] == [None] * 3
    batch = batch.with_(trainer_logprobs=-torch.arange(1.0, 17))
    _, says = split_batch(batch, trained, rollouts)
    assert says[0] is not None and says[0].unreplayed is None
    _, says = split_batch(batch.with_(unreplayed_logprobs=-torch.arange(16.0)), trained, rollouts)
    write_part(part_file(tmp_path, 12, 0), 12, 3, range(3), rollouts.local, None, "", says)
    result = [record.trainer_logprobs for record in read_records(tmp_path, 12)]
    assert result[0] is not None and result[1] is None and result[2] is not None
    assert result[0].logprobs.tolist() == [0, 0, 0, -4, -5, 0, 0, -8]
    assert result[2].unreplayed is not None and result[2].unreplayed.tolist() == [0, 0, 0, -11, -12, 0, 0, -15]
    short = [TrainerLogprobs(np.zeros(7, np.float32)), None, None]
    with pytest.raises(ValueError, match="7 log-probs for a rollout of 8 tokens"):
        write_part(part_file(tmp_path, 13, 0), 13, 3, range(3), rollouts.local, None, "", short)


def test_files_of_earlier_formats_are_read_without_what_came_later(tmp_path: Path) -> None:
    rollouts = [example(branch=Branch(1, 1, True), sampling_mask=SamplingMask.from_rows([[7], [8], [9]])), example()]
    file = written(tmp_path, rollouts)
    table, about = pq.read_table(file, partitioning=None), pq.read_schema(file).metadata
    for format in (5, 4, 3):
        table = table.drop_columns(list(COLUMNS_SINCE_FORMAT[format + 1]))
        pq.write_table(
            table.replace_schema_metadata({**about, b"megarl.format": str(format).encode()}), file, compression="zstd"
        )
        result = read_rollouts(tmp_path, 12, include_trainer_columns=True)
        known = [element if format > 4 else dataclasses.replace(element, branch=None) for element in rollouts]
        assert result == known and is_complete(tmp_path, 12)
        assert {turn.cached_tokens for element in result for turn in element.turns} == {-1}
        assert [element.sampling_mask is None for element in result] == [format < 4, True]


def test_arrays_and_objects_that_json_does_not_know_are_written_somehow() -> None:
    line = exact_json.dumps({"a": torch.tensor([1, 2]), "b": torch.tensor(0.5).numpy(), "c": Path("x"), 3: {4}})
    assert exact_json.loads(line) == {"a": [1, 2], "b": 0.5, "c": "x", "3": [4]}


# --- in the background ----------------------------------------------------------------------------------------


def test_a_step_is_written_while_the_next_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, begun = threading.Event(), threading.Event()
    threads = set()

    def slowly(file: Path, *argument: Any) -> None:
        threads.add(threading.current_thread())
        begun.set()
        assert goes_on.wait(60)
        write_part(file, *argument)

    monkeypatch.setattr(rollout_log, "write_part", slowly)
    log = RolloutLog(tmp_path, 5, pytest.fail)
    log.write(1, 2, [0, 1], [example(), example(1)])
    assert begun.wait(60) and recorded_steps(tmp_path) == []
    second = threading.Thread(target=log.write, args=(2, 1, [0], [example()]))
    second.start()
    second.join(0.2)
    assert second.is_alive()  # it waits: one step is held beside the one at work, and no more
    goes_on.set()
    second.join(60)
    assert part_file(tmp_path, 1, 5).is_file()
    log.write(3, 1, [], [])  # a rank that has none of a step
    log.close()
    assert read_rollouts(tmp_path, 1) == [example(), example(1)] and read_rollouts(tmp_path, 2) == [example()]
    assert recorded_steps(tmp_path) == [1, 2]
    assert len(threads) == 1 and threading.main_thread() not in threads


def test_what_cannot_be_written_is_said_once_and_by_the_caller(tmp_path: Path) -> None:
    said: list[tuple[str, threading.Thread]] = []
    log = RolloutLog(tmp_path, 0, lambda text: said.append((text, threading.current_thread())))
    (tmp_path / "rollouts").write_text("in the way")
    for step in (1, 2, 3):
        log.write(step, 1, [0], [example()])
    log.close()
    ((text, thread),) = said
    assert text.startswith("could not record rollouts: ") and text.endswith("; training continues without them")
    assert str(tmp_path / "rollouts") in text and thread is threading.main_thread()


@pytest.mark.parametrize("rollout", [example(seed=2**63), example(tool_calls=2**31)])
def test_values_beyond_their_column_are_not_written_as_others(tmp_path: Path, rollout: Rollout) -> None:
    said: list[str] = []
    log = RolloutLog(tmp_path, 0, said.append)
    log.write(1, 1, [0], [rollout])
    log.close()
    assert len(said) == 1 and not list((tmp_path / "rollouts/step_000001").iterdir())


def test_steps_that_are_taken_again_leave_nothing_behind(tmp_path: Path) -> None:
    """A run of three ranks stops after step 3, and one rank goes on from the checkpoint of step 1."""
    for step in (1, 2, 3):
        for rank in range(3):
            write_part(part_file(tmp_path, step, rank), step, 3, [rank], [example(rank)])
    (tmp_path / "rollouts/notes.txt").write_text("mine")
    remove_after(tmp_path, 1)
    assert recorded_steps(tmp_path) == [1] and (tmp_path / "rollouts/notes.txt").exists()
    written(tmp_path, [example()], step=2)
    assert read_rollouts(tmp_path, 2) == [example()]
    remove_after(tmp_path / "nowhere", 0)


# --- what cannot be read --------------------------------------------------------------------------------------


def again(file: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Write a file anew with something changed, of the same schema where that is not what changes."""
    pq.write_table(change(pq.read_table(file, partitioning=None)), file)


def cell(file: Path, name: str, value: Any) -> None:
    """Another value in the second row."""

    def change(table: pa.Table) -> pa.Table:
        values = table.column(name).to_pylist()
        values[1] = value
        field = table.schema.field(name)
        return table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))

    again(file, change)


CELLS: dict[str, tuple[str, Any, str]] = {
    "an unknown end": ("status", "done", "does not end as 'done'"),
    "no turns": ("turn_lengths", [], "disagree on the number"),
    "a policy that begins": ("turn_is_action", [True, True, False, True], "first turn is not a prompt"),
    "fewer tokens than turns": ("token_ids", [1, 2], "turns of 8 tokens with 2 token ids and 8 logprobs"),
    "fewer log-probs": ("logprobs", [1.0] * 7, "8 token ids and 7 logprobs"),
    "more advantages": ("advantages", [1.0] * 9, "9 advantages for a rollout of 8 tokens"),
    "a negative token": ("token_ids", [1, 2, 3, 7, -8, 4, 5, 9], "a token id is negative"),
    "messages that are no JSON": ("messages", "[{", "messages: Expecting"),
    "messages that nest": ("messages", "[" * 100000, "messages: "),
    "messages that are a number": ("messages", "3", "messages is 3, not a list"),
    "a prompt in words": ("prompt_messages", '"hello"', "not a list"),
    "reward parts in a list": ("reward_parts", "[1]", "not a dict"),
    "a reward part in words": ("reward_parts", '{"a": "high"}', "its reward part a is 'high', not a number"),
    "nothing extra": ("extra", "", "extra: Expecting"),
}


@pytest.mark.parametrize("name", CELLS)
def test_rows_that_are_no_rollouts(tmp_path: Path, name: str) -> None:
    column, value, says = CELLS[name]
    file = written(tmp_path, [example(), example(), example()])
    cell(file, column, value)
    with pytest.raises(ConfigError) as error:
        read_rollouts(tmp_path, 12)
    assert str(error.value).startswith(f"{file}, row 1, ") and says in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_steps_and_parts_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no rollouts of step 1: .*rank_\*.parquet in .*step_000001"):
        read_rollouts(tmp_path, 1)
    write_part(part_file(tmp_path, 1, 1), 1, 4, [1, 2], [example(), example()])
    with pytest.raises(ConfigError, match="2 of the 4 rollouts of its step, rollout 0 is missing"):
        read_rollouts(tmp_path, 1)
    write_part(part_file(tmp_path, 1, 2), 1, 4, [2, 3], [example(), example()])
    with pytest.raises(ConfigError, match="has rollout 2 twice: its files are from two runs"):
        read_rollouts(tmp_path, 1)
    write_part(part_file(tmp_path, 1, 2), 1, 5, [3], [example()])
    with pytest.raises(ConfigError, match="of 4 and of 5 rollouts: from two runs"):
        read_rollouts(tmp_path, 1)
    write_part(part_file(tmp_path, 1, 2), 1, 4, [0, 3, 4], [example()] * 3)
    with pytest.raises(ConfigError, match="has a rollout 4, but its step has 4"):
        read_rollouts(tmp_path, 1)


def test_files_that_are_damaged_or_others(tmp_path: Path) -> None:
    file = written(tmp_path, [example(messages=({"role": "user", "content": "x" * 50},))] * 2)
    full = file.read_bytes()

    def says(content: bytes | Callable[[pa.Table], pa.Table], *parts: str) -> None:
        file.write_bytes(content if isinstance(content, bytes) else full)
        if not isinstance(content, bytes):
            again(file, content)
        with pytest.raises(ConfigError) as error:
            read_rollouts(tmp_path, 12)
        for part in (str(file), *parts):
            assert part in str(error.value)
        assert "\n" not in str(error.value)

    damaged = "is not a file of recorded rollouts, or is damaged: "
    for content in (b"", b"{}", bytes(4096), full[:-40], full[: len(full) // 2], full[-400:]):
        says(content, damaged)
    file.write_bytes(full)
    about, group = pq.read_schema(file).metadata, pq.ParquetFile(file).metadata.row_group(0)
    for name in ("token_ids.list.element", "messages"):
        (column,) = (result for result in map(group.column, range(group.num_columns)) if result.path_in_schema == name)
        last = column.data_page_offset + column.total_compressed_size - 1  # of its only page
        says(full[:last] + bytes([full[last] ^ 1]) + full[last + 1 :], damaged)
    says(lambda table: table.replace_schema_metadata(None), "no megarl.format")
    says(
        lambda table: table.replace_schema_metadata({**about, b"megarl.format": b"7"}),
        "format 7",
        "formats 3 to 6",
    )
    says(lambda table: table.replace_schema_metadata({**about, b"megarl.step": b"3"}), "is of step 3")
    says(lambda table: table.replace_schema_metadata({**about, b"megarl.total": b"-1"}), "no megarl.total")
    says(lambda table: table.drop_columns("seed"), "has no column 'seed'")
    says(
        lambda table: table.set_column(SCHEMA.names.index("reward"), "reward", pa.array(["high", "low"])),
        "its column 'reward' is of string, not of double",
    )
    cast = [item.with_nullable(True) for item in SCHEMA]
    says(lambda table: table.cast(pa.schema(cast, about)), "its column 'number' may be null")
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match=damaged):
        read_rollouts(tmp_path, 12)
