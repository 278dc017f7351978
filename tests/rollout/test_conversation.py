"""An engine's conversations: what it is asked besides, who is watched meanwhile, and what is kept between two calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import CHAT, CONFIG, PROMPT, TOKENIZER, Fails, Script, Writer, parse

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import OnWeightSync
from megarl.engine.engine_protocol import EngineLost, RequestFailed
from megarl.environments.catalog import load_tools
from megarl.rollout import rollout_runner as rollout_context
from megarl.rollout.conversation import RolloutContext, build_sampling_params
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.rollout_runner import RolloutRunner
from megarl.rollout.scheduler import GenerationResult
from megarl.types import Rollout, Status


def some_engine(folder: Path) -> Any:
    names = dict(
        url="", api_key="", tool_call_parser="", tool_call_marker="", index=0, weight_version=0, start_number=1
    )
    return SimpleNamespace(**names, log=folder / "logs/engine_0.log", is_paused=False, check_running=lambda start: None)


def test_the_engine_lets_go_of_what_was_aborted_and_others_are_looked_at_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said_to: list[str] = []
    engine = some_engine(tmp_path)
    engine.abort_requests = lambda: said_to.append("drop")
    endings: list[Status] = ["stop", "aborted"]

    async def gathered(*_: Any, **__: Any) -> GenerationResult:
        if not endings:
            await asyncio.sleep(3600)
        return GenerationResult([Rollout(PROMPT, (), endings.pop(0))], [])

    monkeypatch.setattr(rollout_context, "gather_rollouts", gathered)
    monkeypatch.setattr(rollout_context, "_POLL_S", 0.01)
    talks = RolloutRunner(engine, CHAT, CONFIG)
    talks.generate([])
    assert said_to == []
    talks.generate([])
    assert said_to == ["drop"]

    def look() -> None:
        raise RuntimeError("another engine is gone")

    with pytest.raises(RuntimeError, match="another engine is gone"):
        talks.generate([], check=look)
    talks.close()


def test_an_engine_that_is_lost_is_told_of_at_once_and_is_asked_for_nothing_more(tmp_path: Path) -> None:
    engine, events = some_engine(tmp_path), []

    def check_runs(start: int) -> None:
        raise EngineLost("died", "engine 0 is not running")

    engine.check_running, tickets = check_runs, GroupQueue(2)
    talks = RolloutRunner(engine, CHAT, CONFIG, on_engine_lost=events.append)
    result = talks.generate([PROMPT, PROMPT], queue=tickets, samples=2)
    talks.close()
    assert result.rollouts == [] and result.engine_loss is not None and result.engine_loss.fault == "died"
    assert events and {str(item) for item in events} == {"engine 0 is not running"}
    assert tickets.count_unclaimed() == 2


def test_the_tools_processes_are_kept_from_one_generation_to_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = some_engine(tmp_path)

    async def only_call(prompts: Any, tickets: Any, policy: Any, around: RolloutContext, **_: Any) -> GenerationResult:
        assert (
            around.environments.max_tool_processes == 2 * CONFIG.concurrency
        )  # no conversation's call waits for another's
        text = (await around.environments.call_tool("pid", {})).text
        return GenerationResult([Rollout(PROMPT, (), messages=({"role": "assistant", "content": text},))], [])

    monkeypatch.setattr(rollout_context, "gather_rollouts", only_call)
    talks = RolloutRunner(engine, ChatTemplate(TOKENIZER, load_tools(["odd_tools:pid"])), CONFIG)  # type: ignore[arg-type]
    first, second = talks.generate([]).rollouts, talks.generate([]).rollouts
    assert first == second
    talks.close()
    talks.close()
    assert not Path(f"/proc/{first[0].answer}").exists()


def test_an_evaluation_is_sampled_by_keys_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And the engine is not asked what could have been drawn, which it says of a bounded number of tokens alone."""
    requested: list[tuple[dict[str, Any], bool]] = []

    async def only_look(prompts: Any, tickets: Any, policy: Any, around: RolloutContext, **_: Any) -> GenerationResult:
        requested.append((build_sampling_params(around.config, around.chat, False, 3), policy.should_request_masks))
        return GenerationResult([], [])

    monkeypatch.setattr(rollout_context, "gather_rollouts", only_look)
    for local in ({}, {"eval_top_p": 0.7}, {"eval_temperature": 0.6, "eval_top_p": 1.0}):
        talks = RolloutRunner(some_engine(tmp_path), CHAT, replace(CONFIG, top_k=20, top_p=0.9, **local))
        for held_out in (False, True):
            talks.generate([], held_out=held_out)
        talks.close()
    result = [(params["temperature"], params["top_p"], params["top_k"], masks) for params, masks in requested]
    as_in_training = (1.0, 0.9, 20, True)
    assert result[:2] == [as_in_training] * 2
    assert result[2:] == [as_in_training, (1.0, 0.7, 20, False), as_in_training, (0.6, 1.0, 20, False)]


