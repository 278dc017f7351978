"""`bench.py`: every command prints the machine, load and ratios, and writes them as one JSON object."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.append(str(TOOLS))

import bench  # noqa: E402
from benchmarks.measure import Samples  # noqa: E402

from megarl.config import ConfigError  # noqa: E402

pytestmark = pytest.mark.alone


def make_samples(*ways: str) -> Samples:
    samples = Samples(ways)
    for way in ways:
        samples.add(way, 1.0, 2.0)
    return samples


async def measure_boxes(*_: Any) -> tuple[dict[str, list[float]], dict[str, float]]:
    return {"bare": [1.0], "sandbox": [2.0]}, {"bare": 1.0, "sandbox": 2.0}


async def measure_boxes_at_once(*_: Any) -> dict[str, list[float]]:
    return {"bare": [1.0], "sandbox": [2.0]}


async def compare_turns(*_: Any) -> tuple[Samples, dict[str, list[float]]]:
    return make_samples("turn by turn", "by the loop"), {"turn by turn": [4.0], "by the loop": [2.0]}


class Process:
    """Stands in for an engine's host and for a call of git."""

    path, returncode = "socket", 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def close(self) -> None:
        return None


class Box:
    def __init__(self, settings: Any) -> None:
        pass

    async def probe(self) -> str:
        return "a box"

    async def close(self) -> None:
        return None


class Chat:
    @staticmethod
    def load(*_: Any) -> None:
        return None


@contextlib.contextmanager
def start_nothing(_: Any) -> Iterator[None]:
    yield None


SYNC = {
    "seconds": [2.0],
    "cpu_s": [1.0],
    "wire_mib": 3.0,
    "peak_mib": 1.0,
    "prepare_s": 1.0,
    "first_s": 1.0,
    "wrong": "",
}
SYNCS = {"model_mib": 4.0, "bound_mib": 2.0, "ways": {"reshard": SYNC, "gather": {"problem": "no room"}}}
STEPS = ("packed, balanced", "packed, as they come", "padded, balanced", "padded, as they come")
SAVES = {name: [(2.0, 0.5, 1.0)] for name in ("no save", "asynchronous", "in memory", "waited for")}
SIZES = {name: {"tokens": tokens} for name, tokens in (("quarter", 25), ("half", 50), ("full", 100))}
RANK = {size: [step | {"parts": {"give": 1.0}, "busy": 1.0, "sent": 9, "metrics": {}}] for size, step in SIZES.items()}
STAND_INS: dict[str, dict[str, Any]] = {
    "reshard": {"run_function": lambda *_, **__: SYNCS},
    "step": {"run_function": lambda *_, **__: {name: [(1.0, 2.0, 0.1)] for name in STEPS}},
    "context": {},
    "trl": {
        "compare": lambda options: dict.fromkeys(("MegaRL", "TRL"), [{"step": 1.0, "CPU seconds": 1.0}]),
        "read_trl_version": lambda python: "1.16.0",
    },
    "asynchronous": {"start_host": Process, "run_timed": lambda *_: {"step": 1.0, "processor s": 2.0}},
    "turns": {"start_engine": start_nothing, "compare": compare_turns, "ChatTemplate": Chat, "load_tools": Process},
    "concurrency": {},
    "boxes": {
        **{"Sandbox": Box, "inherit_orphans": Process},
        **{"measure_alternating": measure_boxes, "measure_concurrent": measure_boxes_at_once},
    },
    "sessions": {"run_methods": lambda *_: make_samples("by the loop", "by the clients", "by the server")},
    "save": {"run_function": lambda *_, **__: {"series": SAVES, "bytes": 10, "copied": [1, 2]}},
    "observe": {"run_steps": lambda settings: ({step: 1.0 for step in range(1, 25)},) * 2},
    "flow": {
        "measure": lambda spec, root: {"by_rank": [RANK], "memory": {"rollouts": 1, "step": 2, "log": 3}},
        **{"git": Process, "checkout": start_nothing},
    },
    "scale": {
        "run_ranks": lambda spec: [],
        "report_constants": lambda runs, report: report.table("constants", [{"part": "columns", "ms a step": 1.0}]),
        "report_job": lambda options, constants, report: report.note("a job"),
    },
}
"""By command, what stands in for the work of its module."""
OPTIONS = {
    "context": ["--ranks", "4", "--cp", "2", "--sequences", "16"],
    "trl": ["--trl", "python"],
    "observe": ["--blocks", "2", "--steps", "2"],
    "concurrency": ["--conversations", "2"],
}
OPTIONS["flow"] = ["--ranks", "1", "--against", "HEAD"]


def make_words(command: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Replace the work of a command, and return its command line."""
    module = importlib.import_module(f"benchmarks.{command}")
    for name, stand_in in STAND_INS[command].items():
        monkeypatch.setattr(module, name, stand_in)
    for name in ("model", "train.jsonl", "sft.jsonl"):
        (folder / name).touch()
    positional = [str(folder)] if f"tools/bench.py {command} FOLDER" in (module.__doc__ or "") else []
    return [command, *positional, *OPTIONS.get(command, [])]


@pytest.mark.parametrize("command", list(bench.COMMANDS))
def test_reports_machine_load_and_ratios(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    assert bench.main([*make_words(command, monkeypatch, tmp_path), "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(file.read_text())
    machine, versions, load = result["machine"], result["versions"], result["load"]
    assert lines[0].startswith(f"machine: {machine['cpu']}, {machine['cores']} of ") and machine["memory_gb"] > 0
    assert lines[1].startswith("versions: megarl ") and f"megatron-core {versions['megatron-core']}" in lines[1]
    assert {"torch", "sglang", "trl", "python"} <= versions.keys()
    assert lines[2] == f"load before: {load['before']}"
    assert lines[-1].startswith(f"load after: {load['after']}; the command took ")
    assert result["command"] == command and result["seconds"] > 0 and result["processor_s"] >= 0
    assert result["rows"] and {row["table"] for row in result["rows"]} <= set(lines)
    if command not in ("scale", "context"):  # which model, and compare nothing in turn
        cells = [cell for row in result["rows"] for cell in row.values() if isinstance(cell, dict)]
        assert any(cell.keys() == {"median", "low", "high"} for cell in cells)


def test_json_alone_is_all_of_stdout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = make_words("save", monkeypatch, tmp_path)
    monkeypatch.setattr(importlib.import_module("benchmarks.save"), "statistics", PrintingStatistics)
    assert bench.main([*words, "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["command"] == "save"
    assert output.err.startswith("machine: ") and "a line of the work" in output.err


class PrintingStatistics:
    @staticmethod
    def median(values: Any) -> float:
        print("a line of the work")
        return next(iter(values))


def test_commands_are_the_modules_with_options() -> None:
    modules = {file.stem for file in (TOOLS / "benchmarks").glob("*.py") if "def add_options" in file.read_text()}
    assert modules == set(bench.COMMANDS) == set(STAND_INS)
    for command in bench.COMMANDS:
        assert f"    .venv/bin/python tools/bench.py {command}" in (TOOLS / f"benchmarks/{command}.py").read_text()


@pytest.mark.parametrize("words", [[], ["--json"], ["speed"], ["step", "--nonsense"]])
def test_rejects_unknown_words(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="see --help"):
        bench.main(words)


def test_checks_the_json_file_before_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--json .* create it first"):
        bench.main(["step", "--json", str(tmp_path / "no/result")])
    assert capsys.readouterr().out == ""
