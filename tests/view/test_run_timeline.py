"""`timeline`: overlaps, shares and chart of spans against hand-computed values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megarl.config import ConfigError
from megarl.observe.clock import DATA, REMOTE, STEP, WAIT, Span, Timeline, timeline_file
from megarl.view import run_timeline

pytestmark = pytest.mark.alone


def main_span(name: str, category: str, begin: float, end: float) -> Span:
    return Span(name, category, "main", begin, end)


def generation(step: int, begin: float, end: float, ranks: Sequence[int] = (2,)) -> Span:
    return Span(f"generation of step {step}", "rollout", "generation", begin, end, ranks)


# seconds        0   1   2   3   4   5   6   7   8   9   10
# rank 0                         AA··AAAA    CCCCCCCC        logprobs, waiting from 4.5 to 5; update
# rank 1                         IIIIIIIIIIIIRRRR::          values; update; :: delivers rows from 8 to 8.5
# rank 2         ················E                           waits for its thread; reward
#   generation     GGGGGGGGGGGG
STEP_1 = {
    0: [
        main_span("critic_values", REMOTE, 6, 6.5),
        main_span("rows", WAIT, 4.5, 5),
        main_span("actor_logprobs", "actor", 4, 6),
        main_span("actor_update", "actor", 7, 9),
    ],
    1: [
        main_span("critic_values", "critic", 4, 7),
        main_span("critic_update", "critic", 7, 8),
        main_span("deliver", DATA, 8, 8.5),
    ],
    2: [main_span("generate", WAIT, 0, 4), generation(1, 0.5, 3.5), main_span("reward", "reward", 4, 4.25)],
}


def write_step(run_dir: Path, step: int, spans: dict[int, list[Span]], begin: float = 0.0) -> None:
    """Write a step of 10 seconds that starts at `begin`; span times are relative to it."""
    for rank, rank_spans in spans.items():
        absolute = [
            span._replace(begin=1e9 + begin + span.begin, end=1e9 + begin + span.end)
            for span in (main_span(f"step {step}", STEP, 0, 10), *rank_spans)
        ]
        Timeline(run_dir, rank, warn=pytest.fail).write(absolute)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_step(tmp_path, 1, STEP_1)
    return tmp_path


def test_overlaps_of_role_pairs(run_dir: Path) -> None:
    result = run_timeline.overlaps(run_timeline.load(run_dir), [1])
    assert result == pytest.approx(
        {
            ("actor", "critic"): 2.5,
            ("actor", "reward"): 0.25,
            ("actor", "rollout"): 0.0,
            ("critic", "reward"): 0.25,
            ("critic", "rollout"): 0.0,
            ("reward", "rollout"): 0.0,
        }
    )


def test_shares_of_each_rank(run_dir: Path) -> None:
    result = run_timeline.shares(run_timeline.load(run_dir), [1])
    assert result[0] == pytest.approx({"work": 0.35, WAIT: 0.05, DATA: 0.0, "controller": 0.6})
    assert result[1] == pytest.approx({"work": 0.4, WAIT: 0.0, DATA: 0.05, "controller": 0.55})
    # Waiting for its own thread counts as work.
    assert result[2] == pytest.approx({"work": 0.325, WAIT: 0.1, DATA: 0.0, "controller": 0.575})


def test_idle_and_controller_time_of_a_step(run_dir: Path) -> None:
    result = run_timeline.cost(run_timeline.load(run_dir), 1)
    # Some rank works from 0.5 to 3.5 and from 4 to 9.
    assert (result.length, result.idle) == pytest.approx((10.0, 2.0))
    assert (result.controller, result.data) == pytest.approx((6.0, 0.5))


def test_generation_of_the_next_step_overlaps_training(run_dir: Path) -> None:
    """A span that starts in step 1 and is written with step 2, where it ends."""
    write_step(
        run_dir, 2, {0: [main_span("actor_update", "actor", 1, 2)], 1: [], 2: [generation(2, -6, 1.5)]}, begin=10
    )
    run = run_timeline.load(run_dir)
    # Actor in step 1 after 4 s: [4, 4.5], [5, 6], [7, 9]; in step 2: [1, 1.5].
    assert run_timeline.overlaps(run, [1])["actor", "rollout"] == pytest.approx(3.5)
    assert run_timeline.overlaps(run, [2])["actor", "rollout"] == pytest.approx(0.5)
    assert run_timeline.overlaps(run, [1, 2])["actor", "rollout"] == pytest.approx(4.0)


def test_engine_work_counts_on_all_of_its_ranks(tmp_path: Path) -> None:
    write_step(tmp_path, 1, {0: [generation(1, 0, 4, (0, 1))], 1: []})
    result = run_timeline.shares(run_timeline.load(tmp_path), [1])
    assert result[0]["work"] == result[1]["work"] == pytest.approx(0.4)


def test_draws_the_chart(run_dir: Path) -> None:
    lines = [line.plain for line in run_timeline.picture(run_timeline.load(run_dir), [1], width=54)]
    assert [line.rstrip() for line in lines[:5]] == [
        "             |1",
        "rank 0                       AA··AAAA    CCCCCCCC",
        "rank 1                       IIIIIIIIIIIIRRRR::",
        "rank 2       ················E",
        "  generation   GGGGGGGGGGGG",
    ]
    assert lines[5].startswith("A actor_logprobs   C actor_update   R critic_update   I critic_values   G generation")
    assert lines[6].startswith("40 columns of 250 ms")


def test_row_shows_the_dominant_span_per_cell() -> None:
    spans = [
        main_span("step 1", STEP, 0, 10),
        main_span("generate", WAIT, 0, 4),
        main_span("wake", "rollout", 1, 2),
        main_span("actor_update", "actor", 6, 9),
        generation(3, 9, 10),
    ]
    cells = run_timeline.row(spans, 0.0, 10.0, 10)
    assert cells == [WAIT, "wake", WAIT, WAIT, "", "", *["actor_update"] * 3, "generation"]
    # The longest span wins a cell: four seconds with one of another span, or three of five.
    assert run_timeline.row(spans, 0.0, 10.0, 2) == [WAIT, "actor_update"]
    assert run_timeline.row([main_span("a", "x", 0, 1), main_span("b", "y", 1, 4)], 0.0, 4.0, 2) == ["a", "b"]


def test_each_span_kind_has_a_distinct_mark() -> None:
    result = run_timeline.marks(["actor_logprobs", "actor_update", "critic_update", "generation"])
    assert result == run_timeline.MARKS | {
        "actor_logprobs": "A",
        "actor_update": "C",
        "critic_update": "R",
        "generation": "G",
    }


def test_interval_operations() -> None:
    a, b = [(0.0, 4.0), (6.0, 8.0)], [(1.0, 2.0), (3.0, 7.0)]
    assert run_timeline.union([(3, 7), (1, 2), (2, 2.5), (5, 5)]) == [(1, 2.5), (3, 7)]
    assert run_timeline.common(a, b) == [(1, 2), (3, 4), (6, 7)]
    assert run_timeline.without(a, b) == [(0, 1), (2, 3), (7, 8)]
    assert run_timeline.without(a, []) == a and run_timeline.common(a, []) == []


def test_innermost_spans() -> None:
    spans = [
        main_span("a", "x", 0, 10),
        main_span("b", "x", 2, 5),
        main_span("c", "x", 3, 4),
        main_span("d", "x", 5, 6),
    ]
    assert [(s.name, s.begin, s.end) for s in run_timeline.innermost(spans)] == [
        ("a", 0, 2),
        ("b", 2, 3),
        ("c", 3, 4),
        ("b", 4, 5),
        ("d", 5, 6),
        ("a", 6, 10),
    ]


def test_repeated_steps_count_once(run_dir: Path) -> None:
    """After a resume on two ranks from step 1, the third rank's file has only old steps."""
    write_step(run_dir, 2, {rank: [main_span("actor_update", "actor", 0, 9)] for rank in range(3)}, begin=10)
    write_step(run_dir, 2, {rank: [main_span("actor_update", "actor", 0, 1)] for rank in range(2)}, begin=100)
    run = run_timeline.load(run_dir)
    assert {step: sorted(by_rank) for step, by_rank in run.windows.items()} == {1: [0, 1, 2], 2: [0, 1]}
    assert run_timeline.shares(run, [2])[0]["work"] == pytest.approx(0.1)


