"""Search in the text of answers, and beginnings of prompts."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.observe.rollout_log import part_file
from megarl.types import Rollout
from megarl.view.prompt_texts import PromptTexts, begin_prompt
from megarl.view.query import parse_condition
from megarl.view.rollout_index import IndexReader
from megarl.view.text_search import CHARS_AFTER, CHARS_BEFORE, read_newest, search

sys.path.append(str(Path(__file__).resolve().parent))

import example_run  # noqa: E402

pytestmark = pytest.mark.alone

LONG = f'{"x" * 200} The Answer is "Ünïcode\\n 42" {"y" * 200}'
TOOL_RESULT = {"role": "tool", "content": "answer is seven"}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": "seven"}'}}


def make_rollout(step: int, number: int, *messages: dict[str, Any]) -> Rollout:
    rollout = example_run.make_rollout(step, number, float(number))
    prompt = dataclasses.replace(rollout.prompt, messages=({"role": "user", "content": f"what is {number}, asker?"},))
    return dataclasses.replace(rollout, prompt=prompt, messages=(*prompt.messages, *messages))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = example_run.write_run(tmp_path / "run", steps=1)
    for step in (2, 3):
        answers = [
            make_rollout(step, 0, {"role": "assistant", "content": LONG}),
            make_rollout(step, 1, {"role": "assistant", "content": "", "tool_calls": [CALL]}),
            make_rollout(step, 2, {"role": "assistant", "content": "no"}, TOOL_RESULT),
            make_rollout(step, 3, {"role": "assistant", "content": "Nothing. nothing"}),
        ]
        for rank in range(2):
            example_run.write_step(run, step, answers, rank, 2)
    return run


def find(run_dir: Path, text: str, where: str = "", **options: Any) -> tuple[list[tuple[int, int]], dict[str, Any]]:
    condition = parse_condition(where) if where else None
    page = search(run_dir, IndexReader(run_dir).read(), text, condition, **options)
    return [(hit["step"], hit["number"]) for hit in page["hits"]], page


@pytest.mark.parametrize(
    ("text", "where", "expected", "searched"),
    [
        ("answer IS", "", [(3, 0), (3, 2), (2, 0), (2, 2)], 12),
        ("answer is", "step=2 and number>0", [(2, 2)], 3),
        ("ünïCODE", "", [(3, 0), (2, 0)], 12),
        ('"Ünïcode\\n 42"', "", [(3, 0), (2, 0)], 12),
        ('add({"a": "Seven"', "", [(3, 1), (2, 1)], 12),
        ("seven", "tool_calls<1", [(3, 1), (3, 2), (2, 1), (2, 2)], 12),
        ("asker", "", [], 12),  # in prompts only
        ("an(swer", "", [], 12),
    ],
)
def test_finds_text_after_the_prompt(
    run_dir: Path, text: str, where: str, expected: list[tuple[int, int]], searched: int
) -> None:
    hits, page = find(run_dir, text, where)
    assert hits == expected and page["searched"] == searched and page["next"] is None and page["notes"] == []


def test_snippet_has_the_text_around_the_first_match(run_dir: Path) -> None:
    _, page = find(run_dir, "answer is", "step=3")
    hit = page["hits"][0]
    before, after = LONG.split("Answer is")
    assert (hit["role"], hit["match"], hit["count"]) == ("assistant", "Answer is", 1)
    assert hit["before"] == "…" + before[-CHARS_BEFORE:] and hit["after"] == after[:CHARS_AFTER] + "…"
    _, page = find(run_dir, "nothing", "step=3")
    assert page["hits"][0] == {
        **{"step": 3, "number": 3, "role": "assistant", "count": 2},
        **{"before": "", "match": "Nothing", "after": ". nothing"},
    }


@pytest.mark.parametrize("options", [{"page_hits": 1}, {"page_s": -1.0}, {"page_hits": 3}])
def test_pages_cover_everything_once(run_dir: Path, options: dict[str, Any]) -> None:
    expected, whole = find(run_dir, "answer is")
    hits, searched, after, pages = [], 0, None, 0
    while pages == 0 or after is not None:
        part, page = find(run_dir, "answer is", after=after, **options)
        hits += part
        searched += page["searched"]
        after, pages = page["next"] and tuple(page["next"]), pages + 1
    assert hits == expected and searched == whole["searched"] == 12 and pages > 1


def test_damaged_file_costs_its_own_rollouts(run_dir: Path) -> None:
    index = IndexReader(run_dir).read()
    part_file(run_dir, 3, 0).write_bytes(b"nothing")
    page = search(run_dir, index, "answer is")
    assert [(hit["step"], hit["number"]) for hit in page["hits"]] == [(2, 0), (2, 2)]
    assert "is damaged" in page["notes"][0] and page["next"] is None


def test_prompts_begin_with_the_last_user_message(run_dir: Path) -> None:
    index = IndexReader(run_dir).read()
    reader = PromptTexts(run_dir)
    texts = dict(zip(index.texts["prompt"], reader.read(index), strict=True))
    assert texts.keys() == {"p0", "p1"} and texts["p0"] == " ".join(example_run.EVIL.split())
    for step in (1, 2, 3):
        part_file(run_dir, step, 0).unlink()
    assert dict(zip(index.texts["prompt"], reader.read(index), strict=True)) == texts, "read once"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ('[{"role": "user", "content": "a\\n b"}, {"role": "assistant", "content": "c"}]', "a b"),
        ('[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "look"}]}]', "look"),
        ('[{"role": "system", "content": "s"}]', "s"),
        ("[]", ""),
        ("[", ""),
        ("3", ""),
    ],
)
def test_beginning_of_a_prompt(messages: str, expected: str) -> None:
    assert begin_prompt(messages) == expected


def test_newest_rollouts(run_dir: Path) -> None:
    index = IndexReader(run_dir).read()
    result = read_newest(run_dir, index, 3)
    assert [(entry["step"], entry["number"], entry["reward"]) for entry in result] == [(3, 0, 0), (3, 1, 1), (3, 2, 2)]
    assert result[0]["text"].endswith("y") and result[2]["text"] == "answer is seven"
