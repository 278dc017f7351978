"""Prompts, conversations and preferences that a run reads from one or several files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megarl.config import ConfigError, from_dict
from megarl.data.loader import PromptLoader
from megarl.item_reader import ItemReader, PromptLimit, _format_passes
from megarl.models.registry import load_hf_config
from megarl.parallel import ranks

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parent.parent


class CharTokenizer:
    """Token ids are character codes; a message is rendered as `(role:content;`."""

    eos_token = ";"

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tools: Any, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        text = "".join(f"({message['role'][0]}:{message['content']};" for message in messages)
        return text + ("(a:" if add_generation_prompt else "")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(char) for char in text]


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Returns a function that makes an ItemReader from keys of `data`, for files in tmp_path."""
    monkeypatch.setattr(ranks, "split_work", lambda count, work: [work(number) for number in range(count)])
    monkeypatch.chdir(tmp_path)

    def make(**data: Any) -> ItemReader:
        config = from_dict({"data": data, "rollout": {"max_context": 10}, "run": {"num_rollout": 10}})
        chat: Any = SimpleNamespace(
            encode_prompt=lambda prompt: [0] * len(prompt.messages[0]["content"]),
            tokenizer=CharTokenizer(),
            images=None,
        )
        job: Any = SimpleNamespace(rank=0, world=1)
        return ItemReader(config, load_hf_config(ROOT / "configs/models/qwen2.5_0.5b.json"), chat, job)

    return make


def write_jsonl(name: str, *rows: dict[str, Any]) -> str:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def prompt_rows(count: int, **extra: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"p{number}", "ground_truth": number, **extra} for number in range(count)]


def test_prompts_must_fit_all_models(reader: Any) -> None:
    """Of lengths 1 to 4, another model writes three tokens per letter and has room for eight."""
    file = write_jsonl("a.jsonl", *({"prompt": "x" * length, "label": 1} for length in range(1, 5)))

    def limit(tokens: int) -> PromptLimit:
        return PromptLimit(lambda prompt: [1] * 3 * len(prompt.messages[0]["content"]), tokens, "roles.b.max_context")

    flow = reader(train=file)
    result = flow.load_prompts(file, limits=[limit(8)])
    assert [(prompt.id, len(prompt.token_ids)) for prompt in result] == [("a-0", 1), ("a-1", 2)]
    assert flow.notes[0].startswith("a.jsonl: 2 of 4 prompts are longer")
    with pytest.raises(
        ConfigError, match=r"^a\.jsonl: all 4 prompts .* 2 tokens, .* has 3; raise roles\.b\.max_context$"
    ):
        flow.load_prompts(file, limits=[limit(2)])


def test_reads_one_file(reader: Any) -> None:
    file = write_jsonl(
        "a.jsonl", *prompt_rows(2), {"prompt": "x" * 10, "label": 1}, {"prompt": "y", "label": 1, "id": 7}
    )
    flow = reader(train=file)
    result = flow.load_prompts(flow.config.data.train)
    assert [prompt.id for prompt in result] == ["a-0", "a-1", "7"] and result[0].data_source == ""
    assert flow.load_prompts(file) == result and result.keys is None
    assert flow.notes[:2] == [
        "a.jsonl: 1 of 4 prompts are longer than rollout.max_context and are excluded",
        "data.train: 3 rows, 213.33 passes in 10 steps of 64",
    ]


def test_reports_no_passes_over_a_whole_data_set(reader: Any) -> None:
    flow = reader(train=write_jsonl("a.jsonl", *prompt_rows(3)))
    assert len(flow.load_prompts(flow.config.data.train, whole=True)) == 3
    assert flow.notes == ["3 prompts of a.jsonl"]


def test_names_ids_and_sources_after_their_files(reader: Any) -> None:
    files = [
        write_jsonl("m/train.jsonl", *prompt_rows(2, data_source="gsm8k")),
        write_jsonl("n/train.jsonl", *prompt_rows(2)),
    ]
    files.append(write_jsonl("own.jsonl", {"prompt": "x", "ground_truth": 1, "id": 0}))
    flow = reader(train=files, mixture_weights=[1, 1, 2])
    result = flow.load_prompts(flow.config.data.train)
    assert result.names == ("m/train", "n/train", "own") and result.sizes == (2, 2, 1)
    assert [prompt.id for prompt in result] == ["m/train-0", "m/train-1", "n/train-0", "n/train-1", "own-0"]
    assert [prompt.data_source for prompt in result] == ["gsm8k", "gsm8k", "n/train", "n/train", "own"]
    loader = PromptLoader.from_config(result, flow.config)
    assert [prompt.id for prompt in loader.next_items(4)].count("own-0") == 2
    passes = "m/train 2 rows, 80.00 passes; n/train 2 rows, 80.00 passes; own 1 rows, 320.00 passes"
    assert flow.notes == [f"data.train: {passes} in 10 steps of 64"]
    assert loader.epoch_metrics() == {"data/epoch/m/train": 0.5, "data/epoch/n/train": 0.5, "data/epoch/own": 2.0}


