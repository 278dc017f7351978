"""A generative judge that is a real SGLang engine, asked over its OpenAI API."""

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
def asked(qwen3_moe: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("JUDGE_KEY", qwen3_moe.engine.api_key)
    about = {"url": qwen3_moe.engine.url, "model": str(qwen3_moe.folder), "private": True, "auth_env": "JUDGE_KEY"}
    return {**about, "prompt": "{question} {answer} {ground_truth}?", "tries": 2, "pause": 0}


def judge(asked: dict[str, Any], **options: Any) -> Judge:
    return Judge(JudgeOptions.read({**asked, **options}))


def test_an_engine_scores(asked: dict[str, Any]) -> None:
    """Its weights are random, so that it is held to the form by a grammar. The same is scored alike."""
    item = judge(asked, request={"max_tokens": 12, "regex": "Score: [0-9]"})
    item.check_reachable()
    result = item.score([rollout("5"), rollout("six"), rollout("5")])
    scores = [said.reward for said in result if not isinstance(said, RewardFailure)]
    assert len(scores) == 3 and scores[0] == scores[2] and all(0 <= score <= 9 for score in scores), result


def test_what_it_refuses_or_leaves_unsaid(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(**options: Any) -> str:
        (result,) = judge(asked, **options).score([rollout("5")])
        assert isinstance(result, RewardFailure), result
        return result.reason

    assert "it was truncated" in failed(request={"max_tokens": 2})
    assert "found no score in its answer" in failed(request={"max_tokens": 12, "regex": "no idea"})
    assert "it answered with status 400" in failed(prompt="{answer} " + "and so on " * 400)
    monkeypatch.setenv("JUDGE_KEY", "another-key-than-its-own")
    assert "it answered with status 401" in failed() and "another-key-than-its-own" not in failed()
