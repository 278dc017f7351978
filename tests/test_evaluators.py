"""lm-eval, inspect and other clients on an engine: commands, results, and what is written. Programs are played."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_run import make_folder

from megarl import eval as program
from megarl import evaluators, train
from megarl.config import Config, ConfigError, from_dict
from megarl.engine.engine_backends import engine_backend
from megarl.engine.http_engine import HTTPEngine
from megarl.evaluators import Endpoint
from megarl.model_sources import Target
from megarl.observe.run_folder import append_metrics, claim, claim_and_begin
from megarl.observe.tracker import read_metrics

pytestmark = pytest.mark.alone

ENDPOINT = Endpoint("http://127.0.0.1:1234/v1", "key-of-the-engine", "/models/mine")
LM_EVAL_RESULTS = {
    "results": {
        "gsm8k": {
            "name": "gsm8k",
            "alias": "gsm8k",
            "sample_len": 5,
            "exact_match,strict-match": 0.5,
            "exact_match_stderr,strict-match": 0.1,
            "exact_match,flexible-extract": 0.75,
        },
        "arc easy": {"acc,none": 0.25, "acc_stderr,none": "N/A"},
    }
}
INSPECT_LOG = {
    "status": "success",
    "eval": {"task": "package/sums"},
    "results": {
        "scores": [
            {"name": "match", "metrics": {"accuracy": {"value": 0.5}, "stderr": {"value": 0.25}}},
            {"name": "model graded", "metrics": {"mean": {"value": 1}}},
        ]
    },
}
FAKE_LM_EVAL = """#!/bin/sh
echo "$OPENAI_BASE_URL $OPENAI_API_KEY $OPENAI_MODEL $*" >"$PLAYED"
while [ "$1" != --output_path ]; do shift; done
mkdir -p "$2/policy" && cp "$RESULTS" "$2/policy/results_2026.json"
exit ${STATUS:-0}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Path:
    """A run of 3 steps with an export."""
    path = tmp_path / "runs/mine"
    claim_and_begin(
        path, from_dict({"run": {"dir": str(path)}, "rollout": {"max_context": 96}}), resume=False
    ).release()
    (path / "metrics.jsonl").write_text('{"step": 3, "time": 1.0, "time/step": 1.0}\n')
    (path / "export").symlink_to(folder / "model")
    return path


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Play the engine and lm_eval. Returns the file that gets the environment and arguments of lm_eval."""
    configs = list[Config]()

    @contextlib.contextmanager
    def open_endpoint(config: Config) -> Iterator[Endpoint]:
        configs.append(config)
        yield ENDPOINT._replace(folder=config.model.path)

    monkeypatch.setattr(program, "open_endpoint", open_endpoint)
    monkeypatch.setattr(train, "main", lambda _: pytest.fail("ranks were started"))
    tool = tmp_path / "bin/lm_eval"
    tool.parent.mkdir()
    tool.write_text(FAKE_LM_EVAL)
    tool.chmod(0o755)
    (tmp_path / "results.json").write_text(json.dumps(LM_EVAL_RESULTS))
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("RESULTS", str(tmp_path / "results.json"))
    monkeypatch.setenv("PLAYED", str(tmp_path / "played"))
    return tmp_path / "played"


def evaluate(target: Path, out: Path, *arguments: str) -> int:
    return program.main([str(target), "--out", str(out), *arguments])


def test_lm_eval_runs_with_the_settings_of_the_run(run: Path, played: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert evaluate(run, out, "--lm-eval", "gsm8k", "rollout.concurrency=8", "--", "--limit", "5") == 0
    environment, _, arguments = played.read_text().strip().partition(" run ")
    assert environment == "http://127.0.0.1:1234/v1 key-of-the-engine policy"
    words = arguments.split()
    assert words[:2] == ["--tasks", "gsm8k"] and words[-2:] == ["--limit", "5"]
    pairs = json.loads(words[words.index("--model_args") + 1])
    assert pairs["base_url"] == "http://127.0.0.1:1234/v1/completions" and pairs["model"] == "policy"
    assert pairs["tokenizer"] == f"{run}/export" and pairs["num_concurrent"] == 8 and pairs["max_length"] == 96
    expected = {
        "eval/lm_eval/gsm8k/exact_match_strict-match": 0.5,
        "eval/lm_eval/gsm8k/exact_match_stderr_strict-match": 0.1,
        "eval/lm_eval/gsm8k/exact_match_flexible-extract": 0.75,
        "eval/lm_eval/arc_easy/acc": 0.25,
    }
    assert read_metrics(out) == {0: expected}
    assert read_metrics(run) == {3: {"time/step": 1.0}}  # only with --record


def test_records_metrics_in_the_run(run: Path, played: Path, tmp_path: Path) -> None:
    assert evaluate(run, tmp_path / "out", "--lm-eval", "gsm8k", "--record") == 0
    assert played.exists()
    metrics = read_metrics(run)
    assert list(metrics) == [3] and metrics[3]["eval/lm_eval/arc_easy/acc"] == 0.25 and metrics[3]["time/step"] == 1.0


def test_a_failing_evaluator_is_one_line(
    run: Path, played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STATUS", "3")
    assert evaluate(run, tmp_path / "out", "--lm-eval", "gsm8k", "--record") == 2
    assert played.exists()
    assert capsys.readouterr().err == "error: lm_eval has failed with status 3; its messages are above\n"
    assert read_metrics(run) == {3: {"time/step": 1.0}}


def test_another_client_gets_the_address(run: Path, played: Path, tmp_path: Path) -> None:
    file = tmp_path / "seen"
    command = f"sh -c 'echo $OPENAI_BASE_URL $OPENAI_API_KEY $OPENAI_MODEL >{file}'"
    assert evaluate(run, tmp_path / "out", "--command", command) == 0
    assert file.read_text() == "http://127.0.0.1:1234/v1 key-of-the-engine policy\n" and not played.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name one of --data, --lm-eval, --inspect, --command"),
        (("--lm-eval", "a", "--inspect", "b"), "not --lm-eval and --inspect"),
        (("--data", "x.jsonl", "--", "--limit", "5"), "options after -- are for --lm-eval and --inspect"),
        (("--data", "x.jsonl", "--record"), "--record is for --lm-eval and --inspect"),
        (("--inspect", "a.py"), "inspect is not installed: `pip install inspect_ai` into an environment of its own"),
        (("--command", "no-such-program x"), "there is no such program"),
        (("--lm-eval", "a", "rollout.engine=vllm"), "rollout.engine=vllm has no OpenAI API here"),
        (("--lm-eval", "a", "run.dir=x"), "use --out"),
    ],
)
def test_mistakes_are_found_before_an_engine_starts(
    run: Path,
    played: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(program, "open_endpoint", lambda _: pytest.fail("an engine was started"))
    assert evaluate(run, tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error
    assert not (tmp_path / "out").exists() and not played.exists()


def test_record_needs_a_run(folder: Path, played: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(folder / "model", tmp_path / "out", "--lm-eval", "a", "--record") == 2
    assert "belongs to no run" in capsys.readouterr().err and not played.exists()


def test_a_checkpoint_is_recorded_at_its_step(run: Path) -> None:
    target = Target("x", str(run / "export"), checkpoint=run / "checkpoints/step_000002", step=2)
    assert program.find_run(target) == (run, 2)
    assert program.find_run(dataclasses.replace(target, checkpoint=None, step=None)) == (run, 3)


def test_reads_results_of_inspect(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no results"):
        evaluators.read_inspect(tmp_path)
    (tmp_path / "sums.json").write_text(json.dumps(INSPECT_LOG))
    assert evaluators.read_inspect(tmp_path) == {
        "eval/inspect/sums/match_accuracy": 0.5,
        "eval/inspect/sums/match_stderr": 0.25,
        "eval/inspect/sums/model_graded_mean": 1.0,
    }
    failed = {"status": "error", "error": {"message": "a\nfault"}, "eval": {"task": "sums"}}
    (tmp_path / "failed.json").write_text(json.dumps(failed))
    with pytest.raises(ConfigError, match="has the status error: a fault"):
        evaluators.read_inspect(tmp_path)
    with pytest.raises(ConfigError, match="lm_eval has left no results"):
        evaluators.read_lm_eval(tmp_path)


def test_command_of_inspect(tmp_path: Path) -> None:
    config = from_dict({"rollout": {"concurrency": 5, "max_new_tokens": 77}})
    command = evaluators.inspect_command("inspect", "my.py@sums", config, tmp_path)
    assert command[:5] == ["inspect", "eval", "my.py@sums", "--model", "openai/policy"]
    assert command[command.index("--max-connections") + 1] == "5" and command[command.index("--max-tokens") + 1] == "77"
    (task,) = evaluators.inspect_command("inspect", f"{tmp_path}/my.py@sums", config, tmp_path)[2:3]
    assert not task.startswith("/") and os.path.abspath(task) == f"{tmp_path}/my.py@sums"


def test_no_proxy_between_evaluator_and_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "localhost")
    assert ENDPOINT.environment["NO_PROXY"] == ENDPOINT.environment["no_proxy"] == "localhost,127.0.0.1"


def test_only_an_endpoint_parses_tool_calls_in_the_server(folder: Path, tmp_path: Path) -> None:
    """Training renders and parses tool calls itself."""
    tree = {"model": {"path": str(folder / "model")}, "rollout": {"tool_call_parser": "qwen25"}}
    config = from_dict({**tree, "run": {"dir": str(tmp_path)}, "parallel": {"world_size": 1, "ranks_per_node": 1}})
    engine = engine_backend(config).make_engine(config)
    assert isinstance(engine, HTTPEngine)
    engine.tool_call_parser = "qwen25"
    assert "tool_call_parser" not in engine._make_launch().settings["server_args"]
    engine.parses_tool_calls = True
    assert engine._make_launch().settings["server_args"]["tool_call_parser"] == "qwen25"


def test_appends_metrics_to_a_run_that_has_ended(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "ti')  # truncated by a crash
    append_metrics(run, 3, {"eval/x": 1.0})
    append_metrics(run, 5, {"eval/x": 2.0})
    assert read_metrics(run) == {3: {"time/step": 1.0, "eval/x": 1.0}, 5: {"eval/x": 2.0}}
    config = from_dict({"run": {"dir": str(run), "resume": "auto"}, "rollout": {"max_context": 96}})
    (run / "export").unlink()  # with one the run would count as finished
    holder = claim(run, config, resume=True)
    with pytest.raises(ConfigError, match="is in use by"):
        append_metrics(run, 6, {"eval/x": 3.0})
    holder.release()
    assert max(read_metrics(run)) == 5
