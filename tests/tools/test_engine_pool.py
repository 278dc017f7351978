"""`engine_pool`: the pool of a run in its control.yaml. `serve` runs in `tests/test_external_engines_end_to_end.py`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from megarl.config import plain_yaml
from megarl.config.command_line import run_cli
from megarl.engine import external_server
from megarl.engine.engine_protocol import EngineError

pytestmark = pytest.mark.alone

MAIN = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools/engine_pool.py"))["main"]
FIRST, SECOND = "127.0.0.1:1", "10.0.0.5:7000"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(f"algorithm: grpo\nrollout: {{external: ['{FIRST}']}}\n")
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["engine_pool.py", *map(str, arguments)])
    return run_cli(MAIN)


def test_adds_and_removes(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_dir / "control.yaml").write_text("kl: {coef: 0.1}\n")
    assert run(monkeypatch, "add", run_dir, SECOND) == 0
    expected = {"kl": {"coef": 0.1}, "rollout": {"external": [FIRST, SECOND]}}
    assert plain_yaml.read(run_dir / "control.yaml") == expected
    assert run(monkeypatch, "remove", run_dir, FIRST) == run(monkeypatch, "remove", run_dir, SECOND) == 0
    assert plain_yaml.read(run_dir / "control.yaml") == {"kl": {"coef": 0.1}, "rollout": {"external": []}}


def test_removing_an_engine_moves_only_the_last_one(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine k belongs to engine k mod n of the run."""
    (run_dir / "control.yaml").write_text("rollout: {external: ['a:1', 'b:1', 'c:1', 'd:1']}\n")
    assert run(monkeypatch, "remove", run_dir, "b:1") == 0
    assert plain_yaml.read(run_dir / "control.yaml") == {"rollout": {"external": ["a:1", "d:1", "c:1"]}}


def test_does_not_drop_the_engines_of_stages(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(run_dir / "config.yaml", "a") as file:
        file.write(f"stages: {{3: {{rollout: {{external: ['{FIRST}', '10.0.0.6:7000']}}}}}}\n")
    assert run(monkeypatch, "add", run_dir, SECOND) == 2
    message = f"stages of {run_dir}/config.yaml change rollout.external: write the whole list once as"
    assert message in capsys.readouterr().err and not (run_dir / "control.yaml").exists()
    (run_dir / "control.yaml").write_text("rollout: {external: []}\n")
    assert run(monkeypatch, "add", run_dir, SECOND) == 0


def test_an_engine_that_does_not_start_is_one_line(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Server:
        def __init__(self, *_: object) -> None: ...

        def run(self, on_ready: object) -> None:
            raise EngineError("it has\nended")

    monkeypatch.setattr(external_server, "ExternalServer", Server)
    assert run(monkeypatch, "serve", run_dir, "--listen", "127.0.0.1:7000", "--out", run_dir / "out") == 1
    assert capsys.readouterr().err == "error: it has ended\n"


def test_lists_an_engine_that_does_not_answer(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "list", run_dir) == 0
    assert capsys.readouterr().out.startswith(f"{FIRST}: nothing answers at {FIRST} (")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add", "RUN", FIRST], f"RUN has {FIRST} already"),
        (["add", "RUN", "nowhere"], "'nowhere' is not HOST:PORT, such as 10.0.0.5:7000"),
        (["remove", "RUN", SECOND], f"RUN has no {SECOND}, only {FIRST}"),
        (["list", "RUN/logs"], "RUN/logs is no run folder: it has no config.yaml"),
        ([], "say what to do: serve, add, remove or list"),
    ],
)
def test_refuses_in_one_line(
    arguments: list[str],
    message: str,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *(text.replace("RUN", str(run_dir)) for text in arguments)) == 2
    assert message.replace("RUN", str(run_dir)) in capsys.readouterr().err
