"""The environments that MegaRL has ready, as a conversation meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.environments.ready.calculator import Calculator
from megarl.environments.ready.guess import Guess
from megarl.environments.ready.search import Search

pytestmark = pytest.mark.alone


def test_a_calculator_calculates() -> None:
    assert Calculator().calculator("12+7*30") == "222"


def test_a_number_is_found_by_asking() -> None:
    game = Guess()
    game.reset(ground_truth=37, most=64)
    assert [game.guess(n) for n in (32, 48, 40, 36, 38, 37)] == ["higher", "lower", "lower", "higher", "lower", "right"]
    assert game.reward() == {"reward": 1 - 5 * Guess.cost, "parts": {"tries": 6}}
    assert game.guess(1).startswith("right") and game.reward()["parts"] == {"tries": 6}


def test_what_is_excluded_costs_twice_and_what_was_not_found_is_worth_nothing() -> None:
    game = Guess()
    game.reset(ground_truth=5)
    assert [game.guess(3), game.guess(2), game.guess(100), game.guess(101)] == ["higher", "higher", "lower", "lower"]
    assert game.reward() == {"reward": 0.0, "parts": {"tries": 6}}
    game.guess(5)
    assert game.reward() == {"reward": pytest.approx(1 - 6 * Guess.cost), "parts": {"tries": 7}}


def corpus(folder: Path) -> str:
    texts = {"Rivers": "The Nile runs north. It floods.", "Cities": "Cairo lies on the Nile.", "Food": "Bread, olives"}
    lines = [json.dumps({"title": title, "text": text}) for title, text in texts.items()]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    return str(folder / "corpus.jsonl")


def test_documents_are_found_by_their_words(tmp_path: Path) -> None:
    search = Search()
    search.reset(corpus(tmp_path))
    assert search.search("Where is Cairo?") == "Cities: Cairo lies on the Nile."
    assert search.search("river flooding", 1) == "Rivers: The Nile runs north. It floods."  # by their stems
    assert search.search("olive' OR \"", 5) == "Food: Bread, olives"  # no query language
    assert search.search("snow") == "nothing found"
    assert len(search.search("the Nile", 99).splitlines()) == 2
    with pytest.raises(ValueError, match="no word"):
        search.search(" ?! ")


def test_a_corpus_is_asked_for_and_its_broken_line_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="column `corpus`"):
        Search().reset()
    (tmp_path / "odd.jsonl").write_text('{"text": "x"}\n{"title": "y"}\n')
    with pytest.raises(ValueError, match=r"odd.jsonl, line 2, is not a document"):
        Search().reset(str(tmp_path / "odd.jsonl"))