def test_rejects_duplicate_ids(reader: Any) -> None:
    files = [write_jsonl("a.jsonl", *prompt_rows(1, id="b-1")), write_jsonl("a-b.jsonl", *prompt_rows(2))]
    flow = reader(train=files)
    with pytest.raises(ConfigError, match=r"a-b.jsonl: the id 'a-b-1' is already used by a row of a.jsonl; rename"):
        flow.load_prompts(files)


def test_curriculum_keys_stay_aligned_with_prompts(reader: Any) -> None:
    rows = [{**row, "level": 9 - number} for number, row in enumerate(prompt_rows(3))]
    rows.insert(1, {"prompt": "x" * 10, "ground_truth": 1, "level": 100})
    rows.insert(3, {"prompt": "y", "ground_truth": 1})
    flow = reader(
        train=write_jsonl("a.jsonl", *rows),
        eval=write_jsonl("e.jsonl", *prompt_rows(1, level="hard")),
        curriculum_key="level",
    )
    result = flow.load_prompts(flow.config.data.train)
    assert np.array_equal(result.keys, [9, 8, np.nan, 7], equal_nan=True)
    assert flow.load_prompts(flow.config.data.eval).keys is None  # the curriculum only orders training data


def test_rejects_a_curriculum_key_that_no_file_has(reader: Any) -> None:
    files = [write_jsonl("a.jsonl", *prompt_rows(2)), write_jsonl("b.jsonl", *prompt_rows(2))]
    flow = reader(train=files, curriculum_key="level")
    with pytest.raises(ConfigError, match="data.curriculum_key=level: no row of a.jsonl, b.jsonl has a number"):
        flow.load_prompts(flow.config.data.train)
    flow = reader(train=[files[0], write_jsonl("c.jsonl", *prompt_rows(1, level=3))], curriculum_key="level")
    assert np.array_equal(flow.load_prompts(flow.config.data.train).keys, [np.nan, np.nan, 3], equal_nan=True)


def test_reads_conversations_in_several_formats(reader: Any) -> None:
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    long = {"messages": [{"role": "user", "content": "x" * 40000}, conversation[1]], "n": 5}
    files = [
        write_jsonl("a.jsonl", {"messages": conversation, "n": 2}, long, {"messages": conversation, "id": "z"}),
        write_jsonl("b.jsonl", {"q": "hi", "a": "yes", "n": 1, "data_source": "own"}),
    ]
    flow = reader(train=files, curriculum_key="n", prompt_key="q", label_key="a")
    result = flow.load_conversations(flow.config.data.train)
    assert result.names == ("a", "b") and len(result) == 3
    assert [conversation.prompt.data_source for conversation in result] == ["a", "a", "own"]
    assert [conversation.prompt.id for conversation in result] == ["a.jsonl:1", "a-z", "b.jsonl:1"]
    assert ["".join(map(chr, conversation.token_ids)) for conversation in result] == ["(u:hi;(a:yes;"] * 3
    assert np.array_equal(result.keys, [2, np.nan, 1], equal_nan=True)
    assert "a.jsonl: 1 of 3 conversations are longer than the model's 32768 positions and are excluded" in flow.notes


def test_reads_preferences_of_several_files(reader: Any) -> None:
    pair = {"prompt": "hi", "chosen": "yes", "rejected": "no"}
    hh = {"chosen": "\n\nHuman: hi\n\nAssistant: yes", "rejected": "\n\nHuman: hi\n\nAssistant: no", "n": 1}
    flow = reader(
        train=[write_jsonl("a.jsonl", pair), write_jsonl("b.jsonl", hh)], curriculum_key="n", mixture_weights=[1, 3]
    )
    result = flow.load_preferences(flow.config.data.train)
    assert [item.chosen.prompt.data_source for item in result] == ["a", "b"]
    assert ["".join(map(chr, item.rejected.token_ids)) for item in result] == ["(u:hi;(a:no;"] * 2
    assert np.array_equal(result.keys, [np.nan, 1], equal_nan=True)


def test_formats_small_numbers_of_passes() -> None:
    assert [_format_passes(share) for share in (320.0, 1.5, 0.25, 0.004, 0.0)] == [
        "320.00",
        "1.50",
        "0.25",
        "0.004",
        "0",
    ]
