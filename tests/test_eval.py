"""`megarl.eval`: errors before anything starts, configuration of the evaluation, and its report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training_run import make_folder

from megarl import eval as program
from megarl import model_sources, train
from megarl.config import ConfigError, RolloutConfig, from_dict, load_config
from megarl.dry_run.validation import validate
from megarl.observe.rollout_log import part_file, write_part
from megarl.parallel import device
from megarl.types import Prompt, Rollout, Turn

pytestmark = pytest.mark.alone

ROW = {"prompt": "1+1?", "ground_truth": "2", "data_source": "openai/gsm8k"}
Reject = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe") / "model"


@pytest.fixture
def reject(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Reject:
    """Run `megarl.eval` with a mistake and return its one-line error; nothing starts or is written."""
    monkeypatch.setattr(train, "main", lambda arguments: pytest.fail("it was started"))

    def run(*arguments: str, rows: bytes | None = None, target: Path = model) -> str:
        data = tmp_path / "rows.jsonl"
        data.write_bytes(json.dumps(ROW).encode() if rows is None else rows)
        out = tmp_path / "out"
        assert program.main([str(target), "--data", str(data), "--out", str(out), *arguments]) == 2
        assert not out.exists()
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        return error

    return run


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--k", "x"), ("--k", "'x'", "whole number")),
        (("--data", "none.jsonl"), ("--data none.jsonl", "no such file")),
        (("--k", "1,"), ("--k", "whole number")),
        (("--k", "0"), ("--k", "from 1")),
        (("--samples", "-1"), ("--samples", "from 1")),
        (("--right", "much"), ("--right", "number")),
        (("--k", "8", "--samples", "4"), ("--k 8", "--samples is 4")),
        (("--k", "8", "rollout.temperature=0"), ("rollout.temperature=0", "same answer 8 times")),
        (("--samples", "2", "rollout.temperature=0"), ("rollout.temperature=0",)),
        (("rollout.temprature=1",), ("rollout.temperature",)),
        (("run.dir=x",), ("run.dir", "--out")),
        (("data.train=x",), ("data.train", "--data")),
        (("model.path=x",), ("model.path", "TARGET")),
        (("algorithm=ppo",), ("algorithm", "nothing is trained")),
        (("reward.functions=[no.such:thing]",), ("reward.functions", "no.such")),
    ],
)
def test_rejects_bad_arguments(reject: Reject, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    error = reject(*arguments)
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    "rows, words",
    [
        (b"", ("rows.jsonl holds no prompts",)),
        (b'{"prompt": ', ("rows.jsonl:1", "not JSON")),
        (json.dumps(ROW).encode() + b"\n{", ("rows.jsonl:2", "not JSON")),
        (json.dumps({**ROW, "ground_truth": None}).encode(), ("rows.jsonl:1", "no ground truth")),
        (
            json.dumps(ROW).encode() + b"\n" + json.dumps({"prompt": "?", "data_source": "openai/gsm8k"}).encode(),
            ("rows.jsonl:2", "no ground truth"),
        ),
        (json.dumps({**ROW, "data_source": "lab/riddles"}).encode(), ("rows.jsonl:1", "lab/riddles", "BySource")),
        (json.dumps({"ground_truth": "2"}).encode(), ("rows.jsonl:1", "prompt")),
        (b"\xff\xfe", ("rows.jsonl", "UTF-16")),
    ],
)
def test_rejects_bad_data(reject: Reject, rows: bytes, words: tuple[str, ...]) -> None:
    error = reject(rows=rows)
    assert all(word in error for word in words), error


def test_rejects_bad_targets(reject: Reject, tmp_path: Path) -> None:
    assert "no such folder" in reject(target=tmp_path / "none")
    assert "no such folder" in reject(target=Path("nobody/no-such-model")) and "hf download" in reject(
        target=Path("nobody/no-such-model")
    )
    (tmp_path / "file").write_text("")
    assert "is a file" in reject(target=tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "is neither a model" in reject(target=tmp_path / "empty")
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    assert "safetensors" in reject(target=tmp_path / "config")
    (tmp_path / "step_000003").mkdir()
    assert "is not a complete checkpoint" in reject(target=tmp_path / "step_000003")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("algorithm: ppo\n")
    assert "without a checkpoint and without an export" in reject(target=tmp_path / "run")
    (tmp_path / "run/checkpoints/step_000001").mkdir(parents=True)
    assert "has no complete checkpoint" in reject(target=tmp_path / "run")


def test_rejects_an_existing_conversion_and_torchrun(
    reject: Reject, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = model_sources.Target("run", str(model), tmp_path / "step_000001", 1, from_dict({}))
    with pytest.raises(ConfigError, match="exists, but the checkpoint would be converted into"):
        target.prepare(model)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "without torchrun" in reject()


def test_rejects_missing_data_and_a_file_as_output(model: Path, tmp_path: Path, capsys: Any) -> None:
    assert program.main([str(model), "--data", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    assert program.main([str(model)]) == 2
    assert "--data" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    assert program.main([str(model), "--data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "file")]) == 2
    assert "--out" in capsys.readouterr().err


def test_inherits_the_settings_of_a_run(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(
        "algorithm: grpo\nplacement: {rollout: 4-7}\nparallel: {world_size: 8, tp: 2}\nlora: {rank: 8}\n"
        "model: {path: /there, dtype: float32}\nrollout: {max_turns: 3, asynchronous: true, temperature: 0.7, tp: 2}\n"
        "reward: {functions: [megarl.rewards.gsm8k:gsm8k], weights: {gsm8k: 2}}\n"
        "data: {train: a, prompt_key: question}\n"
    )
    (run / "export").symlink_to(model)
    target = model_sources.resolve_target(str(run))
    assert target.model == str(run / "export") and target.name == "run"
    file = tmp_path / "eval.yaml"
    config = model_sources.build_config(target, {"data": {"train": ["rows.jsonl"]}}, ["rollout.max_turns=4"], file)
    assert config == load_config(file, ["rollout.max_turns=4"])
    assert (config.algorithm, config.model.dtype, config.lora.rank, config.placement) == ("generate", "float32", 0, {})
    assert (config.rollout.max_turns, config.rollout.temperature, config.rollout.asynchronous) == (4, 0.7, False)
    assert (config.parallel.world_size, config.parallel.tp, config.data.prompt_key) == (2, 1, "question")
    assert config.reward.weights == {"gsm8k": 2}
    local = model_sources.build_config(
        target, {}, ["reward.functions=[sum_reward:even]", "parallel.world_size=4"], file
    )
    assert local.reward.functions == ("sum_reward:even",) and not local.reward.weights
    assert (local.parallel.world_size, local.parallel.ranks_per_node) == (4, 4)
    assert model_sources.build_config(model_sources.resolve_target(str(model)), {}, [], file).reward.functions == (
        model_sources.BY_SOURCE,
    )


def test_leaves_out_keys_of_training(model: Path, tmp_path: Path) -> None:
    """Keys of weight syncs and of training steps, which would be refused without a trainer."""
    run = tmp_path / "run"
    run.mkdir()
    settings: dict[str, Any] = {"asynchronous": True, "oversample": 2, "max_staleness": 3, "samples_per_prompt": 6}
    settings |= {"replay": "/there", "on_weight_sync": "wait", "external": ["10.0.0.5:7000"]}
    settings |= {"rebalance_experts_every": 1, "num_redundant_experts": 2, "sync_adapters_only": True}
    kept = {"sync_changes_only": True, "verify_weights_every": 3, "weight_sync_bucket_mb": 7}
    kept |= {"max_context": 192, "max_new_tokens": 40}
    (run / "config.yaml").write_text(json.dumps({"algorithm": "grpo", "rollout": settings | kept}))
    (run / "export").symlink_to(model)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    prompts = {"data": {"train": [str(tmp_path / "rows.jsonl")]}}
    target = model_sources.resolve_target(str(run))
    config = model_sources.build_config(target, prompts, [], tmp_path / "eval.yaml")
    defaults = RolloutConfig()
    for name in settings:
        assert getattr(config.rollout, name) == getattr(defaults, name) != settings[name], name
    assert not validate(config, dry_run=True).errors


def test_takes_limits_from_the_run_or_the_model(model: Path, tmp_path: Path) -> None:
    hf = json.loads((model / "config.json").read_text())
    shutil.copytree(model, tmp_path / "run/export")
    file = tmp_path / "eval.yaml"
    defaults = model_sources.build_config(
        model_sources.resolve_target(str(tmp_path / "run/export")), {}, [], file
    ).rollout
    assert hf["max_position_embeddings"] == 2048  # less than the default of max_context
    assert (defaults.max_context, defaults.max_new_tokens, defaults.tools) == (2048, 1024, ())
    of_export = model_sources.build_config(
        model_sources.resolve_target(str(model)), {}, ["rollout.max_context=96"], file
    ).rollout
    assert of_export.max_context == 96
    settings = {"max_context": 192, "max_new_tokens": 40, "tools": ["megarl.environments.ready.calculator:calculator"]}
    (tmp_path / "run/config.yaml").write_text(json.dumps({"algorithm": "ppo", "rollout": settings}))
    of_run = model_sources.build_config(
        model_sources.resolve_target(str(tmp_path / "run/export")), {}, [], file
    ).rollout
    assert (of_run.max_context, of_run.max_new_tokens, list(of_run.tools)) == (192, 40, settings["tools"])


def test_number_of_engines(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine, or with `parallel=auto` as many as the machine's GPUs hold."""
    monkeypatch.setattr(device, "count", lambda: 4)
    prompts = {"data": {"train": [str(tmp_path / "rows.jsonl")]}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")

    def engines(*overrides: str) -> tuple[int, int]:
        target = model_sources.resolve_target(str(model))
        config = model_sources.build_config(target, prompts, overrides, tmp_path / "eval.yaml")
        config = validate(config, dry_run=True).resolve(config)
        return config.parallel.world_size, config.rollout.tp

    assert engines() == (1, 1) and engines("rollout.tp=2") == (2, 2)
    assert engines("parallel=auto", "parallel.gpu_gb=8") == (4, 1)
    assert engines("parallel=auto", "parallel.gpu_gb=8", "rollout.tp=2") == (4, 2)
    assert engines("parallel=auto", "parallel.gpu_gb=8", "parallel.world_size=2") == (2, 1)


def test_reports_pass_at_k(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that writes rollouts stands in for the run."""
    rows = [{**ROW, "id": f"p{number}"} for number in range(3)]
    rows[2]["data_source"] = "aime2024"
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    greedy_calls = []

    def answers(arguments: list[str]) -> int:
        config = load_config(arguments[0], arguments[1:])
        greedy_calls.append(config)
        rollouts = []
        for group, row in enumerate(rows):
            prompt = Prompt(row["id"], ({"role": "user", "content": "1+1?"},), [1, 2], row["data_source"], "2")
            for sample in range(4):
                turns = (Turn([1, 2]), Turn([3] * (sample + 1), [0.0] * (sample + 1), True, 0))
                status = "length" if group == 2 else "stop"
                rollouts.append(Rollout(prompt, turns, status, float(sample <= group), group=group, messages=()))
        write_part(part_file(config.run.dir, 1, 0), 1, len(rollouts), range(len(rollouts)), rollouts, None, "")
        return 0

    monkeypatch.setattr(train, "main", answers)
    out = tmp_path / "out"
    arguments = [str(model), "--data", str(tmp_path / "rows.jsonl"), "--k", "2,1", "--samples", "4", "--out", str(out)]
    assert program.main([*arguments, "run.seed=7"]) == 0
    assert greedy_calls[0].rollout.samples_per_prompt == 4 and greedy_calls[0].options == {"full_dataset": True}
    tree = json.loads((out / "eval.json").read_text())
    assert (tree["k"], tree["samples"], tree["prompts"], tree["rollouts"]) == ([1, 2], 4, 3, 12)
    sources = tree["sources"]
    assert list(sources) == ["openai/gsm8k", "aime2024", "all"]
    assert sources["openai/gsm8k"]["pass_at"]["1"]["value"] == pytest.approx((1 / 4 + 2 / 4) / 2)
    assert sources["openai/gsm8k"]["pass_at"]["2"]["value"] == pytest.approx((1 / 2 + 5 / 6) / 2)
    assert sources["aime2024"]["pass_at"]["2"]["value"] == 1.0 and sources["aime2024"]["cut_off"] == 1.0
    assert sources["all"]["tokens"] == 2.5
    lines = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert [(line["id"], line["reward"], line["right"]) for line in lines[:3]] == [
        *(("p0", 1.0, True), ("p0", 0.0, False), ("p0", 0.0, False))
    ]
    assert len(lines) == 12 and lines[-1] == {
        **{"id": "p2", "data_source": "aime2024", "group": 2, "reward": 0.0, "right": False, "status": "length"},
        **{"turns": 1, "tokens": 4, "ground_truth": "2", "messages": [{"role": "user", "content": "1+1?"}]},
    }
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{model}: 4 answers to each prompt"
    assert [line.split()[0] for line in printed[2:5]] == list(sources)
