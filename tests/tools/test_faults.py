"""The fault matrix without runs: rows, injection points, run readers and the table."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

from faults import damage, dying, judging, recorded_answers, results, rows, saving, soaking  # noqa: E402
from faults.job import checkpoints, read_run_metrics, same_weights, shortened  # noqa: E402
from faults.points import INSTALL, Moment, Point, save_stage  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

from megarl.observe.rollout_log import read_rollouts  # noqa: E402

pytestmark = pytest.mark.alone


def test_each_of_thirty_rows_has_a_scenario() -> None:
    assert list(rows.ROWS) == list(range(1, 31))
    for row in rows.ROWS.values():
        assert (ROOT / "tools" / "faults" / f"{row.scenario}.py").is_file()
        assert row.injected and row.expected


def test_selects_rows_by_numbers_and_ranges() -> None:
    assert rows.parse_rows("1,8-11, 4") == [1, 4, 8, 9, 10, 11]
    for invalid in ("0", "31", "5-3", "x", "", "1-40"):
        with pytest.raises(ValueError):
            rows.parse_rows(invalid)
    assert rows.by_scenario([1, 2, 8, 3, 14]) == {"dying": [1, 2, 3], "saving": [8, 14]}


def test_row_passes_if_all_findings_pass() -> None:
    findings = results.Findings()
    assert findings.add(True, "it ended", "it did not end")
    assert findings.result(1.5, lost=0) == results.RowResult(True, "it ended", 1.5, None, 0)
    assert not findings.add(False, "it is named", "nobody is named")
    assert not findings.add(False, "the rest is there")
    assert findings.result() == results.RowResult(False, "it ended; nobody is named; NOT: the rest is there")


def test_table_and_json_agree() -> None:
    result = {2: results.RowResult(False, "it hung", 3.25), 1: results.RowResult(True, "all well", 0.5, 12.0, 0)}
    console = Console(width=160, record=True, file=open("/dev/null", "w"))
    console.print(results.table(result))
    lines = [line.split() for line in console.export_text().splitlines() if line.strip()]
    first, second = (next(line for line in lines if line[0] == number) for number in "12")
    assert first[-4:] == ["yes", "0.5", "12.0", "0"] and second[-2:] == ["NO", "3.2"]
    assert results.total(result) == "1 of 2 rows are as expected"
    tree = json.loads(json.dumps(results.as_json(result)))
    assert (tree["ok"], tree["of"], list(tree["rows"])) == (1, 2, ["1", "2"])
    assert tree["rows"]["2"]["text"] == "it hung"
    assert tree["rows"]["1"]["expected"] == rows.ROWS[1].expected


@pytest.mark.parametrize(
    ("event", "path", "opened", "stage"),
    [
        ("open", "/r/checkpoints/step_000002.tmp/actor/__0_0.distcp", 1, "tmp"),
        ("open", "/r/checkpoints/step_000002.tmp/rng_00000.pt", 2, "data"),
        ("open", "/r/checkpoints/step_000002.tmp/host.json", 5, ""),
        ("open", "/r/checkpoints/step_000002.tmp/manifest.json", 6, "manifest"),
        ("os.rename", "/r/checkpoints/step_000002.tmp", 6, "rename"),
        ("os.rename", "/r/checkpoints/step_000001", 6, ""),
        ("open", "/r/checkpoints/latest.tmp", 6, "latest"),
        ("open", "/r/metrics.jsonl", 6, ""),
        ("open", "/r/checkpoints/step_000003.tmp/manifest.json", 6, ""),
    ],
)
def test_detects_stages_of_a_checkpoint(event: str, path: str, opened: int, stage: str) -> None:
    assert save_stage(event, path, "step_000002", opened) == stage


def test_injection_point_blocks_until_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    fault_point, other_rank = (Moment(Point("there", "forward", 3, rank=rank), tmp_path) for rank in (1, 0))
    assert fault_point.is_on_rank and not other_rank.is_on_rank
    waiting = threading.Thread(target=fault_point.reach)
    waiting.start()
    while not fault_point.file.exists():
        pass
    fault_point.file.with_suffix(".go").touch()
    waiting.join(10)
    assert not waiting.is_alive() and not fault_point.mark()
    state = json.loads(fault_point.file.read_text())
    assert state["pid"] > 0 and state["beside"] is True
    kinds = {"forward", "all_reduce", "weight_sync", "wire", "gradient", "logprobs", "save"}
    assert {point.partition(":")[0] for point in INSTALL} == kinds


def test_reads_what_a_run_wrote(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 5.0}\n{"step": 2, "ti')
    assert read_run_metrics(tmp_path) == [{"step": 1, "time": 5.0}] and read_run_metrics(tmp_path / "none") == []
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    assert checkpoints(tmp_path) == ["step_000001"] and checkpoints(tmp_path / "none") == []
    log = "x resumed from /a/checkpoints/step_000003 after step 3\ny resumed from /a/checkpoints/step_000012 after"
    assert saving.resumed_from(log) == [3, 12]
    assert shortened("a  b\nc") == "a b c" and shortened("x" * 9, 6) == "xxx..."
    for name, value in (("one", 1.0), ("same", 1.0), ("other", 1.0 + 2**-23)):
        (tmp_path / name / "export").mkdir(parents=True)
        save_file({"w": np.array([value], np.float32)}, tmp_path / name / "export" / "model.safetensors")
    first_run, equal_run, different_run = (tmp_path / name for name in ("one", "same", "other"))
    assert (
        same_weights(first_run, equal_run)
        and not same_weights(first_run, different_run)
        and not same_weights(first_run, tmp_path / "none")
    )


def test_damage_changes_one_file_as_described(tmp_path: Path) -> None:
    for work, after in (
        (damage.truncate, 50),
        (damage.flip_a_bit, 100),
        (damage.remove_shard, None),
        (damage.remove_metadata, 100),
    ):
        folder = tmp_path / work.__name__
        (folder / "actor").mkdir(parents=True)
        largest_file = folder / "actor" / "__0_1.distcp"
        largest_file.write_bytes(bytes(100))
        (folder / "actor" / "__0_0.distcp").write_bytes(bytes(10))
        (folder / "actor" / ".metadata").write_bytes(b"x")
        damaged = work(folder)
        assert damaged == (folder / "actor" / ".metadata" if work is damage.remove_metadata else largest_file)
        assert (largest_file.stat().st_size if largest_file.exists() else None) == after
        if work is damage.flip_a_bit:
            assert sum(byte.bit_count() for byte in largest_file.read_bytes()) == 1


@pytest.fixture
def tokenizer_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "rollout"))
    import tiny_models

    tiny_models.tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_recorded_rollouts_have_the_requested_responses(tmp_path: Path, tokenizer_folder: Path) -> None:
    record = recorded_answers.record(tmp_path / "run", tokenizer_folder, (1, 2), 3, 2, ranks=2)
    for step in (1, 2):
        result = read_rollouts(record, step)
        assert [rollout.group for rollout in result] == [0, 0, 1, 1, 2, 2]
        assert [rollout.answer for rollout in result] == [recorded_answers.wordy(step, n // 2, n % 2) for n in range(6)]
        assert all(rollout.num_actions == len(rollout.turns[1].logprobs) > 0 for rollout in result)
        parts = [read_rollouts(record, step, rank, 2) for rank in (0, 1)]
        assert [len(part) for part in parts] == [3, 3]
    assert {recorded_answers.even(rollout) for rollout in result} <= {0.0, 1.0}


def test_response_requests_the_fault_in_brackets() -> None:
    assert judging.requested_fault("1 2 [hang]") == "hang" and judging.requested_fault("1 2") == ""


def test_recognizes_a_named_straggler() -> None:
    assert dying._names_straggler("step 3: rank 1 is 9.5 times slower than the others")
    assert not dying._names_straggler("rank 1 (actor) was killed") and not dying._names_straggler("rank 12 is slow")


def test_soak_metrics_match_hand_computed_values() -> None:
    assert [soaking.percentile([4.0, 1.0, 3.0, 2.0], quantile) for quantile in (50, 90, 99, 25)] == [2.0, 4.0, 4.0, 1.0]
    soak_rows = [
        {"step": 1, "time": 10.0, "time/step": 2.0},
        {"step": 2, "time": 12.0, "time/step": 2.0},
        {"step": 2, "time": 31.0, "time/step": 3.0},
        {"step": 3, "time": 33.0, "time/step": 2.5},
    ]
    assert soaking.effective_seconds(soak_rows) == 2.0 + 3.0 + 2.5
    assert soaking.recovered(soak_rows, 13.0, 2) == 20.0 and soaking.recovered(soak_rows, 13.0, 1) == 18.0
    assert soaking.recovered(soak_rows, 40.0, 3) is None
    kills = [soaking.Kill("rank", 13.0, 2, 20.0), soaking.Kill("launcher", 40.0, 3, None)]
    report = soaking.Report(3, kills, 40.0, 0.19, 0.8, 0, True, 0)
    assert report.ok and report.recoveries == [20.0] and report.percentiles() == {50: 20.0, 90: 20.0, 99: 20.0}
    assert json.loads(json.dumps(report.as_json()))["recovery_percentiles"]["50"] == 20.0
    assert not soaking.Report(3, kills, 40.0, 0.2, 0.8, 0, False, 0).ok
