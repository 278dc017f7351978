"""`--show-prompt`: the ids that a conversation sends first, what the text shows, and mistakes in one line."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
import tiny_models
from scripted import ScriptedPolicy, parse

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import Config, ConfigError, from_dict
from megarl.controllers.controller import load_requirements
from megarl.data.images import ImageFormat, ImageProcessor
from megarl.dry_run import prompt_preview
from megarl.dry_run.data_checks import read_chat
from megarl.dry_run.prompt_preview import DataRow, describe_row, find_row, format_ids, format_text, read_prompt
from megarl.environments.catalog import load_tools
from megarl.environments.process_sessions import EnvironmentPool
from megarl.item_reader import ItemReader
from megarl.models.registry import load_hf_config
from megarl.rollout.conversation import RolloutContext, run_conversation
from megarl.rollout.partial_rollouts import PartialRollout
from megarl.types import as_token_ids

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
CALCULATOR = "megarl.environments.ready.calculator:calculator"
SYSTEM = {"role": "system", "content": "Be brief."}
ROWS: list[dict[str, Any]] = [
    {"prompt": "What is 1+1?", "ground_truth": 2, "level": [1, 2]},
    {"prompt": [SYSTEM, {"role": "user", "content": "What is 2+2?"}], "ground_truth": "4", "data_source": "sums"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "q"
    command = [sys.executable, str(ROOT / "tools/make_quickstart.py"), str(folder)]
    subprocess.run([*command, "--train", "4", "--demonstrations", "4"], cwd=ROOT, check=True, capture_output=True)
    return folder / "model"


def write_rows(file: Path, *rows: dict[str, Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def make_config(model: Path | str, *files: str, algorithm: str = "grpo", **rollout: Any) -> Config:
    sections = {
        "algorithm": algorithm,
        "model": {"path": str(model)},
        "rollout": {"max_context": 192, "max_new_tokens": 40, "tool_timeout": 60.0} | rollout,
        "data": {"train": list(files)},
    }
    return from_dict(sections)


def send_first_request(config: Config, number: int) -> list[int]:
    """Return the ids that a conversation about an item of the run's own loader sends first."""
    declared, hf = load_requirements(config), load_hf_config(config.model.path)
    chat = read_chat(hf, config, declared)
    job: Any = SimpleNamespace(rank=0, world=1)
    items = ItemReader(config, hf, chat, job).load_prompts(config.data.train)
    policy = ScriptedPolicy("bye")

    async def run() -> None:
        async with aclosing(EnvironmentPool(chat.catalog, 60.0, 1)) as pool:
            context = RolloutContext(chat, pool, parse, config.rollout)
            await run_conversation(PartialRollout.begin(items[number], 9), policy, context, {})

    asyncio.run(run())
    return policy.requests[0][0]


@pytest.mark.parametrize(
    ("number", "rollout", "words"),
    [
        (0, {"tools": [CALCULATOR]}, ["calculator", "What is 1+1?"]),
        (1, {"tools": [CALCULATOR]}, ["Be brief.", "calculator", "What is 2+2?"]),
        (0, {}, ["What is 1+1?"]),
        (2, {"environments": ["toy_environments:Guess"]}, ["Play.", "I think of a number", "Compare a number"]),
        (3, {"environments": ["toy_environments:Found"]}, ["Play.", '"look"']),
    ],
)
def test_ids_are_those_that_the_policy_gets(
    number: int, rollout: dict[str, Any], words: list[str], model: Path, tmp_path: Path
) -> None:
    rows = [*ROWS, {"prompt": "Play.", "ground_truth": 62}, {"prompt": "Play.", "ground_truth": ["look"]}]
    if "environments" in rollout:  # whose `reset` takes one kind of ground truth
        rows = [rows[number]] * 4
    config = make_config(model, write_rows(tmp_path / "a.jsonl", *rows), **rollout)
    chat = read_chat(load_hf_config(model), config, load_requirements(config))
    prompt = read_prompt(config, chat, find_row(config, number)).prompt
    sent = send_first_request(config, number)
    assert prompt.token_ids.tolist() == sent and len(sent) > 10
    text = describe_row(config, number)
    assert f"\n{len(sent)} tokens\n" in text and all(word in text for word in words), text


def test_shows_row_messages_tools_and_room(model: Path, tmp_path: Path) -> None:
    config = make_config(model, write_rows(tmp_path / "a.jsonl", *ROWS), tools=[CALCULATOR])
    lines = describe_row(config, 0).splitlines()
    assert lines[:4] == [
        f"row 0 of data.train: {tmp_path}/a.jsonl:1",
        "  id            a-0",
        "  ground_truth  2",
        "  level         [1, 2]",
    ]
    messages, tools, text = (lines.index(title) for title in ("messages", "tools", "text"))
    assert lines[messages + 1] == "  user: What is 1+1?"
    assert json.loads(lines[tools + 1])["function"]["name"] == "calculator"
    assert lines[text + 1].startswith("  <|im_start|>")
    (title,) = [line for line in lines if line.endswith(" tokens")]
    count = int(title.split()[0])
    assert lines[-1] == (
        f"room for the answer: 40 tokens in the first turn (rollout.max_context=192 leaves {192 - count}, "
        "rollout.max_new_tokens=40)"
    )
    ids = lines[lines.index(title) + 1 : lines.index("", lines.index(title))]
    assert len(" ".join(ids).split()) == count
    assert "\n  data_source   sums\n" in describe_row(config, 1)


