"""The command line of `megarl.train`: one-line errors, dry runs, listed keys, and the launcher's engine host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl import train
from megarl.config import load_config
from megarl.dry_run import validation
from megarl.engine import engine_host
from megarl.engine.sglang.sglang_backend import SGLangBackend
from megarl.launch import launcher
from megarl.launch.exit_status import RunOutcome
from megarl.train import main, start_ranks

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from model_folder import write_tokenizer, write_weights  # noqa: E402

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A complete HF folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((ROOT / "configs" / "models" / "qwen3_235b.json").read_text())
    config |= {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config["vocab_size"] = 256
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, config)
    write_tokenizer(folder, ("a",))
    return folder


def write_prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "What is 1+1?", "ground_truth": 2}\n')
    return file


CASES = {
    "misspelt key": (["rollout.max_turn=3"], ["unknown key rollout.max_turn", "rollout.max_turns"]),
    "key of another section": (["run.max_turns=3"], ["unknown key run.max_turns", "rollout.max_turns"]),
    "wrong type": (["rollout.max_turns=many"], ["rollout.max_turns must be a whole number", "'many'"]),
    "unknown choice": (["algorithm=gppo"], ["algorithm must be one of ppo, "]),
    "no override": (["nonsense"], ["'nonsense' is not of the form key=value"]),
    "layout and world": (["parallel.tp=3"], ["world_size=2 is not a multiple of", "3"]),
    "layout and model": (
        ["parallel.world_size=3", "parallel.ranks_per_node=3", "parallel.tp=3", "parallel.ep=1"],
        ["num_key_value_heads=2", "tensor parallel size 3"],
    ),
    "missing model folder": (["model.path=nowhere"], ["nowhere"]),
    "missing data": (["data.train=nowhere.jsonl"], ["data.train", "nowhere.jsonl"]),
    "unknown reward": (["reward.functions=[megarl.rewards.gsm8k:gold]"], ["gold"]),
    "unknown tool": (["rollout.tools=[megarl.environments.ready.calculator:slide_rule]"], ["slide_rule"]),
    "unknown name for Megatron": (["model.megatron.moe_router_topq=3"], ["moe_router_topq", "moe_router_topk"]),
    "unknown name for SGLang": (["rollout.sglang.max_total_token=3"], ["max_total_token", "max_total_tokens"]),
    "more machines than one": (["parallel.world_size=16", "parallel.ranks_per_node=8"], ["slurm/ppo_moe.sh"]),
}


@pytest.mark.parametrize("name", CASES)
def test_mistake_is_a_one_line_error(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, expected = CASES[name]
    run_dir = tmp_path / "run"
    command_overrides = [
        f"model.path={model}",
        f"data.train={write_prompts(tmp_path)}",
        f"run.dir={run_dir}",
        "run.eval_every=0",
    ]
    status = main([QUICKSTART, *command_overrides, "data.eval=", *overrides])
    captured = capsys.readouterr()
    assert status == 2
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
    for text in expected:
        assert text in captured.err
    assert not run_dir.exists()


def test_unknown_architecture_lists_the_supported_ones(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    assert main([QUICKSTART, f"model.path={model}", f"data.train={write_prompts(tmp_path)}", "--dry-run"]) == 2
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert "MambaForCausalLM" in text and "Qwen3MoeForCausalLM" in text and "DeepseekV3ForCausalLM" in text


def test_dry_run_starts_nothing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    value = [
        "model.path=models/none",
        f"model.hf_config={model}/config.json",
        f"data.train={write_prompts(tmp_path)}",
        f"run.dir={run_dir}",
        "data.eval=",
    ]
    assert main([QUICKSTART, "--dry-run", *value, "run.eval_every=0"]) == 0
    output = capsys.readouterr().out
    assert "the configuration is valid" in output and "would be rejected" not in output
    assert not run_dir.exists()
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").touch()  # of another run
    assert main([QUICKSTART, "--dry-run", *value, "run.eval_every=0"]) == 0
    assert f"the run would be rejected: run folder {run_dir}" in capsys.readouterr().out


def test_lists_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    help_text = "Turns that the policy may take in one conversation"
    assert f"rollout.max_turns = 5  # a whole number, at least 1 and at most 2147483647; {help_text}" in lines
    assert [line for line in lines if "; " not in line] == []
    assert all("\n" not in line and len(line) < 500 for line in lines)


def test_lists_matching_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--keys", "reward"]) == 0
    names = [line.partition(" = ")[0] for line in capsys.readouterr().out.splitlines()]
    assert "reward.max_failed_frac" in names and names == [name for name in names if "reward" in name]
    assert main(["--keys", "max_turns", "run.seed"]) == 0
    names = [line.partition(" = ")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["run.seed", "rollout.max_turns"]


def test_listing_keys_tolerates_a_closed_pipe() -> None:
    command = f"{sys.executable} -m megarl.train --keys | head -n 1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("algorithm = ") and done.stderr == ""


def test_launcher_starts_one_engine_host_for_all_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_dir = f"run.dir={tmp_path}/run"
    monkeypatch.delenv(engine_host.HOST_VARIABLE, raising=False)
    host_sockets: list[str | None] = []
    closed: list[bool] = []
    host = SimpleNamespace(path="/the/socket", close=lambda: closed.append(True))
    monkeypatch.setattr(SGLangBackend, "start_host", lambda self, config: host)
    monkeypatch.setattr(validation, "validate", lambda config: validation.Report([], [], {}, []))

    def run(self: launcher.Launch, environment: dict[str, str]) -> tuple[RunOutcome, None]:
        host_sockets.append(environment.get(engine_host.HOST_VARIABLE, os.environ.get(engine_host.HOST_VARIABLE)))
        return RunOutcome(0, "", "done"), None

    monkeypatch.setattr(launcher.Launch, "run", run)
    assert start_ranks(load_config(QUICKSTART, [run_dir]), [QUICKSTART]) == 0
    assert (host_sockets, closed, os.environ.get(engine_host.HOST_VARIABLE)) == (["/the/socket"], [True], None)
    assert start_ranks(load_config(QUICKSTART, [run_dir, "rollout.replay=elsewhere"]), [QUICKSTART]) == 0
    assert host_sockets == ["/the/socket", None] and closed == [True]
    monkeypatch.setenv(engine_host.HOST_VARIABLE, "/of/somebody/else")
    assert start_ranks(load_config(QUICKSTART, [run_dir]), [QUICKSTART]) == 0
    assert host_sockets[2:] == [os.environ[engine_host.HOST_VARIABLE]] == ["/of/somebody/else"] and closed == [True]


def test_ranks_have_one_cuda_queue_but_with_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    seen: list[str | None] = []

    def start_ranks(*_: object) -> int:
        seen.append(os.environ.get(name))
        return 0

    monkeypatch.setattr(train, "inherit_orphans", lambda: None)
    monkeypatch.setattr(train, "start_ranks", start_ranks)
    monkeypatch.setenv(name, "8")
    assert main([QUICKSTART]) == 0
    for overrides in ([], ["train.fsdp=true"]):
        monkeypatch.delenv(name)
        assert main([QUICKSTART, *overrides]) == 0
        monkeypatch.setenv(name, "")
    assert seen == ["8", "1", None]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], []),
        (["a.yaml", "--show-prompt"], ["a.yaml", "--show-prompt=0"]),
        (["a.yaml", "--show-prompt", "12", "run.seed=2"], ["a.yaml", "--show-prompt", "12", "run.seed=2"]),
        (["--show-prompt", "a.yaml", "run.seed=2"], ["--show-prompt=0", "a.yaml", "run.seed=2"]),
        (["a.yaml", "--show-prompt=3"], ["a.yaml", "--show-prompt=3"]),
        (["a.yaml", "--show-prompt", "-1"], ["a.yaml", "--show-prompt", "-1"]),
    ],
)
def test_show_prompt_takes_no_file_or_key_as_its_row(arguments: list[str], expected: list[str]) -> None:
    assert train.with_row_number(arguments) == expected


def test_show_prompt_prints_a_row_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "q"
    command = [sys.executable, str(ROOT / "tools/make_quickstart.py"), str(made), "--train", "4"]
    subprocess.run([*command, "--demonstrations", "4"], cwd=ROOT, check=True, capture_output=True)
    monkeypatch.setattr(train, "start_ranks", None)
    overrides = [f"model.path={made}/model", f"data.train={made}/train.jsonl", f"run.dir={tmp_path}/run"]
    assert main([QUICKSTART, "--show-prompt", *overrides]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"row 0 of data.train: {made}/train.jsonl:1\n") and "room for the answer: 40" in output
    assert not (tmp_path / "run").exists()
    for row, message in (("4", "data.train has rows 0 to 3"), ("-1", "must be from 0 to")):
        assert main([QUICKSTART, *overrides, "--show-prompt", row]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
