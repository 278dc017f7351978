"""Expansion of `~` and variables in paths, and the errors of paths that cannot be expanded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megarl.config import Config, ConfigError, RunConfig, from_dict, load_config, to_dict
from megarl.config.command_line import Parser, parse_path_text
from megarl.config.paths import expand, expand_config_paths, expand_spec
from megarl.config.strict import collect_key_types, is_path_type, list_keys
from megarl.data.table import open_parquet

pytestmark = pytest.mark.alone

# Text keys that are not paths. A new text key belongs here, or is a PathStr.
TEXT_KEYS = {
    "algorithm",
    "data.label_key",
    "data.curriculum_key",
    "data.prompt_key",
    "loss.policy_loss",
    "lora.target_modules",
    "reward.functions",
    "rollout.environments",
    "rollout.pass_env",
    "rollout.engine",
    "rollout.external",
    "rollout.tool_call_parser",
    "rollout.tools",
    "sandbox.backend",
    "track.webhook",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("NOWHERE", raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_every_text_key_is_a_path_or_listed() -> None:
    text = {key for key, kind in collect_key_types(Config).items() if "str" in str(kind) and "Literal" not in str(kind)}
    mappings = {key for key, value in list_keys(Config()) if isinstance(value, dict)}
    paths = {key for key, kind in collect_key_types(Config).items() if is_path_type(kind)}
    assert text - mappings - paths == TEXT_KEYS
    assert not paths & TEXT_KEYS


def test_expands_every_path_key(home: Path) -> None:
    for key, kind in collect_key_types(Config).items():
        if is_path_type(kind):
            section, _, name = key.partition(".")
            if "." in name:
                continue
            config = from_dict({section: {name: "~/x"}})
            value = getattr(getattr(config, section), name)
            assert value in (f"{home}/x", (f"{home}/x",)), key


def test_expands_paths_in_files_overrides_and_lists(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: {path: ~/models/m}\ndata: {train: [$SCRATCH/a.jsonl, '${SCRATCH}/b.jsonl', c.jsonl]}\n")
    config = load_config(file, ["run.dir=~/runs/x", "critic.path=$SCRATCH", "rollout.replay=~/runs/y@7"])
    assert config.run.dir == f"{home}/runs/x" and config.model.path == f"{home}/models/m"
    assert config.data.train == ("/scratch/me/a.jsonl", "/scratch/me/b.jsonl", "c.jsonl")
    assert config.critic.path == "/scratch/me" and config.rollout.replay == f"{home}/runs/y@7"
    saved = tmp_path / "saved.yaml"
    saved.write_text(yaml.safe_dump(to_dict(config)))
    assert load_config(saved) == config


def test_expands_the_path_of_the_config_file(home: Path) -> None:
    (home / "config.yaml").write_text("run: {dir: a}")
    assert load_config("~/config.yaml").run.dir == "a"


def test_expands_paths_in_passthrough_mappings(home: Path) -> None:
    config = from_dict(
        {
            "roles": {"teacher": {"model": "~/big", "options": {"word_file": "$SCRATCH/w", "pattern": "^~a$HOME"}}},
            "rollout": {"sglang": {"download_dir": "~/hub", "chat_template": "$content"}},
            "model": {"megatron": {"config_logger_dir": "${SCRATCH}/log"}},
        }
    )
    assert config.roles["teacher"]["model"] == f"{home}/big"
    assert config.roles["teacher"]["options"] == {"word_file": "/scratch/me/w", "pattern": "^~a$HOME"}
    assert config.rollout.sglang == {"download_dir": f"{home}/hub", "chat_template": "$content"}
    assert config.model.megatron == {"config_logger_dir": "/scratch/me/log"}


@pytest.mark.parametrize(
    ("spec", "expanded"),
    [
        ("lab.tools:search", "lab.tools:search"),
        ("mcp:~/servers.json", "mcp:{home}/servers.json"),
        ("harbor:$SCRATCH/tasks", "harbor:/scratch/me/tasks"),
        ("verifiers:gsm8k", "verifiers:gsm8k"),
        ("program:node  ~/agent.js --out $SCRATCH/o", "program:node  {home}/agent.js --out /scratch/me/o"),
        ("program:bash -c 'echo $NOWHERE ~'", "program:bash -c 'echo $NOWHERE ~'"),
        ('program:sh --x="a $NOWHERE b" a\\$b ~/y', 'program:sh --x="a $NOWHERE b" a\\$b {home}/y'),
        ("program:sh 'half of a $NOWHERE", "program:sh 'half of a $NOWHERE"),
    ],
)
def test_expands_specs(spec: str, expanded: str, home: Path) -> None:
    assert expand_spec(spec, "rollout.environments[0]") == expanded.format(home=home)
    if "half" not in spec:
        assert from_dict({"rollout": {"environments": [spec]}}).rollout.environments == (expanded.format(home=home),)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("run.dir", "$NOWHERE/x", "run.dir: the environment variable NOWHERE is not set; set it"),
        ("run.dir", "${NOWHERE}", "run.dir: the environment variable NOWHERE is not set"),
        ("run.dir", "$EMPTY/x", r"run.dir: the environment variable EMPTY is not set \(it is empty\)"),
        ("run.dir", "$NESTED/x", "run.dir: the environment variable NESTED refers to another variable"),
        ("run.dir", "a/${SCRATCH:-b}", r"run.dir: '\$\{SCRATCH:-b\}' is not a variable; write \$NAME"),
        ("run.dir", "a/${SCRATCH", r"run.dir: '\$\{SCRATCH' is not a variable"),
        (
            "run.dir",
            "~nobody-of-that-name/x",
            "run.dir: '~nobody-of-that-name/x' begins with ~, but that is not a user's",
        ),
        ("run.dir", "./~/x", "run.dir: './~/x' begins with ~"),
        ("data.train", "[a, $NOWHERE/b]", r"data.train\[1\]: the environment variable NOWHERE is not set"),
        ("roles.teacher.model", "$NOWHERE", "roles.teacher.model: the environment variable NOWHERE is not set"),
        ("rollout.tools", "['mcp:$NOWHERE']", r"rollout.tools\[0\]: the environment variable NOWHERE is not set"),
        ("run.dir", "$BROKEN", "run.dir must be text without control characters"),
    ],
)
def test_rejects_paths_that_cannot_be_expanded(
    key: str, text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("NESTED", "/a/$SCRATCH")
    monkeypatch.setenv("BROKEN", "a\nb")
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "empty.yaml", [f"{key}={text}"])


def test_keeps_literal_dollars_and_tildes(tmp_path: Path) -> None:
    for text in ("a$", "cost$.jsonl", "a~b", "runs/~x", "a$1", "s3://bucket/$"):
        assert expand(text, "run.dir") == text
    config = from_dict({"data": {"prompt_key": "$x"}, "loss": {"policy_loss": "~a"}})
    assert config.data.prompt_key == "$x" and config.loss.policy_loss == "~a"


def test_expands_a_tilde_in_a_variable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "~/scratch")
    assert expand("$SCRATCH/x", "run.dir") == f"{home}/scratch/x"


def test_expands_configs_built_in_python_once(home: Path) -> None:
    unexpanded = dataclasses.replace(Config(), run=RunConfig(dir="~/x"), rollout=Config().rollout)
    expanded_once = expand_config_paths(unexpanded)
    assert expanded_once.run.dir == f"{home}/x" and expand_config_paths(expanded_once) == expanded_once


def test_parser_expands_path_arguments(home: Path) -> None:
    parser = Parser("x")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=parse_path_text)
    options = parser.parse_args(["--out=~/x", "--model=$SCRATCH/m"])
    assert options.out == home / "x" and options.model == "/scratch/me/m"
    with pytest.raises(ConfigError, match="argument --out: the environment variable NOWHERE is not set"):
        parser.parse_args(["--out=$NOWHERE/x"])


def test_parquet_reader_keeps_a_literal_tilde(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, value in ((tmp_path / "~", 1), (home, 2)):
        folder.mkdir(exist_ok=True)
        pq.write_table(pa.table({"a": [value]}), folder / "t.parquet")
    with open_parquet(Path("~/t.parquet")) as table:
        assert table.read().to_pylist() == [{"a": 1}]
