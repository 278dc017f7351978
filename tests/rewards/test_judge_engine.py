"""A generative judge served by a real SGLang engine over its OpenAI API."""

from __future__ import annotations

from typing import Any

import pytest
from engines import RunningEngine

from megarl.rewards.judge import Judge, JudgeOptions
from megarl.types import Prompt, Rollout, Turn
from megarl.types.reward_values import RewardFailure

USER = {"role": "user", "content": "2+3?"}


def rollout(answer: str) -> Rollout:
    messages = (USER, {"role": "assistant", "content": answer})
    return Rollout(Prompt("0", (USER,), ground_truth="5"), (Turn((1, 2)),), messages=messages)


@pytest.fixture
def judge_options(qwen3_moe: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("JUDGE_KEY", qwen3_moe.engine.api_key)
    options = {"url": qwen3_moe.engine.url, "model": str(qwen3_moe.folder), "private": True, "auth_env": "JUDGE_KEY"}
    return {**options, "prompt": "{question} {answer} {ground_truth}?", "tries": 2, "pause": 0}


def judge(judge_options: dict[str, Any], **options: Any) -> Judge:
    return Judge(JudgeOptions.read({**judge_options, **options}))


def test_engine_scores_rollouts(judge_options: dict[str, Any]) -> None:
    """The weights are random, so a grammar enforces the form of the reply. Equal answers get equal scores."""
    service = judge(judge_options, request={"max_tokens": 12, "regex": "Score: [0-9]"})
    service.check_reachable()
    result = service.score([rollout("5"), rollout("six"), rollout("5")])
    scores = [reward.reward for reward in result if not isinstance(reward, RewardFailure)]
    assert len(scores) == 3 and scores[0] == scores[2] and all(0 <= score <= 9 for score in scores), result


def test_reports_truncated_scoreless_and_refused_requests(
    judge_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def score_failing(**options: Any) -> str:
        (result,) = judge(judge_options, **options).score([rollout("5")])
        assert isinstance(result, RewardFailure), result
        return result.reason

    assert "it was truncated" in score_failing(request={"max_tokens": 2})
    assert "found no score in its answer" in score_failing(request={"max_tokens": 12, "regex": "no idea"})
    assert "it answered with status 400" in score_failing(prompt="{answer} " + "and so on " * 400)
    monkeypatch.setenv("JUDGE_KEY", "another-key-than-its-own")
    assert "it answered with status 401" in score_failing() and "another-key-than-its-own" not in score_failing()