class Asked:
    """The engine's client, which is this policy."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    async def __aenter__(self) -> Any:
        return self.policy

    async def __aexit__(self, *_: object) -> None:
        return None


def asking(patched: pytest.MonkeyPatch, talks: RolloutRunner, *policies: Any) -> RolloutRunner:
    """One policy after the other, for each generation; that of the first stays for others."""
    left = list(policies)
    patched.setattr(rollout_context, "make_parser", lambda *_: parse)
    talks._new_client = lambda: Asked(left.pop(0))  # type: ignore[method-assign, assignment, return-value]
    talks._watch = lambda client, start: asyncio.Event().wait()  # type: ignore[method-assign, assignment, return-value]
    return talks


def until(what: Callable[[], bool]) -> None:
    while not what():
        time.sleep(0.001)


PROMPTS = [replace(PROMPT, id=str(i), messages=({"role": "user", "content": f"And {i}?"},)) for i in range(6)]


@pytest.mark.parametrize("how", ["retract", "wait", "in_place"])
def test_a_generation_goes_on_through_a_push_and_says_by_which_weights(
    how: OnWeightSync, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, writer, said_to = some_engine(tmp_path), Writer(pause=0.002), []
    engine.pause_generation, engine.resume_generation = lambda: said_to.append("hold"), lambda: said_to.append("go on")
    config = replace(CONFIG, concurrency=2, max_turns=1)
    talks = asking(monkeypatch, RolloutRunner(engine, CHAT, config), Writer(pause=0), writer)
    alone = talks.generate(PROMPTS, samples=1).rollouts
    under_way = talks.start_generation(PROMPTS, samples=1)
    until(lambda: writer.written > 3)
    talks.pause(how)
    assert not under_way.done()
    assert said_to == (["hold"] if how == "in_place" else []) and (how == "in_place" or writer.at_once == 0)
    engine.weight_version = 1
    talks.resume()
    rollouts = under_way.result().rollouts
    talks.close()
    assert [item.token_ids.tolist() for item in rollouts] == [item.token_ids.tolist() for item in alone]
    result = [[version for version, _ in item.version_spans] for item in rollouts]
    assert writer.weight_version == 1 and {version for runs in result for version in runs} >= {1}
    assert all(runs == sorted(runs) for runs in result)
    if how == "wait":
        assert result[0] == [0] and all(len(runs) == 1 for runs in result)  # of one version each


def test_what_is_under_way_besides_outlives_that_the_engine_lets_go_of_something(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is told to drop all requests, so others are cut off before it, and go on."""
    engine, writer = some_engine(tmp_path), Writer(pause=0.002)
    dropped: list[int] = []

    def drop() -> None:
        dropped.append(writer.at_once)
        writer.stops += 1

    engine.abort_requests, engine.resume_generation = drop, lambda: None
    talks = asking(
        monkeypatch, RolloutRunner(engine, CHAT, replace(CONFIG, max_turns=1)), writer, Fails(RequestFailed("odd"))
    )
    under_way = talks.start_generation(PROMPTS, samples=1)
    until(lambda: writer.written > 3)
    assert [item.status for item in talks.generate([PROMPT], samples=1).rollouts] == ["aborted"]
    assert "aborted" not in [item.status for item in under_way.result().rollouts]
    talks.close()
    assert dropped == [0]


def test_nothing_is_paused_where_nothing_is_under_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    talks = asking(monkeypatch, RolloutRunner(some_engine(tmp_path), CHAT, CONFIG), Script("1"), Script("2"))
    talks.pause("retract")
    talks.resume()
    assert [talks.generate([PROMPT], samples=1).rollouts[0].status for _ in range(2)] == ["stop", "stop"]
    talks.close()
