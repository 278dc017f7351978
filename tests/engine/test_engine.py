"""The real SGLang: log-probs and greedy tokens against transformers, pushes, failing starts, no orphans."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import templates
import tiny_models
import torch
from compare import generate, recorded
from engine_config import make_config
from engines import Running, start

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import ConfigError
from megarl.cpu import sglang_arguments
from megarl.engine import engine_host
from megarl.engine.client import Client
from megarl.engine.engine_host import HOST_VARIABLE, HostedServer
from megarl.engine.engine_protocol import EngineLost, Generation, RequestFailed
from megarl.engine.sglang_engine import Engine, EngineError, start_host
from megarl.engine.tool_calls import check_parser
from megarl.environments.catalog import load_catalog, load_tools
from megarl.rollout import scheduler
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.rollout_runner import RolloutRunner
from megarl.types import Message, Prompt, Reward, TrainBatch


def test_sleep_and_wake(qwen3_moe: Running) -> None:
    before = generate(qwen3_moe.engine)
    qwen3_moe.engine.sleep()
    qwen3_moe.engine.sleep()
    qwen3_moe.engine.wake()
    assert [out.token_ids.tolist() for out in generate(qwen3_moe.engine)] == [out.token_ids.tolist() for out in before]


def test_it_sleeps_when_what_it_is_at_is_done(qwen3_moe: Running) -> None:
    """An answer may have arrived of which the engine has not yet let go: it would refuse to drop the cache."""

    async def at_work() -> list[Generation]:
        engine = qwen3_moe.engine
        async with Client(engine.url, engine.api_key, 60.0) as client:
            params = {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True}
            answers = [asyncio.ensure_future(client.generate([5 + n, 6, 7], params)) for n in range(8)]
            await asyncio.sleep(0.3)
            assert not any(answer.done() for answer in answers)
            await asyncio.to_thread(engine.sleep)
            return await asyncio.gather(*answers)

    assert [len(answer.token_ids) for answer in asyncio.run(at_work())] == [400] * 8
    qwen3_moe.engine.wake()


def test_with_a_gpu_each_part_of_the_memory_sleeps_and_wakes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what SGLang is asked: it fails where it is told to wake what is awake. No GPU has been seen doing it."""
    engine = Engine(make_config(tmp_path, tmp_path), threads=1)
    calls: list[tuple[str, list[str]]] = []

    def asked() -> list[tuple[str, list[str]]]:
        result = calls.copy()
        calls.clear()
        return result

    def call(path: str, body: dict[str, Any] | None = None) -> None:
        calls.append((path.partition("=")[0], body["tags"] if body else []))

    monkeypatch.setattr(engine, "_call", call)
    monkeypatch.setattr(sglang_arguments, "HAS_MEMORY_SAVER", True)
    idle: tuple[str, list[str]] = ("/flush_cache?timeout", [])  # SGLang ends itself where it is to sleep at work
    engine.is_usable = True
    engine.wake()
    engine.sleep()
    engine.sleep()
    assert asked() == [idle, ("/release_memory_occupation", ["weights", "kv_cache", "cuda_graph"])] and engine.is_usable
    engine.wake_weights()
    engine.wake_weights()
    assert asked() == [("/resume_memory_occupation", ["weights"])] and not engine.is_usable
    engine.is_usable = True  # after a push
    engine.sleep()  # without having generated
    assert asked() == [idle, ("/release_memory_occupation", ["weights"])]
    engine.wake_weights()
    engine.is_usable = True
    engine.wake()
    engine.wake()
    assert engine.is_usable
    assert asked() == [
        ("/resume_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["kv_cache", "cuda_graph"]),
    ]
    engine.sleep()
    engine.wake()  # without a push: weights without contents
    assert asked()[2] == ("/resume_memory_occupation", ["weights", "kv_cache", "cuda_graph"]) and not engine.is_usable


def test_rollouts_by_the_real_engine(qwen3_moe: Running) -> None:
    config = qwen3_moe.config.rollout
    chat = ChatTemplate.load(str(qwen3_moe.folder), load_tools(config.tools))
    prompts = [Prompt(id=str(i), messages=({"role": "user", "content": f"{i} + {i}"},)) for i in range(3)]
    talks = RolloutRunner(qwen3_moe.engine, chat, config)
    rollouts = talks.generate(prompts, samples=4, seed=3).rollouts
    assert [rollout.group for rollout in rollouts] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({rollout.turns[1].token_ids.tobytes() for rollout in rollouts}) > 1
    for rollout in rollouts:
        assert rollout.routing is None  # nobody asked
        assert list(rollout.turns[0].token_ids) == chat.encode_prompt(rollout.prompt)
        assert 1 <= rollout.num_actions <= config.max_new_tokens
    talks.close()
    talks = RolloutRunner(qwen3_moe.engine, chat, config, recorded(qwen3_moe.engine))
    greedy = talks.generate(prompts[:1], samples=2, greedy=True).rollouts
    # Log-probs differ in their last bits with what else is in a batch, which depends on when requests arrive.
    assert greedy[0].token_ids.tolist() == greedy[1].token_ids.tolist()
    talks.close()
    batch = TrainBatch.from_rollouts(greedy)
    assert batch.routing is not None
    # Of every token but a conversation's last, which the engine never ran.
    assert [tuple(record.shape) for record in batch.routing] == [(length - 1, 2, 2) for length in batch.lengths]


def test_an_environment_with_the_real_engine(qwen3_moe: Running) -> None:
    """Each rollout has a prompt of its own, as reset has left it, and what its object says at the end."""
    config = replace(qwen3_moe.config.rollout, tools=(), environments=("odd_worlds:Guess", "odd_worlds:Odd"))
    known = load_catalog(config)
    chat = ChatTemplate.load(str(qwen3_moe.folder), known.tools, known.environments)
    user: Message = {"role": "user", "content": "Play."}
    about = [(7, "Guess"), ("reset raise", "Odd"), ("fine", "Odd")]
    tasks = [Prompt(f"{i}", (user,), ground_truth=x, extra={"environment": y}) for i, (x, y) in enumerate(about)]
    talks = RolloutRunner(qwen3_moe.engine, chat, config)
    rollouts = talks.generate(tasks, samples=4, seed=3).rollouts
    talks.close()
    for rollout in rollouts[:4]:
        assert rollout.messages[1]["content"] == "I think of a number from 1 to 100."
        assert list(rollout.turns[0].token_ids) == chat.encode_prompt(rollout.prompt)
        assert isinstance(rollout.env_reward, Reward) and len(rollout.env_reward.turns) == len(rollout.turns) // 2
    assert all(one.status == "aborted" and "it is odd" in one.failure for one in rollouts[4:8])
    assert [one.env_reward for one in rollouts[8:]] == [Reward(0.25)] * 4


def test_what_is_late_is_aborted_also_in_the_engine(qwen3_moe: Running) -> None:
    config = replace(qwen3_moe.config.rollout, step_timeout=0.3, max_new_tokens=200, max_turns=1)
    chat = ChatTemplate.load(str(qwen3_moe.folder), load_tools(config.tools))
    prompts = [Prompt(id=str(i), messages=({"role": "user", "content": f"{i} + {i}"},)) for i in range(4)]
    talks = RolloutRunner(qwen3_moe.engine, chat, config)
    rollouts = talks.generate(prompts, samples=64).rollouts
    talks.close()
    assert len(rollouts) == 256 and [r.group for r in rollouts] == [g for g in range(4) for _ in range(64)]
    late = [rollout for rollout in rollouts if rollout.status == "aborted"]
    assert len(late) > 100 and {r.failure for r in late} == {"it did not finish within rollout.step_timeout"}
    qwen3_moe.engine._call("/flush_cache")  # it refuses as long as it has anything to do
    assert generate(qwen3_moe.engine)


def test_an_answer_by_other_weights_than_were_pushed_stops_the_run(
    qwen3_moe: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = ChatTemplate.load(str(qwen3_moe.folder))
    talks = RolloutRunner(qwen3_moe.engine, chat, qwen3_moe.config.rollout)
    pushed = qwen3_moe.engine.weight_version
    monkeypatch.setattr(qwen3_moe.engine, "weight_version", 71)
    with pytest.raises(RuntimeError, match=f"with weight version {pushed}, .* version 71"):
        talks.generate([Prompt("p", ({"role": "user", "content": "1"},))], samples=2)
    talks.close()


def test_an_answers_time_does_not_include_the_queue_and_an_engine_that_dies_starts_again(
    tmp_path: Path, host: str
) -> None:
    """One at a time: the two long answers are cut off, and the short one, which waits for both, is not. Then the
    engine is killed while it writes."""
    settings = {"request_timeout": 0.3, "sglang": {"max_running_requests": 1}, "max_new_tokens": 200}
    with start(host, tiny_models.qwen3_moe(), tmp_path, **settings) as running:
        engine = running.engine

        async def ask() -> list[Any]:
            async with Client(engine.url, engine.api_key, 300.0) as client:

                async def one(tokens: int) -> Any:
                    return await client.generate(list(range(20, 30)), {"max_new_tokens": tokens, "ignore_eos": True})

                return await asyncio.gather(one(240), one(240), one(1), return_exceptions=True)

        *long, short = asyncio.run(ask())
        assert [type(out) for out in long] == [RequestFailed] * 2
        assert {str(out) for out in long} == {"the engine did not finish within rollout.request_timeout"}
        assert short.finish_reason == "length" and len(short.token_ids) == 1

        def kill() -> None:
            sockets = psutil.net_connections("tcp4")
            (pid,) = {s.pid for s in sockets if s.status == psutil.CONN_LISTEN and s.laddr.port == engine.port}
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

        talks = RolloutRunner(engine, ChatTemplate.load(str(running.folder)), running.config.rollout)
        timer = threading.Timer(0.2, kill)
        timer.start()
        tickets = GroupQueue(1)
        result = talks.generate([Prompt("p", ({"role": "user", "content": "1"},))], samples=300, queue=tickets)
        timer.join()
        assert result.engine_loss is not None and result.engine_loss.fault == "died" and result.rollouts == []
        assert re.match(r"engine 0 is not running; the last lines of .*engine_0.log:", str(result.engine_loss))
        assert 0 < result.num_interrupted <= 300 and tickets.count_unclaimed() == 1
        engine.restart()
        assert not engine.is_usable
        engine.wait_ready()
        more = talks.generate([Prompt("p", ({"role": "user", "content": "1"},))], samples=1)
        talks.close()
        assert more.engine_loss is None and len(more.rollouts) == 1 and engine.start_number == 2
        assert "--- started again" in engine.log.read_text()


def test_routing_of_a_conversation_is_that_of_one_pass_over_it(qwen3_moe: Running) -> None:
    """Three turns, each asking only for what the ones before did not tell; then everything at once, without a cache.
    Greedily, for seeds do nothing on CPU and some tokens have two experts that are as good as each other."""
    engine, observed = qwen3_moe.engine, [list(range(50, 57)), list(range(90, 95))]

    async def talk() -> tuple[torch.Tensor, torch.Tensor]:
        async with Client(engine.url, engine.api_key, 300.0, recorded(engine)) as client:
            context, parts = list(range(20, 60)), []
            for observation in [*observed, []]:
                params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
                out = await client.generate(context, params, sum(map(len, parts)))
                assert out.routing is not None
                parts.append(out.routing)
                context += [*out.token_ids, *observation]
            engine._call("/flush_cache")
            once = (await client.generate(context, {"max_new_tokens": 1})).routing
            assert once is not None and [len(part) for part in parts] == [45, 13, 11]
            return torch.cat(parts), once

    parts, once = asyncio.run(talk())
    assert torch.equal(parts.sort(-1).values, once[:-1].sort(-1).values)


def test_a_conversation_that_was_stopped_goes_on_as_if_it_had_not_been(
    qwen3_moe: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped twice in the middle of a turn, each time without the cache afterwards."""

    class Enough(GroupQueue):
        def count_complete(self) -> int:
            return 100 if self.count_claimed() == self._num_groups else 0

    engine = qwen3_moe.engine
    config = replace(qwen3_moe.config.rollout, max_new_tokens=160, max_turns=1)
    chat = ChatTemplate.load(str(qwen3_moe.folder))
    prompts = [Prompt(id=str(i), messages=({"role": "user", "content": f"{i} + {i}"},)) for i in range(4)]
    talks = RolloutRunner(engine, chat, config, recorded(engine))
    full = {rollout.prompt.id: rollout for rollout in talks.generate(prompts, samples=1, greedy=True).rollouts}
    monkeypatch.setattr(scheduler, "_POLL_S", 0.05)
    carried, lengths = [], []
    for step in range(2):
        engine._call("/flush_cache")
        tickets = Enough(0 if step else 4, num_partial_groups=4 if step else 0)
        out = talks.generate(
            prompts, queue=tickets, samples=1, greedy=True, num_needed_groups=4, partial_groups=carried
        )
        carried = [*out.partials]
        lengths.append(sum(one.num_turn_tokens for (one,) in carried if one.status is None))
    assert len(carried) == 4 and 0 < lengths[0] < lengths[1] < sum(one.num_actions for one in full.values())
    engine._call("/flush_cache")
    tickets = GroupQueue(0, num_partial_groups=4)
    out = talks.generate([], queue=tickets, greedy=True, num_needed_groups=4, partial_groups=carried)
    talks.close()
    assert sorted(rollout.group for rollout in out.rollouts) == [0, 1, 2, 3] and not out.partials
    for rollout in out.rollouts:
        other = full[rollout.prompt.id]
        assert rollout.status == other.status and rollout.token_ids.tolist() == other.token_ids.tolist()
        assert abs(rollout.turns[1].logprobs - other.turns[1].logprobs).max() < 1e-5
        assert rollout.routing is not None and other.routing is not None
        assert len(rollout.routing) == rollout.num_tokens - 1
        assert torch.equal(rollout.routing.sort(-1).values, other.routing.sort(-1).values)


def test_sglangs_parser_answers_for_the_configured_format(qwen3_moe: Running) -> None:
    engine = qwen3_moe.engine
    assert engine.tool_call_marker == "<tool_call>"
    schemas = [load_tools(["megarl.environments.ready.calculator:calculator"])["calculator"].schema]

    async def parse(text: str) -> object:
        async with Client(engine.url, engine.api_key, 300.0) as client:
            return await client.parse_tool_calls(text, schemas, "qwen25")

    good = asyncio.run(parse('a <tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>'))
    assert good == ("a", [{"tool_index": 0, "name": "calculator", "parameters": '{"expression": "1"}'}])
    other = asyncio.run(parse('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'))
    assert other == ("", [{"tool_index": -1, "name": "weather", "parameters": "{}"}])
    assert asyncio.run(parse("<tool_call>\n{oops\n</tool_call>")) == ("", [])
    assert asyncio.run(parse("<tool_call>\n[1]\n</tool_call>")) is None  # SGLang's parser raises


def test_a_call_of_each_family_is_written_by_its_template_and_read_by_its_parser(qwen3_moe: Running) -> None:
    """Templates in miniature, SGLang's own parsers: what a rollout worker rehearses before anything is trained."""
    engine, tools = qwen3_moe.engine, load_tools(["megarl.environments.ready.calculator:calculator"])
    access = engine.url, engine.api_key
    for name, family in templates.PUBLISHED.items():
        chat = ChatTemplate(family.tokenizer(), tools)
        assert check_parser(chat, *access, family.parser, "", 60.0) == "", name
        wrong = check_parser(chat, *access, "qwen25" if family.parser != "qwen25" else "glm45", "", 60.0)
        assert "does not parse how the chat template" in wrong and "\n" not in wrong
        assert family.parser in wrong.partition("set rollout.tool_call_parser to ")[2], wrong
    of_family = check_parser(
        ChatTemplate(templates.PUBLISHED["glm"].tokenizer(), tools), *access, "qwen25", "", 60.0, True
    )
    assert of_family.startswith("qwen25, the parser of the model's family, does not parse how the chat template")
    chat = ChatTemplate(templates.PUBLISHED["qwen"].tokenizer(), tools)
    assert check_parser(chat, *access, "qwen25", "<another>", 60.0)
    without = tiny_models.tokenizer()
    without.chat_template = tiny_models.WITHOUT_CALLS
    assert "does not support tool calls" in check_parser(ChatTemplate(without, tools), *access, "qwen25", "", 60.0)


def test_a_request_without_the_key_is_refused(qwen3_moe: Running) -> None:
    async def ask() -> None:
        async with Client(qwen3_moe.engine.url, "wrong", 30.0) as client:
            await client.generate([5], {"max_new_tokens": 1})

    with pytest.raises(RuntimeError, match="refused to generate"):
        asyncio.run(ask())


def test_wrong_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean attention_backend"):
        Engine(make_config(tmp_path, tmp_path, sglang={"atention_backend": "x"}))


@pytest.mark.parametrize("preloaded", [True, False], ids=["forked", "a program of its own, as with CUDA"])
def test_an_engine_that_fails_to_start_shows_its_log_and_spares_its_parent(
    tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch, preloaded: bool
) -> None:
    if preloaded:
        monkeypatch.setenv(HOST_VARIABLE, host)
    else:
        monkeypatch.setattr(sglang_arguments, "START_METHOD", "")
    model = tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"not weights")
    engine = Engine(make_config(model, tmp_path / "run"), threads=1)
    engine.start()
    with pytest.raises(EngineError, match=r"engine 0 did not start; the last lines of .*engine_0.log:\n(?s:.)*Error"):
        engine.wait_ready()
    assert not engine.is_usable


def test_an_engine_that_takes_too_long_is_ended_with_its_host(tmp_path: Path) -> None:
    model = tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model")
    engine = Engine(make_config(model, tmp_path / "run"), threads=1)
    engine.start()
    assert engine._host is not None
    local = psutil.Process(engine._host.process.pid)
    with pytest.raises(EngineError, match="was not ready after 2 s"):
        engine.wait_ready(2.0)
    assert not local.is_running()


def is_running(process: psutil.Process) -> bool:
    """False for a zombie, too: a process whose parent does not wait for it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def held_engine(model: Path, run: Path, host: str) -> Iterator[subprocess.Popen[str]]:
    """A rank that has started an engine and waits."""
    rank = subprocess.Popen(
        [
            sys.executable,
            "-W",
            "ignore",
            str(Path(__file__).parents[1] / "helpers/hold_engine.py"),
            str(model),
            str(run),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, HOST_VARIABLE: host},
        # A shell ignores Ctrl-C on behalf of what it starts in the background, and the tests may be such a thing.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        yield rank
    finally:
        rank.kill()
        rank.wait()


def await_end(processes: list[psutil.Process]) -> None:
    until(lambda: not any(is_running(process) for process in processes), processes)


def until(true: Callable[[], object], what: object) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def load_files(folder: Path) -> list[Path]:
    """What the engine with this folder has put into shared memory."""
    return list(Path("/dev/shm").glob(f"sglang_loads_{engine_host._instance_id(folder)}_*"))


def test_nothing_outlives_its_rank_its_supervisor_or_its_host(tmp_path: Path) -> None:
    """No process, no folder, no file in shared memory."""
    model = tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model")
    shared = start_host(make_config(model, tmp_path / "run"), threads=1)
    local = psutil.Process(shared.process.pid)
    victims = [
        ("rank", signal.SIGKILL),
        ("rank", signal.SIGINT),
        ("supervisor", signal.SIGKILL),
        ("host", signal.SIGKILL),
    ]
    try:
        for victim, how in victims:
            with held_engine(model, tmp_path / "run", shared.path) as rank:
                deadline = time.monotonic() + 300
                while len(family := local.children(recursive=True)) < 4 and time.monotonic() < deadline:
                    time.sleep(0.1)
                assert len(family) >= 4, "supervisor, server, scheduler, detokenizer"
                supervisor = local.children()[0].pid
                place = Path(shared.path).parent / str(supervisor)
                until(lambda place=place: load_files(place), place)
                os.kill({"rank": rank.pid, "supervisor": supervisor, "host": local.pid}[victim], how)
                await_end([*family, local] if victim == "host" else family)
                until(lambda place=place: not place.exists() and not load_files(place), place)
            assert place.parent.exists() and is_running(local) == (victim != "host")
        until(lambda: shared.process.pid != local.pid and shared.process.poll() is None, "another host")
    finally:
        shared.close()
    assert not Path(shared.path).parent.exists()


def test_a_rank_that_is_killed_takes_its_own_host_along(tmp_path: Path) -> None:
    model = tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model")
    with held_engine(model, tmp_path / "run", "") as rank:
        assert rank.stdout is not None
        local = psutil.Process(int(rank.stdout.readline()))
        folder = Path(local.cmdline()[5])
        assert Path(folder, "socket").exists()
        rank.kill()
        await_end([local])
        assert not folder.exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_is_started_through_a_host_that_is_killed_or_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    """While it imports SGLang, and again once the engine is there: which is lost then with the host that was killed."""
    model = tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model")
    shared = start_host(make_config(model, tmp_path / "run"), threads=1)
    monkeypatch.setenv(HOST_VARIABLE, shared.path)
    engine = Engine(make_config(model, tmp_path / "run"), threads=1)
    try:
        engine.start()
        os.kill(first := shared.process.pid, how)
        engine.wait_ready()
        os.kill(second := shared.process.pid, how)
        if how == signal.SIGKILL:
            until(lambda: raised(engine.check_running), "the engine is lost")
        engine.restart()
        engine.wait_ready()
        engine.check_running()
        assert len({first, second, shared.process.pid}) == (3 if how == signal.SIGKILL else 1)
    finally:
        engine.shutdown()
        shared.close()
    assert not Path(shared.path).parent.exists()


def raised(work: Callable[[], None]) -> bool:
    try:
        work()
    except EngineLost:
        return True
    return False


def test_an_import_that_fails_and_a_host_that_is_gone_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise ImportError('no kernel for this machine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    config = make_config(tmp_path, tmp_path / "run")
    shared = start_host(config)
    try:
        monkeypatch.setenv(HOST_VARIABLE, shared.path)
        engine = Engine(config)
        engine.start()
        with pytest.raises(EngineError, match="did not start; (?s:.)*no kernel for this machine"):
            engine.wait_ready()
    finally:
        shared.close()
    with pytest.raises(EngineError, match="no engine host listens at .*socket"):
        engine.start()


TAKEN = "OSError: [Errno 98] error while attempting to bind: address already in use\n" + "  a long traceback\n" * 200


@pytest.mark.parametrize("says, tries", [([TAKEN] * 4, 3), ([TAKEN, "RuntimeError: something else\n", TAKEN], 2)])
def test_a_port_that_was_taken_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: list[str], tries: int
) -> None:
    """Starts fail with SGLang's words for a taken port, and go on about it for long, or with other words."""
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    ports: list[int] = []

    class Ended(HostedServer):
        is_abandoned = False

        def __init__(self, path: str, log: Path, environment: Any, settings: Any) -> None:
            ports.append(settings["server_args"]["port"])
            with log.open("a") as file:
                file.write(says[len(ports) - 1])

        def poll(self) -> int:
            return 1

        def close(self) -> None:
            pass

    monkeypatch.setenv(HOST_VARIABLE, "nobody is there")
    monkeypatch.setattr("megarl.engine.sglang_engine.HostedServer", Ended)
    engine = Engine(make_config(tmp_path, tmp_path / "run"), threads=1)
    engine.start()
    with pytest.raises(EngineError, match=says[tries - 1].splitlines()[-1]):
        engine.wait_ready(60.0)
    assert len(ports) == tries