def test_says_that_a_long_prompt_is_excluded(model: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", {"prompt": "1" * 400, "ground_truth": "3" * 1500}, ROWS[0])
    text = describe_row(make_config(model, file), 0)
    assert text.endswith("room for the answer: none, so the prompt is excluded; raise rollout.max_context=192")
    assert f"ground_truth  {'3' * 1000}... (1500 characters)\n" in text


def test_counts_rows_over_all_files(model: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    files = write_rows(tmp_path / "a.jsonl", *ROWS), write_rows(tmp_path / "b" / "a.jsonl", ROWS[1])
    config = make_config(model, *files)
    assert "\n  id            b/a-0\n" in describe_row(config, 2)
    with pytest.raises(ConfigError, match=r"^--show-prompt 3: data.train has rows 0 to 2$"):
        describe_row(config, 3)


def test_names_the_agent_of_a_row(model: Path, tmp_path: Path) -> None:
    config = make_config(model, write_rows(tmp_path / "a.jsonl", *ROWS), environments=["example_agents:calculating"])
    assert "environment   example_agents:calculating: an agent, which writes its requests" in describe_row(config, 0)


def test_writes_image_tokens_once(tmp_path: Path) -> None:
    """A picture of 16 x 8 pixels has 4 x 2 patches, of which 2 x 2 make a token."""
    tokenizer = tiny_models.tokenizer()
    names = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    settings = {"patch_size": 2, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}}
    images = ImageFormat(*names, tokenizer.convert_tokens_to_ids(names[1]), ImageProcessor("", settings, 2))
    chat = ChatTemplate(tokenizer, load_tools([CALCULATOR]), images=images)
    stream = io.BytesIO()
    PIL.Image.new("RGB", (16, 8)).save(stream, "PNG")
    row = {"prompt": "<image>What is it?", "ground_truth": "x", "images": [{"bytes": stream.getvalue()}]}
    preview = read_prompt(make_config("", "a.jsonl"), chat, DataRow(Path("a.jsonl"), "", 0, "a.jsonl:1", row))
    (image,) = preview.prompt.images
    assert preview.prompt.token_ids[image.start : image.stop].tolist() == [images.token_id] * image.num_tokens
    assert (image.num_tokens, image.grid[1:]) == (8, (4, 8))
    text = format_text(chat, preview.prompt.token_ids, preview.prompt.images)
    assert "<|vision_start|><|image_pad|>*8<|vision_end|>What is it?" in text
    assert f" {images.token_id}*8 " in format_ids(preview.prompt.token_ids)


def test_marks_trained_turns(model: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "2"}]
    config = make_config(model, write_rows(tmp_path / "a.jsonl", {"messages": messages}), algorithm="sft")
    lines = describe_row(config, 0).splitlines()
    trained = lines.index("trained: 2 tokens")
    assert lines[trained + 1] == "  2<|im_end|>" and lines.index("not trained: 11 tokens") < trained
    assert lines[-1] == "13 tokens, 2 of them trained"


def test_shows_both_sides_of_a_pair(model: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", {"prompt": "What is 1+1?", "chosen": "2", "rejected": "33"})
    text = describe_row(make_config(model, file, algorithm="dpo"), 0)
    chosen, rejected = text.split("--- rejected")
    assert "trained: 2 tokens\n  2<|im_end|>" in chosen and "trained: 3 tokens\n  33<|im_end|>" in rejected
    assert "scored: 2 tokens" in describe_row(make_config(model, file, algorithm="reward_model"), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no tokenizer", "bare has no tokenizer; put tokenizer.json beside config.json"),
        ("no folder", "model.path=nowhere: no such folder"),
        ("no model", "--show-prompt: model.path is not set"),
        ("no file", "no data file"),
        ("no data", "--show-prompt: data.train is not set"),
        ("failing reset", "a.jsonl:1: Odd: reset raised ValueError: it is odd"),
    ],
)
def test_mistakes_are_one_line(change: str, message: str, model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model / name).read_bytes())
    file = write_rows(tmp_path / "a.jsonl", {"prompt": "x", "ground_truth": "reset raise"})
    config = {
        "no tokenizer": make_config(bare, file),
        "no folder": make_config("nowhere", file),
        "no model": make_config("", file),
        "no file": make_config(model, str(tmp_path / "none.jsonl")),
        "no data": make_config(model),
        "failing reset": make_config(model, file, environments=["toy_environments:Odd"]),
    }[change]
    with pytest.raises(ConfigError) as error:
        describe_row(config, 0)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_repeated_ids_are_counted() -> None:
    assert format_ids(as_token_ids([7, 7, 7, 5, 5, 5, 5, 6])) == "7 7 7 5*4 6"
    assert max(map(len, format_ids(as_token_ids(range(1000))).splitlines())) <= 110


def test_algorithms_with_requests_have_no_prompts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(model, "a.jsonl")
    declared = replace(load_requirements(config), item="requests", name="tinker")
    monkeypatch.setattr(prompt_preview, "load_requirements", lambda config: declared)
    with pytest.raises(ConfigError, match="^--show-prompt: algorithm=tinker gets requests from clients, so there is"):
        describe_row(config, 0)
