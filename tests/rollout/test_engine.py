"""The real SGLang: log-probs and greedy tokens against transformers, pushes, failing starts, no orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import tiny_models
from compare import generate
from conftest import Running, make_config

from megarl.config import ConfigError
from megarl.rollout.chat import Chat
from megarl.rollout.client import Client
from megarl.rollout.engine import Engine, EngineError
from megarl.rollout.multi_turn import generate_rollouts
from megarl.rollout.tools import load_tools
from megarl.types import Prompt


def test_sleep_and_wake(qwen3_moe: Running) -> None:
    before = generate(qwen3_moe.engine)
    qwen3_moe.engine.sleep()
    qwen3_moe.engine.sleep()
    qwen3_moe.engine.wake()
    assert [out.token_ids for out in generate(qwen3_moe.engine)] == [out.token_ids for out in before]


def test_rollouts_by_the_real_engine(qwen3_moe: Running) -> None:
    config = qwen3_moe.config.rollout
    chat = Chat.load(str(qwen3_moe.folder), load_tools(config.tools))
    prompts = [Prompt(id=str(i), messages=({"role": "user", "content": f"{i} + {i}"},)) for i in range(3)]
    rollouts = generate_rollouts(prompts, qwen3_moe.engine, chat, config, samples=4, seed=3)
    assert [rollout.group for rollout in rollouts] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({rollout.turns[1].token_ids for rollout in rollouts}) > 1
    for rollout in rollouts:
        assert list(rollout.turns[0].token_ids) == chat.render(rollout.prompt)
        assert 1 <= rollout.num_actions <= config.max_new_tokens
    greedy = generate_rollouts(prompts[:1], qwen3_moe.engine, chat, config, samples=2, greedy=True)
    assert greedy[0].turns == greedy[1].turns


def test_sglangs_parser_answers_for_the_configured_format(qwen3_moe: Running) -> None:
    engine = qwen3_moe.engine
    assert engine.tool_call_marker == "<tool_call>"
    schemas = [load_tools(["megarl.rollout.tools:calculator"])["calculator"].schema]

    async def parse(text: str) -> object:
        async with Client(engine.url, engine.api_key, 300.0, 1) as client:
            return await client.parse_tool_calls(text, schemas, "qwen25")

    good = asyncio.run(parse('a <tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>'))
    assert good == ("a", [{"tool_index": 0, "name": "calculator", "parameters": '{"expression": "1"}'}])
    other = asyncio.run(parse('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'))
    assert other == ("", [{"tool_index": -1, "name": "weather", "parameters": "{}"}])
    assert asyncio.run(parse("<tool_call>\n{oops\n</tool_call>")) == ("", [])
    assert asyncio.run(parse("<tool_call>\n[1]\n</tool_call>")) is None  # SGLang's parser raises


def test_a_request_without_the_key_is_refused(qwen3_moe: Running) -> None:
    async def ask() -> None:
        async with Client(qwen3_moe.engine.url, "wrong", 30.0, 1) as client:
            await client.generate([5], {"max_new_tokens": 1})

    with pytest.raises(RuntimeError, match="refused to generate"):
        asyncio.run(ask())


def test_wrong_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean attention_backend"):
        Engine(make_config(tmp_path, tmp_path, sglang={"atention_backend": "x"}))


def test_an_engine_that_fails_to_start_shows_its_log_and_spares_its_parent(tmp_path: Path) -> None:
    model = tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"not weights")
    engine = Engine(make_config(model, tmp_path / "run"), threads=1)
    engine.start()
    with pytest.raises(EngineError, match=r"engine 0 did not start; the last lines of .*engine_0.log:\n(?s:.)*Error"):
        engine.wait_ready()
    assert not engine.usable


def test_an_engine_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    model = tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model")
    engine = Engine(make_config(model, tmp_path / "run"), threads=1)
    engine.start()
    assert engine._process is not None
    intermediate = psutil.Process(engine._process.pid)
    with pytest.raises(EngineError, match="was not ready after 2 s"):
        engine.wait_ready(2.0)
    assert not intermediate.is_running()


def is_running(pid: int) -> bool:
    """False for a zombie, too: a process whose parent does not wait for it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


@pytest.mark.parametrize(
    ("victim", "how", "family_size"),
    [("rank", signal.SIGKILL, 2), ("rank", signal.SIGINT, 1), ("intermediate", signal.SIGKILL, 1)],
)
def test_no_process_outlives_the_rank(tmp_path: Path, victim: str, how: signal.Signals, family_size: int) -> None:
    """With family_size 2 the scheduler is up, too, which takes a while; with 1 the server is still on its way."""
    model = tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model")
    script = Path(__file__).with_name("hold_engine.py")
    rank = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), str(model), str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # A shell ignores Ctrl-C on behalf of what it starts in the background, and the tests may be such a thing.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert rank.stdout is not None
        intermediate = int(rank.stdout.readline())
        deadline = time.monotonic() + 300
        while len(family := descendants(intermediate)) < family_size and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(family) >= family_size
        os.kill(rank.pid if victim == "rank" else intermediate, how)
        deadline = time.monotonic() + 30
        while alive := [pid for pid in [intermediate, *(process.pid for process in family)] if is_running(pid)]:
            assert time.monotonic() < deadline, alive
            time.sleep(0.1)
    finally:
        rank.kill()
        rank.wait()


def test_a_port_that_was_taken_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start fails with SGLang's words for a taken port, once."""
    engine = Engine(make_config(tmp_path, tmp_path / "run"), threads=1)
    launched: list[int] = []

    def launch() -> None:
        launched.append(1)
        engine._process = subprocess.Popen([sys.executable, "-c", "pass"], stdin=subprocess.PIPE)
        engine.log.write_text("OSError: [Errno 98] error while attempting to bind: address already in use")

    monkeypatch.setattr(engine, "_launch", launch)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        engine.port = probe.getsockname()[1]
        engine.start()
        with pytest.raises(EngineError, match="address already in use"):
            engine.wait_ready(60.0)
    assert len(launched) == 3
