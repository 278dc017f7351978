"""An engine's conversations: what it is asked besides, who is watched meanwhile, and what is kept between two calls."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import CHAT, CONFIG, PROMPT, TOKENIZER

from megarl.rollout import conversations
from megarl.rollout.chat import Chat
from megarl.rollout.conversations import Conversations
from megarl.rollout.faults import EngineLost
from megarl.rollout.gathering import Gathered
from megarl.rollout.multi_turn import Surroundings
from megarl.rollout.queue import Tickets
from megarl.rollout.tools import load_tools
from megarl.types import Rollout, Status


def some_engine(folder: Path) -> Any:
    names = dict(url="", api_key="", tool_call_parser="", tool_call_marker="", index=0, version=0, starts=1)
    return SimpleNamespace(**names, log=folder / "logs/engine_0.log", holds=False, check_runs=lambda start: None)


def test_the_engine_lets_go_of_what_was_aborted_and_others_are_looked_at_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said_to: list[str] = []
    engine = some_engine(tmp_path)
    engine.drop_requests = lambda: said_to.append("drop")
    endings: list[Status] = ["stop", "aborted"]

    async def gathered(*_: Any, **__: Any) -> Gathered:
        if not endings:
            await asyncio.sleep(3600)
        return Gathered([Rollout(PROMPT, (), endings.pop(0))], [])

    monkeypatch.setattr(conversations, "gather_rollouts", gathered)
    monkeypatch.setattr(conversations, "_LOOK_S", 0.01)
    talks = Conversations(engine, CHAT, CONFIG)
    talks.generate([])
    assert said_to == []
    talks.generate([])
    assert said_to == ["drop"]

    def look() -> None:
        raise RuntimeError("another engine is gone")

    with pytest.raises(RuntimeError, match="another engine is gone"):
        talks.generate([], look=look)
    talks.close()


def test_an_engine_that_is_lost_is_told_of_at_once_and_is_asked_for_nothing_more(tmp_path: Path) -> None:
    engine, told = some_engine(tmp_path), []

    def check_runs(start: int) -> None:
        raise EngineLost("died", "engine 0 is not running")

    engine.check_runs, tickets = check_runs, Tickets(2)
    talks = Conversations(engine, CHAT, CONFIG, lost=told.append)
    found = talks.generate([PROMPT, PROMPT], tickets=tickets, samples=2)
    talks.close()
    assert found.rollouts == [] and found.lost is not None and found.lost.fault == "died"
    assert told and {str(one) for one in told} == {"engine 0 is not running"}
    assert tickets.left() == 2


def test_the_tools_processes_are_kept_from_one_generation_to_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = some_engine(tmp_path)

    async def only_call(prompts: Any, tickets: Any, policy: Any, around: Surroundings, **_: Any) -> Gathered:
        assert around.sessions.size == 2 * CONFIG.concurrency  # no conversation's call waits for another's
        text = (await around.sessions.call_tool("pid", {})).text
        return Gathered([Rollout(PROMPT, (), messages=({"role": "assistant", "content": text},))], [])

    monkeypatch.setattr(conversations, "gather_rollouts", only_call)
    talks = Conversations(engine, Chat(TOKENIZER, load_tools(["odd_tools:pid"])), CONFIG)  # type: ignore[arg-type]
    first, second = talks.generate([]).rollouts, talks.generate([]).rollouts
    assert first == second
    talks.close()
    talks.close()
    assert not Path(f"/proc/{first[0].answer}").exists()
