"""`RolloutRunner`: aborts, lost engines, reuse of tool processes, evaluation, and generation through weight syncs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import CHAT, CONFIG, PROMPT, TOKENIZER, DeterministicPolicy, FailingPolicy, ScriptedPolicy, parse

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import OnWeightSync
from megarl.engine.engine_protocol import EngineLost, RequestFailed
from megarl.engine.http_client import HTTPClient
from megarl.environments.catalog import load_tools
from megarl.rollout import rollout_runner as rollout_context
from megarl.rollout.conversation import RolloutContext, build_sampling_params
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.rollout_runner import RolloutRunner
from megarl.rollout.scheduler import GenerationResult
from megarl.types import Rollout, Status


def fake_engine(folder: Path) -> Any:
    names = dict(tool_call_parser="", tool_call_marker="", index=0, weight_version=0, start_number=1)
    state = dict(is_paused=False, is_asleep=False, check_running=lambda start: None)
    connect = lambda timeout, *shapes: HTTPClient("http://127.0.0.1:9", "", timeout, *shapes)  # noqa: E731
    engine = SimpleNamespace(**names, **state, log=folder / "logs/engine_0.log", connect=connect)
    engine.version_of = lambda adapter: engine.weight_version
    return engine


def test_aborts_engine_requests_and_checks_other_engines_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine_calls: list[str] = []
    engine = fake_engine(tmp_path)
    engine.abort_requests = lambda: engine_calls.append("drop")
    endings: list[Status] = ["stop", "aborted"]

    async def gathered(*_: Any, **__: Any) -> GenerationResult:
        if not endings:
            await asyncio.sleep(3600)
        return GenerationResult([Rollout(PROMPT, (), endings.pop(0))])

    monkeypatch.setattr(rollout_context, "gather_rollouts", gathered)
    monkeypatch.setattr(rollout_context, "_POLL_S", 0.01)
    runner = RolloutRunner(engine, CHAT, CONFIG)
    runner.generate([])
    assert engine_calls == []
    runner.generate([])
    assert engine_calls == ["drop"]

    def check() -> None:
        raise RuntimeError("another engine is gone")

    with pytest.raises(RuntimeError, match="another engine is gone"):
        runner.generate([], check=check)
    runner.close()


def test_reports_a_lost_engine_at_once_and_sends_it_no_more_requests(tmp_path: Path) -> None:
    engine, losses = fake_engine(tmp_path), []

    def check_runs(start: int) -> None:
        raise EngineLost("died", "engine 0 is not running")

    engine.check_running, queue = check_runs, GroupQueue(2)
    runner = RolloutRunner(engine, CHAT, CONFIG, on_engine_lost=losses.append)
    result = runner.generate([PROMPT, PROMPT], queue=queue, samples=2)
    runner.close()
    assert result.rollouts == [] and result.engine_loss is not None and result.engine_loss.fault == "died"
    assert losses and {str(item) for item in losses} == {"engine 0 is not running"}
    assert queue.count_unclaimed() == 2


def test_tool_processes_are_reused_across_generations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = fake_engine(tmp_path)

    async def only_call(prompts: Any, queue: Any, policy: Any, context: RolloutContext, **_: Any) -> GenerationResult:
        assert (
            context.environments.max_tool_processes == 2 * CONFIG.concurrency
        )  # no conversation waits for another's tool call
        text = (await context.environments.call_tool("pid", {})).text
        return GenerationResult([Rollout(PROMPT, (), messages=({"role": "assistant", "content": text},))])

    monkeypatch.setattr(rollout_context, "gather_rollouts", only_call)
    runner = RolloutRunner(engine, ChatTemplate(TOKENIZER, load_tools(["misbehaving_tools:pid"])), CONFIG)  # type: ignore[arg-type]
    first, second = runner.generate([]).rollouts, runner.generate([]).rollouts
    assert first == second
    runner.close()
    runner.close()
    assert not Path(f"/proc/{first[0].answer}").exists()


def test_evaluation_uses_its_own_sampling_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Evaluation requests no sampling masks, because the engine returns them for a limited number of tokens only."""
    requests: list[tuple[dict[str, Any], bool]] = []

    async def only_look(prompts: Any, queue: Any, policy: Any, context: RolloutContext, **_: Any) -> GenerationResult:
        requests.append((build_sampling_params(context.config, context.chat, False, 3), policy.should_request_masks))
        return GenerationResult([])

    monkeypatch.setattr(rollout_context, "gather_rollouts", only_look)
    for settings in ({}, {"eval_top_p": 0.7}, {"eval_temperature": 0.6, "eval_top_p": 1.0}):
        runner = RolloutRunner(fake_engine(tmp_path), CHAT, replace(CONFIG, top_k=20, top_p=0.9, **settings))
        for held_out in (False, True):
            runner.generate([], held_out=held_out)
        runner.close()
    result = [(params["temperature"], params["top_p"], params["top_k"], masks) for params, masks in requests]
    as_in_training = (1.0, 0.9, 20, True)
    assert result[:2] == [as_in_training] * 2
    assert result[2:] == [as_in_training, (1.0, 0.7, 20, False), as_in_training, (0.6, 1.0, 20, False)]


