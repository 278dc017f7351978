"""`compute_metrics`: evaluation metrics per data source, their table and JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megarl.observe.eval_metrics import compute_metrics, format_table, select_scored
from megarl.types import Prompt, Rollout, Turn

pytestmark = pytest.mark.alone


def make_rollouts(source: str, *rewards: list[float]) -> list[Rollout]:
    """Rollouts of 10 tokens for the first prompt, 11 for the second, ...; truncated where the reward is negative."""
    return [
        Rollout(
            Prompt(f"{source}-{prompt}", (), data_source=source),
            (Turn([1]), Turn([2] * (10 + prompt), [0.0] * (10 + prompt), True, 0)),
            status="length" if reward < 0 else "stop",
            reward=reward,
        )
        for prompt, prompt_rewards in enumerate(rewards)
        for reward in prompt_rewards
    ]


def make_rollout(prompt: str, reward: float, **kwargs: object) -> Rollout:
    turns = (Turn([1, 2]), Turn([3, 4, 5], [0.0] * 3, True, 0))
    return Rollout(Prompt(prompt, ({"role": "user", "content": "?"},)), turns, reward=reward, **kwargs)  # type: ignore[arg-type]


def test_metrics_match_hand_computed_values() -> None:
    result = compute_metrics(make_rollouts("a", [1, 0], [1, 1], [-1, 0]), [1, 2])["a"]
    assert (result.prompts, result.answers) == (3, 6)
    assert result.reward.value == pytest.approx((0.5 + 1 - 0.5) / 3)
    assert result.reward.low <= result.reward.value <= result.reward.high
    assert result.pass_at[1].value == pytest.approx((0.5 + 1 + 0) / 3)
    assert result.pass_at[2].value == pytest.approx(2 / 3)
    assert result.cut_off == pytest.approx(1 / 6) and result.tokens == pytest.approx(11)


def test_reports_each_source_and_all() -> None:
    result = compute_metrics([*make_rollouts("a", [1.0], [0.0]), *make_rollouts("b", [1.0])], [1])
    assert list(result) == ["a", "b", "all"]
    assert [item.reward.value for item in result.values()] == pytest.approx([0.5, 1.0, 2 / 3])
    assert list(compute_metrics(make_rollouts("a", [1.0]), [1])) == ["a"]


def test_pass_at_k_skips_prompts_with_fewer_than_k_rollouts() -> None:
    result = compute_metrics(make_rollouts("a", [1.0, 1.0], [0.0]), [1, 2, 3])["a"]
    assert result.pass_prompts == {1: 2, 2: 1, 3: 0}
    assert result.pass_at[2].value == 1.0 and 3 not in result.pass_at
    assert "-" in format_table({"a": result}, [1, 2, 3]).splitlines()[1].split()


def test_correct_threshold_decides_pass_at_k() -> None:
    assert compute_metrics(make_rollouts("a", [0.4, 0.6]), [1])["a"].pass_at[1].value == 0.5
    assert compute_metrics(make_rollouts("a", [0.4, 0.6]), [1], correct_threshold=0.7)["a"].pass_at[1].value == 0.0


def test_skips_aborted_and_unscored_rollouts() -> None:
    scored = select_scored(
        [
            make_rollout("p", 1.0),
            make_rollout("p", 0.0, status="aborted"),
            make_rollout("p", 0.0, unscored={"f": "it failed"}),
            make_rollout("p", 0.5, status="max_turns"),
        ]
    )
    assert [item.reward for item in scored] == [1.0, 0.5]
    (result,) = compute_metrics(scored, [1]).items()
    assert result[0] == "unnamed" and (result[1].answers, result[1].cut_off, result[1].tokens) == (2, 0.5, 3)
    assert list(compute_metrics(scored, [1], default_source="sums")) == ["sums"]


def test_branches_of_an_episode_count_once() -> None:
    rollouts = [make_rollout("p", 1.0, episode=0), make_rollout("p", 1.0, episode=0), make_rollout("p", 0.0, episode=1)]
    assert [item.reward for item in select_scored(rollouts)] == [1.0, 0.0]


def test_formats_table_and_json() -> None:
    result = compute_metrics(
        [*make_rollouts("openai/gsm8k", [1.0, 0.0]), *make_rollouts("x\x1b[31m", [0.0, 0.0])], [1, 2]
    )
    lines = format_table(result, [1, 2]).splitlines()
    assert lines[0].split() == "source prompts answers reward [95 %] pass@1 [95 %] pass@2 [95 %] cut off tokens".split()
    assert lines[1].startswith("openai/gsm8k") and "0.500 [0.500, 0.500]" in lines[1]
    assert "\x1b" not in format_table(result, [1, 2]) and len({line.index("%") for line in lines[1:]}) == 1
    tree = json.loads(json.dumps(dataclasses.asdict(result["openai/gsm8k"])))
    assert tree["pass_at"]["2"] == {"value": 1.0, "low": 1.0, "high": 1.0} and tree["pass_prompts"]["1"] == 1
