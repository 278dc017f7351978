"""Command lines of `megarl view` and `tools/view_rollouts.py`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "view")]

import example_run  # noqa: E402
import view_rollouts  # noqa: E402

from megarl.view import view_runs  # noqa: E402

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return example_run.write_run(tmp_path_factory.mktemp("runs") / "first")


def test_writes_the_page_into_the_run_folder(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert view_runs.main([str(run_dir)]) == 0
    output = capsys.readouterr().out
    assert (
        f"wrote {run_dir / 'view.html'}" in output
        and "12 rollouts; tokens of 12 of them" in output
        and "note" not in output
    )
    assert (run_dir / "view.html").is_file() and (run_dir / "view_files" / "tokens-0-3-0.js").is_file()
    assert view_runs.main([str(run_dir), "--details", "0"]) == 0
    assert "tokens of 0 of them" in capsys.readouterr().out and not (run_dir / "view_files").exists()


def test_run_without_rollouts_has_no_note_about_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert view_runs.main([str(example_run.write_sft_run(tmp_path / "sft"))]) == 0
    output = capsys.readouterr().out
    assert "note" not in output and output.endswith("curves and time; sft generates no rollouts\n")


def test_unrecorded_rollouts_have_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = example_run.write_run(tmp_path / "run")
    shutil.rmtree(run / "rollouts")
    assert view_runs.main([str(run)]) == 0
    output = capsys.readouterr().out
    assert "has no recorded rollouts" in output and "0 rollouts; tokens of 0 of them" in output


def test_page_of_two_runs_has_its_own_name(tmp_path: Path) -> None:
    first, second = example_run.write_run(tmp_path / "a"), example_run.write_run(tmp_path / "b")
    assert view_runs.main([str(first)]) == 0
    original = (first / "view.html").read_bytes()
    assert view_runs.main([str(first), str(second)]) == 0
    assert (first / "view.html").read_bytes() == original and (first / "view_b.html").is_file()


def test_writes_nothing_into_other_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    assert view_runs.main([str(tmp_path / "other")]) == 2
    assert f"error: {tmp_path / 'other'} is not a run folder" in capsys.readouterr().err
    assert not list((tmp_path / "other").iterdir())


def test_draws_spans_of_the_last_steps(run_dir: Path, tmp_path: Path) -> None:
    result = view_runs.load_spans(run_dir)
    assert result is not None and result["steps"] == [1, 2, 3] and result["length"] == 9
    assert result["rows"] == [
        {
            "name": "rank 0",
            "spans": [["generation", f"generation of step {step + 1}", 3 * step, 3 * step + 2] for step in range(3)],
        }
    ]
    assert view_runs.load_spans(tmp_path) is None
    (tmp_path / "timeline").mkdir()
    (tmp_path / "timeline" / "rank_00000.json").write_bytes(b"\xff[")
    damaged = view_runs.load_spans(tmp_path)
    assert damaged is not None and damaged["rows"] == [] and "no step yet, or are damaged" in damaged["notes"][0]


def test_empty_folder_gives_a_page_with_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert view_runs.main([str(tmp_path / "empty"), "-o", str(tmp_path / "a.html")]) == 0
    output = capsys.readouterr().out
    assert output.count("note: ") == 3 and "0 rollouts" in output and (tmp_path / "a.html").is_file()
    (tmp_path / "empty/timeline").mkdir()
    (tmp_path / "empty/timeline/rank_00000.json").write_bytes(b"[")
    assert view_runs.main([str(tmp_path / "empty"), "-o", str(tmp_path / "a.html")]) == 0
    assert "timeline have no step yet, or are damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "RUN"),
        (["RUN/none"], "no run folder"),
        (["RUN", "-o", "RUN/no/a.html"], "create it first"),
        (["RUN", "-o", "RUN"], "is a folder"),
        (["RUN", "-o", "/dev/null"], "not a regular file"),
        (["RUN", "-o", "a.html", "--follow"], "not allowed with"),
        (["RUN", "--follow", "70000"], "from 0 to 65535"),
        (["RUN", "--details", "-1"], "--details"),
    ],
)
def test_view_rejects_invalid_options_in_one_line(
    run_dir: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert view_runs.main([argument.replace("RUN", str(run_dir)) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def view_output(run_dir: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert view_rollouts.main([str(run_dir), *arguments]) == 0
    return capsys.readouterr().out


def test_terminal_filters_and_sorts(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = view_output(run_dir, capsys, "--where", "reward>=1 and reward<3", "--sort", "reward:down")
    assert "step 3: 2 of 4 rollouts fit, 2 shown" in text
    assert text.index("reward 2") < text.index("reward 1")
    text = view_output(run_dir, capsys, "--where", "status=aborted")
    assert "0 of 4 rollouts fit, 0 shown" in text
    text = view_output(run_dir, capsys, "--sort", "number", "--show", "1")
    assert "reward 0" in text and "reward 1" not in text


def test_terminal_shows_each_token(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = view_output(run_dir, capsys, "--tokens", "--show", "1").splitlines()
    assert "     0        1                              |two|" in lines
    assert "     2        3     -0.2500   +0.5000  w2  |four|".split() in [line.split()[:6] for line in lines]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--where", "reward<"], "expected a value"),
        (["--where", "nobody<1"], "unknown column 'nobody'; the columns are step"),
        (["--sort", "nobody"], "unknown column 'nobody'"),
        (["--sort", "reward:sideways"], "reward:down"),
        (["--sort", "reward", "--best"], "not allowed with"),
        (["--tokens", "--html", "a.html"], "megarl view"),
    ],
)
def test_view_rollouts_rejects_invalid_options_in_one_line(
    run_dir: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert view_rollouts.main([str(run_dir), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