class FakeClient:
    """A client of the engine that enters as the given policy."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    async def __aenter__(self) -> Any:
        return self.policy

    async def __aexit__(self, *_: object) -> None:
        return None


def with_policies(monkeypatch: pytest.MonkeyPatch, runner: RolloutRunner, *policies: Any) -> RolloutRunner:
    """Give each generation of the runner the next policy, and switch off the engine's parser and heartbeat."""
    unused_policies = list(policies)
    monkeypatch.setattr(rollout_context, "make_parser", lambda *_: parse)
    runner._new_client = lambda: FakeClient(unused_policies.pop(0))  # type: ignore[method-assign, assignment, return-value]
    runner._watch = lambda client, start: asyncio.Event().wait()  # type: ignore[method-assign, assignment, return-value]
    return runner


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


PROMPTS = [replace(PROMPT, id=str(i), messages=({"role": "user", "content": f"And {i}?"},)) for i in range(6)]


@pytest.mark.parametrize("mode", ["retract", "wait", "in_place"])
def test_generation_continues_through_a_weight_sync_and_records_versions(
    mode: OnWeightSync, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, policy = fake_engine(tmp_path), DeterministicPolicy(pause=0.002)
    engine_calls: list[Any] = []
    engine.pause_generation, engine.resume_generation = (
        lambda: engine_calls.append("pause"),
        lambda: engine_calls.append(("resume", policy.weight_version)),
    )
    config = replace(CONFIG, concurrency=2, max_turns=1)
    runner = with_policies(monkeypatch, RolloutRunner(engine, CHAT, config), DeterministicPolicy(pause=0), policy)
    expected = runner.generate(PROMPTS, samples=1).rollouts
    future = runner.start_generation(PROMPTS, samples=1)
    wait_until(lambda: policy.num_written > 3)
    runner.pause(mode)
    assert not future.done()
    assert engine_calls == (["pause"] if mode == "in_place" else []) and (mode == "in_place" or policy.num_running == 0)
    engine.weight_version = 1
    runner.resume()
    assert engine_calls[-1] == ("resume", 1), "a response of the resumed engine may arrive before anything else"
    rollouts = future.result().rollouts
    runner.close()
    assert [item.token_ids.tolist() for item in rollouts] == [item.token_ids.tolist() for item in expected]
    result = [[version for version, _ in item.version_spans] for item in rollouts]
    assert policy.weight_version == 1 and {version for runs in result for version in runs} >= {1}
    assert all(runs == sorted(runs) for runs in result)
    if mode == "wait":
        assert result[0] == [0] and all(len(runs) == 1 for runs in result)  # one version each


def test_background_generation_survives_an_abort_on_its_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine can only drop all requests, so the other generation is stopped first and resumes afterwards."""
    engine, policy = fake_engine(tmp_path), DeterministicPolicy(pause=0.002)
    discarded: list[int] = []

    def discard() -> None:
        discarded.append(policy.num_running)
        policy.stops += 1

    engine.abort_requests, engine.resume_generation = discard, lambda: None
    runner = with_policies(
        monkeypatch,
        RolloutRunner(engine, CHAT, replace(CONFIG, max_turns=1)),
        policy,
        FailingPolicy(RequestFailed("odd")),
    )
    future = runner.start_generation(PROMPTS, samples=1)
    wait_until(lambda: policy.num_written > 3)
    assert [item.status for item in runner.generate([PROMPT], samples=1).rollouts] == ["aborted"]
    assert "aborted" not in [item.status for item in future.result().rollouts]
    runner.close()
    assert discarded == [0]


def test_pause_without_a_running_generation_has_no_effect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runner = with_policies(
        monkeypatch, RolloutRunner(fake_engine(tmp_path), CHAT, CONFIG), ScriptedPolicy("1"), ScriptedPolicy("2")
    )
    runner.pause("retract")
    runner.resume()
    assert [runner.generate([PROMPT], samples=1).rollouts[0].status for _ in range(2)] == ["stop", "stop"]
    runner.close()
