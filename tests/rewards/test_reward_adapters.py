"""Reward functions in the signatures of verl and TRL: arguments, results, failures and mistakes at the start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import ConfigError, from_dict
from megarl.config.plugins import is_async
from megarl.rewards import reward_pool, try_reward
from megarl.rewards.functions import check_truths, load_functions
from megarl.rewards.reward_process import score
from megarl.rewards.reward_settings import check_reward
from megarl.types import Message, Prompt, Reward, RewardFailure, Rollout, Turn
from megarl.types.requirements import Requirements

pytestmark = pytest.mark.alone

QUESTION: Message = {"role": "user", "content": "2+3?"}
PROMPT = Prompt("a-0", (QUESTION,), data_source="sums", ground_truth="5", extra={"ability": "math", "index": 7})
MODULE = """
import asyncio
import functools


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info["index"] == 7 and extra_info["ability"] == "math"
    return {"score": 0.5 * (ground_truth in solution_str), "acc": ground_truth in solution_str, "pred": solution_str,
            "length": len(solution_str), "turns": extra_info["num_turns"]}


def sparse(solution_str, ground_truth, scale=2.0):
    return scale * (solution_str == ground_truth)


scaled = functools.partial(sparse, scale=3.0)


def batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [0.25 * len(text) + (truth == "5") for text, truth in zip(solution_strs, ground_truths, strict=True)]


async def awaited(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return float(len(solution_str))


def no_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}


def raises(data_source, solution_str, ground_truth, extra_info=None):
    raise KeyError("split")


def chat(prompts, completions, ground_truth, **kwargs):
    assert prompts == [[{"role": "user", "content": "2+3?"}]] and kwargs["index"] == [7]
    contents = [completion[-1]["content"] for completion in completions]
    return [float(truth in content) for content, truth in zip(contents, ground_truth, strict=True)]


def text(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def ids(completions, completion_ids, **kwargs):
    return [float(sum(tokens)) for tokens in completion_ids]


def questions(prompts, completions):
    return [float(len(prompt)) for prompt in prompts]


async def trl_awaited(completions, **kwargs):
    await asyncio.sleep(0)
    return [0.5] * len(completions)


def inapplicable(completions, **kwargs):
    return [None for _ in completions]


def single(completions, **kwargs):
    return 1.0


def several(completions, **kwargs):
    return [1.0, 2.0]


def not_a_number(completions, **kwargs):
    return ["good"]


def needs_answer(completions, answer):
    return [1.0]


def by_state(completions, trainer_state):
    return [1.0]


def of_prompts(prompts):
    return [1.0]


def of_answers(answer, ground_truth):
    return 1.0


def of_methods(solution_str, ground_truth, method):
    return 1.0


def by_position(solution_str, /, ground_truth):
    return 1.0


class Scorer:
    async def __call__(self, completions, **kwargs):
        return [0.75]


scorer = Scorer()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "migrated_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def make_rollout(*messages: Message, prompt: Prompt = PROMPT) -> Rollout:
    action = Turn((4, 5), (-0.1, -0.2), is_action=True)
    return Rollout(prompt, (Turn((1, 2)), action), messages=(*prompt.messages, *messages))


def reply(text: str) -> Message:
    return {"role": "assistant", "content": text}


def verdict(name: str, rollout: Rollout) -> Any:
    (result,) = score([rollout], load_functions([name]))
    (value,) = result.values()
    return value


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("verl:migrated_rewards:compute_score", Reward(0.5, {"acc": 1.0, "length": 7.0, "turns": 2.0})),
        ("verl:migrated_rewards:sparse", Reward(0.0)),
        ("verl:migrated_rewards:batched", Reward(2.75)),
        ("verl:migrated_rewards:awaited", Reward(7.0)),
        ("trl:migrated_rewards:chat", Reward(1.0)),
        ("trl:migrated_rewards:text", Reward(1.0)),  # one message
        ("trl_text:migrated_rewards:text", Reward(7.0)),
        ("trl:migrated_rewards:ids", Reward(9.0)),
        ("trl:migrated_rewards:questions", Reward(1.0)),
        ("trl_text:migrated_rewards:questions", Reward(4.0)),
        ("trl:migrated_rewards:trl_awaited", Reward(0.5)),
        ("trl:migrated_rewards:scorer", Reward(0.75)),
        ("trl:migrated_rewards:inapplicable", Reward(0.0, {"not_applicable": 1.0})),
    ],
)
def test_passes_arguments_and_reads_results(function: str, expected: Reward) -> None:
    assert verdict(function, make_rollout(reply("It is 5"))) == expected


def test_partials_set_further_arguments() -> None:
    assert verdict("verl:migrated_rewards:sparse", make_rollout(reply("5"))) == Reward(2.0)
    assert verdict("verl:migrated_rewards:scaled", make_rollout(reply("5"))) == Reward(3.0)


def test_response_is_everything_after_the_prompt() -> None:
    call = {"role": "assistant", "content": "Hm.", "tool_calls": [{"id": "c"}]}
    result = {"role": "tool", "name": "calculator", "tool_call_id": "c", "content": "5"}
    rollout = make_rollout(call, result, reply("So 5."))
    assert verdict("trl_text:migrated_rewards:text", rollout) == Reward(float(len("Hm.\n5\nSo 5.")))
    assert verdict("trl:migrated_rewards:text", rollout) == Reward(3.0)
    few_shot = Prompt("b", (QUESTION, reply("5"), QUESTION), ground_truth="5")
    assert verdict("trl_text:migrated_rewards:text", make_rollout(reply("six"), prompt=few_shot)) == Reward(3.0)


