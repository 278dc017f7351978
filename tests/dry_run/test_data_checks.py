"""The dry run checks data, tokenizer, chat template, tools and environments with the start's error messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config, ConfigError, from_dict
from megarl.dry_run import data_checks
from megarl.dry_run.validation import validate
from megarl.environments.catalog import load_catalog
from megarl.types import Prompt

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]
CALCULATOR, GUESS, ODD = (
    "megarl.environments.ready.calculator:calculator",
    "toy_environments:Guess",
    "toy_environments:Odd",
)
USER = {"role": "user", "content": "What is 1+1?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "q"
    command = [sys.executable, str(ROOT / "tools/make_quickstart.py"), str(folder)]
    subprocess.run([*command, "--train", "4", "--demonstrations", "4"], cwd=ROOT, check=True, capture_output=True)
    return folder / "model"


def make_config(model: Path, tmp_path: Path, rows: list[dict[str, Any]], **changes: dict[str, Any]) -> Config:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"prompt": "What is 1+1?", "ground_truth": 2, **row}) + "\n" for row in rows))
    rollout = {"max_context": 192, "max_new_tokens": 40, "tools": [CALCULATOR], "tool_call_parser": "qwen25"}
    return from_dict(
        {
            "algorithm": "grpo",
            "run": {"dir": str(tmp_path / "run")} | changes.get("run", {}),
            "model": {"path": str(model)},
            "rollout": rollout | changes.get("rollout", {}),
            "data": {"train": str(file)} | changes.get("data", {}),
            "reward": {"functions": ["megarl.rewards.arithmetic:arithmetic"]},
            "roles": changes.get("roles", {}),
        }
    )


def dry_run_errors(config: Config) -> str:
    return "; and ".join(validate(config, dry_run=True).errors)


WITH_CALCULATOR = {"tools": ["calculator"]}
NO_TOOLS: dict[str, Any] = {"tools": [], "tool_call_parser": ""}
INVALID: dict[str, tuple[list[dict[str, Any]], dict[str, Any], tuple[str, ...]]] = {
    "tool call parser does not match the template": (
        [{}],
        {"rollout": {"tool_call_parser": "llama3"}},
        (
            "rollout.tool_call_parser=llama3 does not parse how the chat template",
            "set rollout.tool_call_parser to ",
            "qwen25",
        ),
    ),
    "prompt asks for an unknown tool": (
        [{}, {"id": "a", "tools": ["look"]}],
        {},
        ("prompt a asks for the tool look, which rollout.tools does not load",),
    ),
    "no prompt offers the tool": (
        [WITH_CALCULATOR, WITH_CALCULATOR],
        {"rollout": {"tools": [CALCULATOR, "misbehaving_tools:waits"]}},
        ("rollout.tools: no prompt offers waits of misbehaving_tools:waits", "lists calculator; add waits to it"),
    ),
    "column for reset is missing": (
        [{}],
        {"rollout": {**NO_TOOLS, "environments": ["toy_environments:Board"]}},
        ("has no column 'board', which reset of toy_environments:Board needs",),
    ),
    "no prompt has the environment": (
        [{}],
        {"rollout": {**NO_TOOLS, "environments": [GUESS, ODD]}},
        ("rollout.environments: no prompt has Odd of toy_environments:Odd, all have Guess",),
    ),
    "curriculum column has no number": (
        [{"level": "x"}],
        {"rollout": NO_TOOLS, "data": {"curriculum_key": "difficulty"}},
        ("data.curriculum_key=difficulty: no row of", "has a number in that column"),
    ),
    "all prompts are too long": (
        [{"prompt": "many words " * 100}] * 2,
        {"rollout": NO_TOOLS},
        ("all 2 prompts are longer than 191 tokens, the shortest has ", "raise rollout.max_context"),
    ),
    "too few short prompts": (
        [{}, {"prompt": "many words " * 100}],
        {"rollout": {**NO_TOOLS, "oversample": 2.0}, "data": {"prompts_per_step": 2}},
        ("has 4 prompts in flight, but data.train has 1",),
    ),
    "Hub data set": (
        [{}],
        {"data": {"train": "openai/gsm8k"}},
        ("data.train=openai/gsm8k: no such file", "end in .jsonl or .parquet", "hf download"),
    ),
    "URL": ([{}], {"data": {"train": "s3://bucket/a.jsonl"}}, ("no such file: it is a URL", "download it")),
    "glob pattern": ([{}], {"data": {"train": "data/*.jsonl"}}, ("no such file; write several as a list",)),
    "worker options": (
        [{}],
        {"roles": {"actor": {"worker": "toy_environments:Board", "options": {"sped": 3}}}},
        ("the options of the role actor: ", "see its worker, Board"),
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_dry_run_finds_invalid_data_and_tools(name: str, model: Path, tmp_path: Path) -> None:
    rows, changes, messages = INVALID[name]
    error = dry_run_errors(make_config(model, tmp_path, rows, **changes))
    assert all(part in error for part in messages), error


def test_dangling_symlink_is_explained(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to("nowhere.jsonl")
    error = dry_run_errors(make_config(model, tmp_path, [{}], data={"train": str(tmp_path / "link.jsonl")}))
    assert "link.jsonl: no such file: it is a link to nowhere.jsonl, which does not exist" in error


def test_unknown_sandbox_backend_is_rejected(model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path, [{}], rollout=NO_TOOLS)
    config = from_dict({"algorithm": "grpo", "model": {"path": str(model)}, "sandbox": {"backend": "docker"}})
    assert "sandbox.backend must be bubblewrap, http://..., https://... or none, not 'docker'" in dry_run_errors(config)


@pytest.mark.parametrize("algorithm", ["sft", "reward_model"])
def test_only_overlong_conversations_or_pairs_are_rejected(algorithm: str, model: Path, tmp_path: Path) -> None:
    text, file = "many words " * 2000, tmp_path / "own.jsonl"
    row = {"prompt": "x", "response": text} if algorithm == "sft" else {"prompt": "x", "chosen": text, "rejected": "n"}
    file.write_text((json.dumps(row) + "\n") * 2)
    config = from_dict({"algorithm": algorithm, "model": {"path": str(model)}, "data": {"train": str(file)}})
    message = "2 of 2 conversations are longer than" if algorithm == "sft" else "all 2 pairs are too long"
    assert message in dry_run_errors(config)


def test_valid_configuration_passes_and_counts_long_rows(model: Path, tmp_path: Path) -> None:
    config = make_config(
        model, tmp_path, [WITH_CALCULATOR, {}, {"prompt": "many words " * 100}], rollout={"tools": [CALCULATOR]}
    )
    report = validate(config, dry_run=True)
    assert report.errors == []
    assert f"{tmp_path}/own.jsonl: 1 of 3 rows are too long and will be excluded" in report.warnings


def test_reads_further_rows_until_checks_are_settled(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_checks, "MAX_ROWS", 2)
    long: dict[str, Any] = {"prompt": "many words " * 100}
    config = make_config(model, tmp_path, [long, long, long, {"level": 1}, {"tools": ["none"]}], rollout=NO_TOOLS)
    assert dry_run_errors(config) == ""  # the fourth is short enough, so the fifth is not read
    config = make_config(
        model, tmp_path, [{}, {}, {}, {"level": 1}], rollout=NO_TOOLS, data={"curriculum_key": "level"}
    )
    assert dry_run_errors(config) == ""


def test_check_offered() -> None:
    from megarl.config import RolloutConfig

    catalog = load_catalog(RolloutConfig(tools=(CALCULATOR, "misbehaving_tools:waits"), environments=(GUESS, ODD)))
    prompts = [Prompt("a", (USER,), ground_truth=1), Prompt("b", (USER,), ground_truth=1, extra={"environment": "Odd"})]
    data_checks.check_offered(prompts, catalog)
    with_tools = [
        Prompt(item.id, item.messages, ground_truth=1, tools=("calculator",), extra=item.extra) for item in prompts
    ]
    with pytest.raises(
        ConfigError, match="rollout.tools: no prompt offers waits of misbehaving_tools:waits: .* lists calculator"
    ):
        data_checks.check_offered(with_tools, catalog)
    with pytest.raises(
        ConfigError, match="rollout.environments: no prompt has Odd of toy_environments:Odd, all have Guess"
    ):
        data_checks.check_offered(prompts[:1], catalog)
    agent = load_catalog(RolloutConfig(tools=(CALCULATOR,), environments=("example_agents:calculating",)))
    with pytest.raises(ConfigError, match="no prompt offers calculator .* all prompts are for an agent, .* remove it"):
        data_checks.check_offered(prompts[:1], agent)
