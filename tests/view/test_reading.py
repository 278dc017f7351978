"""Reading run folders for the viewer, complete or damaged."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import sys
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config import ConfigError
from megarl.observe.rollout_log import part_file
from megarl.view.column_codec import pack, to_json
from megarl.view.divergence import find_divergence
from megarl.view.page import load
from megarl.view.rollout_details import TokenDecoder, load_decoder, read_details, tokenizer_folders
from megarl.view.rollout_files import Notes
from megarl.view.rollout_index import IndexReader
from megarl.view.run_data import read_run

sys.path.append(str(Path(__file__).resolve().parent))

import example_run  # noqa: E402

pytestmark = pytest.mark.alone


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return example_run.write_run(tmp_path / "first")


def test_reads_a_run(run_dir: Path) -> None:
    run = read_run(run_dir)
    assert run.notes == [] and run.algorithm == "grpo" and list(run.metrics) == [1, 2, 3] and not run.is_running
    assert run.has_band_alarms and run.alarms == [(2, "2026-01-01 10:00:00", run.alarms[0][2])]
    assert run.bands["actor/entropy"].upper == 0.6
    assert run.metrics[3]["rollout/reward_mean"] == 0.75


def test_index_has_a_row_per_rollout(run_dir: Path) -> None:
    index = IndexReader(run_dir).read()
    assert index.notes == [] and len(index) == 12
    columns = index.columns
    assert columns["step"].tolist() == [1] * 4 + [2] * 4 + [3] * 4 and columns["number"].tolist() == [0, 1, 2, 3] * 3
    assert columns["reward"].tolist() == [0, 1, 2, 3] * 3 and columns["group"].tolist() == [0, 0, 1, 1] * 3
    assert columns["length"].tolist() == [5] * 12 and columns["actions"].tolist() == [3] * 12
    assert columns["turns"].tolist() == [1] * 12 and columns["staleness"].tolist() == [0] * 12
    assert [index.texts["prompt"][text_index] for text_index in columns["prompt"]] == ["p0", "p0", "p1", "p1"] * 3
    assert columns["advantage"].tolist() == [0.5] * 12


def test_index_picks_up_new_and_rewritten_steps(run_dir: Path) -> None:
    reader = IndexReader(run_dir)
    assert len(reader.read()) == 12
    example_run.write_step(run_dir, 4, [example_run.make_rollout(4, 0, 5.0, name="new")])
    example_run.write_step(run_dir, 2, [example_run.make_rollout(2, 0, 6.0)])
    part_file(run_dir, 2, 1).unlink()
    index = reader.read()
    assert index.columns["step"].tolist() == [1] * 4 + [2] + [3] * 4 + [4] and index.columns["reward"][4] == 6
    assert index.texts["prompt"][index.columns["prompt"][-1]] == "new0"


def test_reads_one_rollout_with_its_tokens(run_dir: Path) -> None:
    (result,) = read_details(run_dir, 3, {2}, TokenDecoder(load_decoder(run_dir)))
    assert result["number"] == 2 and result["token_ids"] == [1, 2, 3, 4, 5]
    assert result["token_texts"] == ["two", "three", "four", example_run.EVIL, "five"]
    assert result["logprobs"] == [0, 0, -0.25, -0.5, -0.75] and result["advantages"] == [0.5] * 5
    turns = result["turns"]
    assert [(turn["num_tokens"], turn["is_action"], turn["weight_version"]) for turn in turns] == [
        (2, False, -1),
        (3, True, 2),
    ]
    assert [turn["cached_tokens"] for turn in turns] == [None, 1]
    assert len(list(read_details(run_dir, 3, None, TokenDecoder(None)))) == 4


@pytest.mark.parametrize(
    "values",
    [
        np.array([], np.int64),
        np.arange(300),
        np.array([-5, 70_000]),
        np.array([0.0, 1.0, 0.3, np.nan]),
        np.random.default_rng(0).random(9000),
        np.array([2**40, 7]),
    ],
)
def test_packed_columns_round_trip(values: np.ndarray) -> None:
    packed = pack(values)
    dtype = {"u8": "<u1", "u16": "<u2", "i32": "<i4", "f32": "<f4"}[packed["dtype"]]
    raw = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), dtype)
    if "dictionary" in packed:
        raw = np.array([np.nan if value is None else value for value in packed["dictionary"]])[raw]
    np.testing.assert_array_equal(raw, values.astype(np.float32) if packed["dtype"] == "f32" else values)


def test_json_escapes_markup() -> None:
    text = to_json({"a": "</script><!-- & \u2028 \ud800"})
    assert not set("<>&\u2028") & set(text) and text.isascii()


def test_decodes_tokens_that_split_utf8() -> None:
    parts = {1: b"\xe2", 2: b"\x82", 3: b"\xac", 4: b"\xff", 5: b"a"}
    decoder = TokenDecoder(lambda ids: b"".join(parts[i] for i in ids).decode(errors="replace"))
    assert decoder.decode_each([1, 2, 3, 4, 5]) == ["", "", "€", "\ufffd", "a"]
    assert decoder.decode_each([9]) == ["[9]"] and TokenDecoder(None).decode_each([7, 8]) == ["7 ", "8 "]


def test_finds_the_tokenizer_relative_to_the_run_folder(run_dir: Path, tmp_path: Path) -> None:
    run = tmp_path / "lab/runs/mine"
    shutil.copytree(run_dir, run)
    (run / "config.yaml").write_text("run: {dir: runs/mine}\nmodel: {path: models/tiny}\n")
    assert load_decoder(run) is None and "tokens are shown as numbers" in load(run).notes[-1]
    shutil.copytree(run_dir.parent / "model", tmp_path / "lab/models/tiny")
    decode = load_decoder(run)
    assert decode is not None and decode([1]) == "two" and load(run).notes == []


def test_finds_the_tokenizer_of_each_policy(run_dir: Path, tmp_path: Path) -> None:
    """The policy c has that of `model.path`."""
    run = tmp_path / "run"
    shutil.copytree(run_dir.parent / "model", run / "export_b")
    roles = "roles: {actor_b: {model: none}}"
    (run / "config.yaml").write_text(f"run: {{dir: x}}\nmodel: {{path: {tmp_path}}}\n{roles}")
    assert tokenizer_folders(run / "policies" / "b") == [run / "export_b"] and tokenizer_folders(run) == []
    (tmp_path / "tokenizer_config.json").touch()
    assert tokenizer_folders(run / "policies" / "c") == [tmp_path]


def test_finds_where_two_runs_diverge(tmp_path: Path, run_dir: Path) -> None:
    first, second = read_run(run_dir), read_run(example_run.write_run(tmp_path / "second", last_response=(3, 5, 5)))
    result = find_divergence(first, second)
    assert result["tokens"] == {"step": 3, "number": 1, "token": 3, "ids": [4, 5]}
    assert result["steps"] == 3 and result["metrics"] is None
    assert find_divergence(first, first)["tokens"] is None
    shorter_run = read_run(example_run.write_run(tmp_path / "third", last_response=(3, 4)))
    assert find_divergence(first, shorter_run)["tokens"] == {"step": 3, "number": 1, "token": 4, "ids": [5, -1]}


def test_empty_folder_yields_notes(tmp_path: Path) -> None:
    run, index = read_run(tmp_path), IndexReader(tmp_path).read()
    assert len(run.notes) == 2 and "config.yaml" in run.notes[0] and "metrics.jsonl" in run.notes[1]
    assert len(index) == 0 and "has no recorded rollouts" in index.notes[0]
    with pytest.raises(ConfigError, match="no run folder"):
        read_run(tmp_path / "none")


def test_damaged_folder_shows_the_rest(run_dir: Path) -> None:
    part_file(run_dir, 1, 0).write_bytes(bytes(range(256)))
    part_file(run_dir, 2, 1).unlink()
    content = part_file(run_dir, 3, 1).read_bytes()
    part_file(run_dir, 3, 1).write_bytes(content[: len(content) // 2])
    (run_dir / "metrics.jsonl").write_bytes(b'{"step": 1, "a": 2.0}\n{"step": \xff\xfe\n[]\n{"step": 2, "a": 3}\n')
    (run_dir / "config.yaml").write_text("guards: {alarms: true}\nnobody: 1\nalgorithm: ppo\n")
    run, index = read_run(run_dir), IndexReader(run_dir).read()
    assert run.metrics == {1: {"a": 2.0}, 2: {"a": 3}} and run.algorithm == "ppo"
    assert "of another version of MegaRL (unknown key nobody)" in run.notes[0] and "line 2 and 1 more" in run.notes[1]
    assert index.columns["step"].tolist() == [1, 1, 2, 2, 3, 3]
    damaged = [note for note in index.notes if "is damaged" in note]
    assert len(damaged) == 2 and any(
        "2 of the 4 rollouts of its step: it is incomplete" in note for note in index.notes
    )
    assert all("\n" not in note for note in (*run.notes, *index.notes))


def test_reads_what_it_can_of_another_format(run_dir: Path) -> None:
    file = part_file(run_dir, 3, 0)
    table = pq.read_table(file).drop_columns(["advantage", "turn_weight_version", "advantages", "data_source"])
    schema_metadata = {**table.schema.metadata, b"megarl.format": b"1"}
    pq.write_table(table.replace_schema_metadata(schema_metadata), file)
    index, notes = IndexReader(run_dir).read(), Notes()
    assert len(index) == 12 and any("files of format 1" in note for note in index.notes)
    (result,) = read_details(run_dir, 3, {0}, TokenDecoder(None), notes)
    assert result["advantages"] is None and result["turns"][1]["weight_version"] is None


def test_reads_recorded_trainer_logprobs(run_dir: Path) -> None:
    file = part_file(run_dir, 3, 0)
    table = pq.read_table(file)
    if "trainer_logprobs" in table.column_names:
        table = table.drop_columns(["trainer_logprobs"])
    values = pa.array([[0, 0, -0.5, -1, -1.5], None], pa.list_(pa.float32()))
    pq.write_table(table.append_column("trainer_logprobs", values), file)
    result = list(read_details(run_dir, 3, {0, 2}, TokenDecoder(None)))
    assert [item["trainer_logprobs"] for item in result] == [[0, 0, -0.5, -1, -1.5], None]
    assert result[0]["unreplayed_logprobs"] is None


def test_skips_an_inconsistent_row(run_dir: Path) -> None:
    file = part_file(run_dir, 3, 0)
    table = pq.read_table(file)
    column_index = table.schema.get_field_index("messages")
    broken = table.set_column(
        column_index, table.schema.field("messages"), [["{", *table.column("messages").to_pylist()[1:]]]
    )
    pq.write_table(broken, file)
    notes = Notes()
    assert [record["number"] for record in read_details(run_dir, 3, None, TokenDecoder(None), notes)] == [2, 1, 3]
    assert len(notes) == 1 and "rollout 0 is inconsistent" in notes[0]


def test_lock_file_marks_a_running_run(run_dir: Path) -> None:
    (run_dir / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "a')
    run = read_run(run_dir)
    assert run.is_running and run.notes == []
