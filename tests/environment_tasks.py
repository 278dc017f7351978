"""Five small tasks, one for each kind of ready environment, that a tiny model learns in minutes.

`write(folder)` writes model/, sft.jsonl and train.jsonl. In a fraction EXPERT_SHARE of the warm-up conversations an
expert solves the task; in the others the model guesses. So the model knows every skill, and RL has to find out which
are rewarded.

    python tests/environment_tasks.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from megarl.rewards.arithmetic import arithmetic  # noqa: E402
from megarl.rewards.by_source import BySource  # noqa: E402
from megarl.rewards.code import hidden_tests  # noqa: E402
from megarl.rewards.squad import exact_match  # noqa: E402
from megarl.types import Rollout  # noqa: E402

EXPERT_SHARE = 0.3
NAMES = ("Tom", "Ann", "Kim", "Leo", "Eva", "Max")
PLACES = ("Rome", "Oslo", "Bern", "Lima", "Cairo", "Paris")
MAX_NUMBER = 5
"""Largest number of the guessing game."""

Conversation = list[dict[str, Any]]
Row = dict[str, Any]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(name: str, answer: str, **arguments: Any) -> Conversation:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [call, {"role": "tool", "name": name, "content": answer}]


def tool(rng: random.Random, expert: bool, corpus: Path) -> tuple[Row, Conversation]:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    row = {"prompt": [user(f"What is {a}*{b}?")], "ground_truth": str(a * b), "environment": "Calculator"}
    turns = calls("calculator", str(a * b), expression=f"{a}*{b}") if expert else []
    return row, [*turns, assistant(f"The answer is {a * b if expert else rng.randint(1, 81)}.")]


def maths(rng: random.Random, expert: bool, corpus: Path) -> tuple[Row, Conversation]:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    row = {"prompt": [user(f"How much is {a} less {b}?")], "ground_truth": str(a - b), "environment": "Python"}
    turns = calls("python", str(a - b), code=f"{a}-{b}") if expert else []
    return row, [*turns, assistant(f"The answer is {a - b if expert else rng.randint(-8, 8)}.")]


def code(rng: random.Random, expert: bool, corpus: Path) -> tuple[Row, Conversation]:
    a = rng.randint(1, 9)
    tests = {"fn_name": "f", "inputs": [[n] for n in (0, 3, 10)], "outputs": [n + a for n in (0, 3, 10)]}
    row = {"prompt": [user(f"Write f, which adds {a}.")], "ground_truth": tests, "environment": "Python"}
    return row, [assistant(f"```python\ndef f(n):\n    return n+{a if expert else rng.randint(1, 9)}\n```")]


def guessing_game(rng: random.Random, expert: bool, corpus: Path) -> tuple[Row, Conversation]:
    number = rng.randint(1, MAX_NUMBER)
    row = {"prompt": [user("Guess my number.")], "ground_truth": number, "most": MAX_NUMBER, "environment": "Guess"}
    turns: Conversation = []
    low, high = 1, MAX_NUMBER
    for _ in range(MAX_NUMBER if expert else 1):
        guess = rng.randint(low, high)
        answer = "right" if guess == number else "higher" if guess < number else "lower"
        turns += calls("guess", answer, number=guess)
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
        if guess == number:
            break
    return row, [*turns, assistant("done")]


def search(rng: random.Random, expert: bool, corpus: Path) -> tuple[Row, Conversation]:
    file = corpus / f"{rng.randint(0, 3)}.jsonl"
    facts_by_title = dict(json.loads(line).values() for line in file.read_text().splitlines())
    name = rng.choice(NAMES)
    row: Row = {
        "prompt": [user(f"Where is {name}?")],
        "ground_truth": facts_by_title[name].split()[-1],
        "environment": "Search",
    }
    turns = calls("search", f"{name}: {facts_by_title[name]}", query=name) if expert else []
    row["corpus"] = str(file)
    return row, [*turns, assistant(row["ground_truth"] if expert else rng.choice(PLACES))]


Task = Callable[[random.Random, bool, Path], tuple[Row, Conversation]]
TASKS: dict[str, Task] = {
    "tool": tool,
    "maths": maths,
    "code": code,
    "game": guessing_game,
    "search": search,
}


def zero_reward(rollout: Rollout) -> float:
    """Leave the reward to the game."""
    return 0.0


rewards = BySource(
    {"tool": arithmetic, "maths": arithmetic, "code": hidden_tests, "game": zero_reward, "search": exact_match}
)
ENVIRONMENTS = [
    f"megarl.environments.ready.{spec}"
    for spec in ("calculator:Calculator", "python:Python", "guess:Guess", "search:Search")
]


def schemas() -> dict[str, list[dict[str, Any]]]:
    """Return the tool schemas of each task's environment."""
    from megarl.environments.ready.calculator import Calculator
    from megarl.environments.ready.guess import Guess
    from megarl.environments.ready.python import Python
    from megarl.environments.ready.search import Search
    from megarl.environments.schemas import build_schema

    def build(function: Any) -> list[dict[str, Any]]:
        return [build_schema(function, function.__name__)]

    python = build(Python().python)
    return {
        "tool": build(Calculator().calculator),
        "maths": python,
        "code": python,
        "game": build(Guess().guess),
        "search": build(Search().search),
    }


def write(
    folder: Path,
    train: int,
    demonstrations: int,
    seed: int = 1,
    extra_tasks: Mapping[str, tuple[Task, list[dict[str, Any]]]] = MappingProxyType({}),
    extra_rows: int = 0,
) -> None:
    """Write a corpus, a model, demonstrations and training rows.

    extra_tasks: more tasks with the schemas of their tools. They are demonstrated too, and are the last `extra_rows`
    rows of train.jsonl.
    """
    import make_quickstart

    rng = random.Random(seed)
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for number in range(4):
        locations = rng.sample(PLACES, len(NAMES))
        lines = [
            json.dumps({"title": name, "text": f"lives in {location}"})
            for name, location in zip(NAMES, locations, strict=True)
        ]
        (corpus / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    tools = schemas() | {name: local for name, (_, local) in extra_tasks.items()}
    other_tasks: dict[str, Task] = {name: task for name, (task, _) in extra_tasks.items()}

    def generate(count: int, fraction: float, tasks: Mapping[str, Task]) -> Iterator[tuple[str, Row, Conversation]]:
        for number in range(count):
            name = list(tasks)[number % len(tasks)]
            yield name, *tasks[name](rng, rng.random() < fraction, folder if name in extra_tasks else corpus)

    train_rows = enumerate(chain(generate(train, EXPERT_SHARE, TASKS), generate(extra_rows, EXPERT_SHARE, other_tasks)))
    rows = (
        {**row, "id": str(i), "data_source": name, "tools": [item["function"]["name"] for item in tools[name]]}
        for i, (name, row, _) in train_rows
    )
    make_quickstart.write_jsonl(folder / "train.jsonl", rows)
    demonstrated = (
        {"id": str(i), "messages": [*row["prompt"], *turns], "tools": tools[name]}
        for i, (name, row, turns) in enumerate(generate(demonstrations, EXPERT_SHARE, TASKS | other_tasks))
    )
    make_quickstart.write_jsonl(folder / "sft.jsonl", demonstrated)
    conversations = [
        ([*row["prompt"], *turns], tools[name]) for name, row, turns in generate(35, 1.0, TASKS | other_tasks)
    ]
    make_quickstart.write_model(folder / "model", "qwen3_moe", seed, conversations)


if __name__ == "__main__":
    write(Path(sys.argv[1]), 2000, 12800)