def test_conversations_of_agents_are_split_before_the_policy() -> None:
    messages = ({"role": "system", "content": "Think."}, {"role": "user", "content": "Add."}, reply("four"))
    rollout = Rollout(PROMPT, (Turn((1,)),), messages=messages)
    assert verdict("trl_text:migrated_rewards:text", rollout) == Reward(4.0)
    assert verdict("trl:migrated_rewards:questions", rollout) == Reward(2.0)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("verl:migrated_rewards:no_score", "it returned a dict with acc, but without 'score'"),
        ("verl:migrated_rewards:raises", "it raised KeyError: 'split'"),
        ("trl:migrated_rewards:single", "it returned a float; it must return a list with a number per response"),
        ("trl:migrated_rewards:several", "it returned 2 values for 1 response"),
        ("trl:migrated_rewards:not_a_number", "it returned a str, 'good'; it must return a number"),
    ],
)
def test_failures_are_those_of_other_functions(function: str, reason: str) -> None:
    failure = verdict(function, make_rollout(reply("5")))
    assert isinstance(failure, RewardFailure) and failure.reason.startswith(reason), failure
    assert ("migrated_rewards.py:" in failure.reason) == ("raised" in reason)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "verl:migrated_rewards:of_answers",
            "must take solution_str or solution_strs, not answer, ground_truth; ",
        ),
        ("verl:migrated_rewards:of_methods", "requires 'method', which is not passed; verl's are data_source, "),
        ("verl:migrated_rewards:by_position", "takes 'solution_str' by position only"),
        ("trl:migrated_rewards:of_prompts", "must take completions, not prompts; TRL passes prompts, completions, "),
        ("trl:migrated_rewards:by_state", "requires 'trainer_state', which only TRL's trainer has"),
        ("verl:migrated_rewards:Scorer", "is a class"),
        ("verl:migrated_rewards:PROMPT", "has no 'PROMPT'"),
        (
            "slime:migrated_rewards:chat",
            "'slime' is no prefix for the signature of another library (verl, trl, ",
        ),
        ("migrated_rewards:compute_score", "parameters are those of a function for verl: write verl:module:name"),
        ("migrated_rewards:batched", "of a function for verl: write verl:module:name"),
        ("migrated_rewards:chat", "of a function for trl: write trl:module:name"),
        ("migrated_rewards:text", "of a function for trl: write trl:module:name"),
    ],
)
def test_wrong_signatures_end_the_start_with_one_line(function: str, message: str) -> None:
    config = from_dict({"reward": {"functions": [function]}})
    with pytest.raises(ConfigError) as error:
        check_reward(config, Requirements("grpo", "prompts", ("actor", "rollout", "reward"), ("actor",)), {})
    assert str(error.value).startswith("reward.functions: ") and message in str(error.value)
    assert "\n" not in str(error.value)


def test_names_and_kinds() -> None:
    names = ["verl:migrated_rewards:awaited", "trl:migrated_rewards:text", "trl_text:migrated_rewards:text"]
    functions = load_functions(names)
    assert list(functions) == ["awaited", "text", "trl_text:migrated_rewards:text"]
    assert [is_async(function) for function in functions.values()] == [True, False, False]


def test_missing_columns_show_before_the_run() -> None:
    functions = load_functions(["trl:migrated_rewards:needs_answer"])
    rows = [("a.jsonl:1", PROMPT)]
    with pytest.raises(ConfigError, match=r"a.jsonl:1: no column 'answer', .*\(columns: ability, index, id, "):
        check_truths(functions, rows, "a.jsonl")
    answered = Prompt("a-0", (QUESTION,), extra={"answer": "5"})
    assert check_truths(functions, [("a.jsonl:1", answered)], "a.jsonl") == []


@pytest.mark.parametrize("values", [np.array([0.5]), (0.5,), [np.float32(0.5)]])
def test_takes_arrays_and_tuples(values: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("migrated_rewards.returned", lambda completions: values, raising=False)
    assert verdict("trl:migrated_rewards:returned", make_rollout(reply("5"))) == Reward(0.5)


def test_runs_in_worker_processes(folder: Path) -> None:
    specs = ["verl:migrated_rewards:compute_score", "trl:migrated_rewards:trl_awaited"]
    pool = reward_pool.RewardPool(load_functions(specs), specs, 60.0, 2, folder / "log")
    pool.start()
    try:
        result = pool.submit(make_rollout(reply("5"))).result(120.0)
    finally:
        pool.close()
    assert result == {
        "compute_score": Reward(0.5, {"acc": 1.0, "length": 1.0, "turns": 2.0}),
        "trl_awaited": Reward(0.5),
    }


def test_try_reward_takes_the_prefixes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "2+3?", "reward_model": {"ground_truth": "5"}, "data_source": "sums", "ability": "math"}
    (folder / "a.jsonl").write_text(json.dumps({**row, "extra_info": {"index": 7}}))
    functions = ["verl:migrated_rewards:compute_score", "trl:migrated_rewards:chat"]
    assert try_reward.main([*functions, "--data", str(folder / "a.jsonl")]) == 0
    output = capsys.readouterr().out
    for name in ("compute_score", "chat"):
        assert f"{name} gives the ground truth more than the empty answer in 1 of 1 rows\n" in output
    assert try_reward.main(["verl:migrated_rewards:of_methods", "--data", str(folder / "a.jsonl")]) == 2
    assert "requires 'method'" in capsys.readouterr().err


def test_example_of_the_task_page(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/tasks/my_reward.md").read_text()
    (text,) = re.findall(r"^```python ported.py\n(.*?)^```$", page, re.M | re.S)
    (folder / "ported.py").write_text(text)
    rollout = make_rollout(reply("It is 5"))
    assert verdict("verl:ported:compute_score", rollout) == Reward(1.0, {"length": 7.0})
    assert verdict("trl:ported:short", rollout) == Reward(1.0)