def test_pause_between_runs_is_excluded(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopped after step 1 and resumed an hour later: loads the model, then trains."""
    resumed = [main_span("load", "actor", -20, -1), main_span("actor_update", "actor", 0, 5)]
    write_step(run_dir, 2, {0: resumed, 1: [], 2: []}, begin=3610)
    run = run_timeline.load(run_dir)
    begin, end = run.bounds([1, 2])
    assert end - begin == pytest.approx(20) and run.pauses == pytest.approx({2: 3600})
    assert run_timeline.shares(run, [1, 2])[0]["work"] == pytest.approx((3.5 + 5) / 20)
    assert run_timeline.cost(run, 2).idle == pytest.approx(5)
    assert run_timeline.main([str(run_dir)]) == 0
    output = capsys.readouterr().out
    assert "before step 2 the run was stopped and resumed: 3600 s are left out" in output and "10.00" in output
    assert run_timeline.main([str(run_dir), "--steps", "2"]) == 0
    assert "left out" not in capsys.readouterr().out


def test_evaluation_between_steps_is_not_a_pause(tmp_path: Path) -> None:
    lines = Timeline(tmp_path, 0, warn=pytest.fail)
    lines.write([main_span("step 1", STEP, 1e9, 1e9 + 10)])
    lines.write([main_span("evaluate", "rollout", 1e9 + 10, 1e9 + 30), main_span("step 2", STEP, 1e9 + 30, 1e9 + 40)])
    run = run_timeline.load(tmp_path)
    begin, end = run.bounds([1, 2])
    assert end - begin == pytest.approx(40) and not run.pauses
    assert run_timeline.shares(run, [1, 2])[0]["work"] == pytest.approx(0.5)


def test_writes_a_merged_trace(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "all.json"
    assert run_timeline.main([str(run_dir), "--out", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    process_names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert process_names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    update = next(event for event in events if event["name"] == "actor_update")
    assert (update["pid"], update["cat"], update["ts"], update["dur"]) == (0, "actor", 7_000_000, 2_000_000)
    output = capsys.readouterr().out
    assert "actor and critic" in output and "2.50" in output and "2.000 (20.0%)" in output and "perfetto" in output


def test_skips_invalid_lines(run_dir: Path) -> None:
    expected = run_timeline.load(run_dir)
    event = {"name": "x", "cat": "actor", "ph": "X", "ts": 10**15, "dur": 10**7, "pid": 0, "tid": 0, "args": {}}
    broken: list[object] = [5, [], {"ph": "X"}, {"ph": "M", "args": 3, "tid": 0}]
    broken += [event | invalid for invalid in ({"ts": "1"}, {"dur": -1}, {"args": {"ranks": [None]}}, {"name": 3})]
    with timeline_file(run_dir, 0).open("ab") as file:
        file.write(b'{"name": "act\n\xff\xfe\n' + b"[" * 10**5 + b"\n")
        file.write("".join(f"{json.dumps(line)},\n" for line in broken).encode())
    assert run_timeline.load(run_dir) == expected


def test_invalid_options_print_one_line(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty := tmp_path / "empty").mkdir()
    (damaged := tmp_path / "damaged" / "timeline").mkdir(parents=True)
    (damaged / "rank_00000.json").write_text("[\nnothing\n")
    for arguments, text in (
        ([tmp_path / "none"], "no run folder"),
        ([empty], "once it has done a step"),
        ([damaged.parent], "have no step yet, or are damaged"),
        ([run_dir, "--steps", "5-"], "names no steps; write 3-5, or 4; the timeline has the steps 1 to 1"),
        ([run_dir, "--steps", "2-3"], "names none that was done"),
        ([run_dir, "--out", empty], "is a folder; name a file"),
    ):
        assert run_timeline.main([str(argument) for argument in arguments]) == 2
        output = capsys.readouterr().err.splitlines()
        assert len(output) == 1 and output[0].startswith("error: ") and text in output[0]
    with pytest.raises(ConfigError):
        run_timeline.load(empty)


def test_overhead_is_the_median_idle_time() -> None:
    costs = [run_timeline.Cost(10.0, idle, 1.0, 1.0) for idle in (0.1, 0.2, 9.0)]
    assert run_timeline.overhead(costs) == "overhead: 0.200 s of a step, 2.0%; 1% of one of 20 s"
