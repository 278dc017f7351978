"""What data, tokenizer, template, tools and environments decide, the dry run decides, in the words of the start."""

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
CALCULATOR, GUESS, ODD = "megarl.environments.ready.calculator:calculator", "odd_worlds:Guess", "odd_worlds:Odd"
USER = {"role": "user", "content": "What is 1+1?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "q"
    command = [sys.executable, str(ROOT / "tools/make_quickstart.py"), str(folder)]
    subprocess.run([*command, "--train", "4", "--demonstrations", "4"], cwd=ROOT, check=True, capture_output=True)
    return folder / "model"


def config(model: Path, tmp_path: Path, rows: list[dict[str, Any]], **changes: dict[str, Any]) -> Config:
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


def wrong(created: Config) -> str:
    return "; and ".join(validate(created, dry_run=True).errors)


NAMES = {"tools": ["calculator"]}
SLOW: dict[str, Any] = {"tools": [], "tool_call_parser": ""}
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], tuple[str, ...]]] = {
    "a parser of other calls": (
        [{}],
        {"rollout": {"tool_call_parser": "llama3"}},
        (
            "rollout.tool_call_parser=llama3 does not parse how the chat template",
            "set rollout.tool_call_parser to ",
            "qwen25",
        ),
    ),
    "an unknown tool": (
        [{}, {"id": "a", "tools": ["look"]}],
        {},
        ("prompt a asks for the tool look, which rollout.tools does not load",),
    ),
    "a tool that no prompt offers": (
        [NAMES, NAMES],
        {"rollout": {"tools": [CALCULATOR, "odd_tools:waits"]}},
        ("rollout.tools: no prompt offers waits of odd_tools:waits", "lists calculator; add waits to it"),
    ),
    "a column that reset needs": (
        [{}],
        {"rollout": {**SLOW, "environments": ["odd_worlds:Board"]}},
        ("has no column 'board', which reset of odd_worlds:Board needs",),
    ),
    "an environment that no prompt has": (
        [{}],
        {"rollout": {**SLOW, "environments": [GUESS, ODD]}},
        ("rollout.environments: no prompt has Odd of odd_worlds:Odd, all have Guess",),
    ),
    "no number to order by": (
        [{"level": "x"}],
        {"rollout": SLOW, "data": {"curriculum_key": "difficulty"}},
        ("data.curriculum_key=difficulty: no row of", "has a number in that column"),
    ),
    "all prompts too long": (
        [{"prompt": "many words " * 100}] * 2,
        {"rollout": SLOW},
        ("all 2 prompts are longer than 191 tokens, the shortest has ", "raise rollout.max_context"),
    ),
    "too few that are short enough": (
        [{}, {"prompt": "many words " * 100}],
        {"rollout": {**SLOW, "oversample": 2.0}, "data": {"prompts_per_step": 2}},
        ("has 4 prompts in flight, but data.train has 1",),
    ),
    "a data set of the Hub": (
        [{}],
        {"data": {"train": "openai/gsm8k"}},
        ("data.train=openai/gsm8k: no such file", "end in .jsonl or .parquet", "hf download"),
    ),
    "an address": ([{}], {"data": {"train": "s3://bucket/a.jsonl"}}, ("no such file: it is a URL", "download it")),
    "a pattern": ([{}], {"data": {"train": "data/*.jsonl"}}, ("no such file; write several as a list",)),
    "a worker's options": (
        [{}],
        {"roles": {"actor": {"worker": "odd_worlds:Board", "options": {"sped": 3}}}},
        ("the options of the role actor: ", "see its worker, Board"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_dry_run_decides(name: str, model: Path, tmp_path: Path) -> None:
    rows, changes, says = CASES[name]
    error = wrong(config(model, tmp_path, rows, **changes))
    assert all(part in error for part in says), error


def test_a_dangling_link(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to("nowhere.jsonl")
    error = wrong(config(model, tmp_path, [{}], data={"train": str(tmp_path / "link.jsonl")}))
    assert "link.jsonl: no such file: it is a link to nowhere.jsonl, which does not exist" in error


def test_a_backend_of_the_sandbox_that_there_is_not(model: Path, tmp_path: Path) -> None:
    created = config(model, tmp_path, [{}], rollout=SLOW)
    created = from_dict({"algorithm": "grpo", "model": {"path": str(model)}, "sandbox": {"backend": "docker"}})
    assert "sandbox.backend must be bubblewrap, http://..., https://... or none, not 'docker'" in wrong(created)


@pytest.mark.parametrize("algorithm", ["sft", "reward_model"])
def test_conversations_and_pairs_that_are_all_too_long(algorithm: str, model: Path, tmp_path: Path) -> None:
    words, file = "many words " * 2000, tmp_path / "own.jsonl"
    row = (
        {"prompt": "x", "response": words} if algorithm == "sft" else {"prompt": "x", "chosen": words, "rejected": "n"}
    )
    file.write_text((json.dumps(row) + "\n") * 2)
    created = from_dict({"algorithm": algorithm, "model": {"path": str(model)}, "data": {"train": str(file)}})
    said = "2 of 2 conversations are longer than" if algorithm == "sft" else "all 2 pairs are too long"
    assert said in wrong(created)


def test_what_is_well_passes_and_long_rows_are_counted(model: Path, tmp_path: Path) -> None:
    created = config(model, tmp_path, [NAMES, {}, {"prompt": "many words " * 100}], rollout={"tools": [CALCULATOR]})
    report = validate(created, dry_run=True)
    assert report.errors == []
    assert f"{tmp_path}/own.jsonl: 1 of 3 rows are too long and will be excluded" in report.warnings


def test_further_rows_are_read_while_something_is_open(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_checks, "MAX_ROWS", 2)
    long: dict[str, Any] = {"prompt": "many words " * 100}
    created = config(model, tmp_path, [long, long, long, {"level": 1}, {"tools": ["none"]}], rollout=SLOW)
    assert wrong(created) == ""  # the fourth is short enough, and nobody looks at the fifth
    created = config(model, tmp_path, [{}, {}, {}, {"level": 1}], rollout=SLOW, data={"curriculum_key": "level"})
    assert wrong(created) == ""


def test_what_is_offered_by_prompts_of_any_file() -> None:
    from megarl.config import RolloutConfig

    known = load_catalog(RolloutConfig(tools=(CALCULATOR, "odd_tools:waits"), environments=(GUESS, ODD)))
    both = [Prompt("a", (USER,), ground_truth=1), Prompt("b", (USER,), ground_truth=1, extra={"environment": "Odd"})]
    data_checks.check_offered(both, known)
    listing = [Prompt(item.id, item.messages, ground_truth=1, tools=("calculator",), extra=item.extra) for item in both]
    with pytest.raises(
        ConfigError, match="rollout.tools: no prompt offers waits of odd_tools:waits: .* lists calculator"
    ):
        data_checks.check_offered(listing, known)
    with pytest.raises(ConfigError, match="rollout.environments: no prompt has Odd of odd_worlds:Odd, all have Guess"):
        data_checks.check_offered(both[:1], known)
    agent = load_catalog(RolloutConfig(tools=(CALCULATOR,), environments=("agents_of_tests:calculating",)))
    with pytest.raises(ConfigError, match="no prompt offers calculator .* all prompts are for an agent, .* remove it"):
        data_checks.check_offered(both[:1], agent)
