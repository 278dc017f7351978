"""The built-in environments: calculator, guessing game and search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.environments.ready.calculator import Calculator
from megarl.environments.ready.guess import Guess
from megarl.environments.ready.search import Search

pytestmark = pytest.mark.alone


def test_calculator_evaluates_expressions() -> None:
    assert Calculator().calculator("12+7*30") == "222"


def test_guess_rewards_found_numbers() -> None:
    environment = Guess()
    environment.reset(ground_truth=37, most=64)
    assert [environment.guess(n) for n in (32, 48, 40, 36, 38, 37)] == [
        "higher",
        "lower",
        "lower",
        "higher",
        "lower",
        "right",
    ]
    assert environment.reward() == {"reward": 1 - 5 * Guess.cost, "parts": {"tries": 6}}
    assert environment.guess(1).startswith("right") and environment.reward()["parts"] == {"tries": 6}


def test_guess_penalizes_excluded_numbers() -> None:
    environment = Guess()
    environment.reset(ground_truth=5)
    assert [environment.guess(3), environment.guess(2), environment.guess(100), environment.guess(101)] == [
        "higher",
        "higher",
        "lower",
        "lower",
    ]
    assert environment.reward() == {"reward": 0.0, "parts": {"tries": 6}}
    environment.guess(5)
    assert environment.reward() == {"reward": pytest.approx(1 - 6 * Guess.cost), "parts": {"tries": 7}}


def write_corpus(folder: Path) -> str:
    texts = {"Rivers": "The Nile runs north. It floods.", "Cities": "Cairo lies on the Nile.", "Food": "Bread, olives"}
    lines = [json.dumps({"title": title, "text": text}) for title, text in texts.items()]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    return str(folder / "corpus.jsonl")


def test_search_finds_documents_by_words(tmp_path: Path) -> None:
    search = Search()
    search.reset(write_corpus(tmp_path))
    assert search.search("Where is Cairo?") == "Cities: Cairo lies on the Nile."
    assert search.search("river flooding", 1) == "Rivers: The Nile runs north. It floods."  # matches stems
    assert search.search("olive' OR \"", 5) == "Food: Bread, olives"  # query syntax is ignored
    assert search.search("snow") == "nothing found"
    assert len(search.search("the Nile", 99).splitlines()) == 2
    with pytest.raises(ValueError, match="no word"):
        search.search(" ?! ")


def test_search_reports_missing_and_invalid_corpora(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="column `corpus`"):
        Search().reset()
    (tmp_path / "odd.jsonl").write_text('{"text": "x"}\n{"title": "y"}\n')
    with pytest.raises(ValueError, match=r"odd.jsonl, line 2, is not a document"):
        Search().reset(str(tmp_path / "odd.jsonl"))
