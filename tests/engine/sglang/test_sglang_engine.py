"""The real SGLang: sleep and wake, rollouts, restarts, failing starts, and no orphaned processes."""

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
from compare import engine_routing_shape, generate
from engine_config import make_config
from engines import RunningEngine, start_engine

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import ConfigError
from megarl.cpu import sglang_arguments
from megarl.engine.engine_host import HOST_VARIABLE, HostedServer
from megarl.engine.engine_protocol import EngineError, EngineLost, Generation, RecordedPrefix, RequestFailed
from megarl.engine.http_client import HTTPClient
from megarl.engine.sglang.sglang_engine import SGLangEngine, start_host
from megarl.engine.sglang.sglang_server import instance_id
from megarl.engine.tool_calls import check_parser
from megarl.environments.catalog import load_catalog, load_tools
from megarl.rollout.group_queue import UNLIMITED, GroupQueue
from megarl.rollout.group_stream import AdmittedPrompt
from megarl.rollout.rollout_runner import RolloutRunner
from megarl.types import Message, Prompt, Reward, TrainBatch


def test_sleep_and_wake_keep_the_weights(qwen3_moe: RunningEngine) -> None:
    before = generate(qwen3_moe.engine)
    qwen3_moe.engine.sleep()
    qwen3_moe.engine.sleep()
    qwen3_moe.engine.wake()
    assert [out.token_ids.tolist() for out in generate(qwen3_moe.engine)] == [out.token_ids.tolist() for out in before]


def test_sleep_waits_for_running_requests(qwen3_moe: RunningEngine) -> None:
    """SGLang refuses to drop its cache while a request runs."""

    async def sleep_during_requests() -> list[Generation]:
        engine = qwen3_moe.engine
        async with HTTPClient(engine.url, engine.api_key, 60.0) as client:
            params = {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True}
            begun = asyncio.Event()
            answers = [
                asyncio.ensure_future(client.generate([5 + n, 6, 7], params, on_tokens=lambda ids: begun.set()))
                for n in range(8)
            ]
            await begun.wait()
            assert not any(answer.done() for answer in answers)
            await asyncio.to_thread(engine.sleep)
            return await asyncio.gather(*answers)

    assert [len(answer.token_ids) for answer in asyncio.run(sleep_during_requests())] == [400] * 8
    qwen3_moe.engine.wake()


def test_releases_and_resumes_gpu_memory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the calls to SGLang, which fails if told to resume memory that is not released. Not run on a GPU."""
    engine = SGLangEngine(make_config(tmp_path, tmp_path), threads=1)
    calls: list[tuple[str, list[str]]] = []

    def pop_calls() -> list[tuple[str, list[str]]]:
        result = calls.copy()
        calls.clear()
        return result

    def call(path: str, body: dict[str, Any] | None = None) -> None:
        calls.append((path.partition("=")[0], body["tags"] if body else []))

    monkeypatch.setattr(engine, "_call", call)
    monkeypatch.setattr(sglang_arguments, "HAS_MEMORY_SAVER", True)
    idle: tuple[str, list[str]] = ("/flush_cache?timeout", [])  # SGLang exits if told to sleep while busy
    engine.is_usable = True
    engine.wake()
    engine.sleep()
    engine.sleep()
    assert (
        pop_calls() == [idle, ("/release_memory_occupation", ["weights", "kv_cache", "cuda_graph"])]
        and engine.is_usable
    )
    engine.wake_weights()
    engine.wake_weights()
    assert pop_calls() == [("/resume_memory_occupation", ["weights"])] and not engine.is_usable
    engine.is_usable = True  # after a weight sync
    engine.sleep()  # without generating
    assert pop_calls() == [idle, ("/release_memory_occupation", ["weights"])]
    engine.wake_weights()
    engine.is_usable = True
    engine.wake()
    engine.wake()
    assert engine.is_usable
    assert pop_calls() == [
        ("/resume_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["kv_cache", "cuda_graph"]),
    ]
    engine.sleep()
    engine.wake()  # without a weight sync: the weights are empty
    assert (
        pop_calls()[2] == ("/resume_memory_occupation", ["weights", "kv_cache", "cuda_graph"]) and not engine.is_usable
    )


def test_rollouts_with_the_real_engine(qwen3_moe: RunningEngine) -> None:
    config = qwen3_moe.config.rollout
    chat = ChatTemplate.load(str(qwen3_moe.folder), load_tools(config.tools))
    prompts = [Prompt(id=str(i), messages=({"role": "user", "content": f"{i} + {i}"},)) for i in range(3)]
    runner = RolloutRunner(qwen3_moe.engine, chat, config)
    rollouts = runner.generate(prompts, samples=4, seed=3).rollouts
    assert [rollout.group for rollout in rollouts] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({rollout.turns[1].token_ids.tobytes() for rollout in rollouts}) > 1
    for rollout in rollouts:
        assert rollout.routing is None  # not requested
        assert list(rollout.turns[0].token_ids) == chat.encode_prompt(rollout.prompt)
        assert 1 <= rollout.num_actions <= config.max_new_tokens
    runner.close()
    runner = RolloutRunner(qwen3_moe.engine, chat, config, engine_routing_shape(qwen3_moe.engine))
    greedy = runner.generate(prompts[:1], samples=2, greedy=True).rollouts
    # The last bits of log-probs depend on the batch, which depends on when requests arrive.
    assert greedy[0].token_ids.tolist() == greedy[1].token_ids.tolist()
    runner.close()
    batch = TrainBatch.from_rollouts(greedy)
    assert batch.routing is not None
    # One record per token except the last, which the engine never ran.
    assert [tuple(record.shape) for record in batch.routing] == [(length - 1, 2, 2) for length in batch.lengths]


def test_environments_with_the_real_engine(qwen3_moe: RunningEngine) -> None:
    """Each rollout has its own prompt, as `reset` returned it, and its environment's reward."""
    config = replace(
        qwen3_moe.config.rollout, tools=(), environments=("toy_environments:Guess", "toy_environments:Odd")
    )
    catalog = load_catalog(config)
    chat = ChatTemplate.load(str(qwen3_moe.folder), catalog.tools, catalog.environments)
    user: Message = {"role": "user", "content": "Play."}
    cases = [(7, "Guess"), ("reset raise", "Odd"), ("fine", "Odd")]
    tasks = [Prompt(f"{i}", (user,), ground_truth=x, extra={"environment": y}) for i, (x, y) in enumerate(cases)]
    runner = RolloutRunner(qwen3_moe.engine, chat, config)
    rollouts = runner.generate(tasks, samples=4, seed=3).rollouts
    runner.close()
    for rollout in rollouts[:4]:
        assert rollout.messages[1]["content"] == "I think of a number from 1 to 100."
        assert list(rollout.turns[0].token_ids) == chat.encode_prompt(rollout.prompt)
        assert isinstance(rollout.env_reward, Reward) and len(rollout.env_reward.turns) == len(rollout.turns) // 2
    assert all(rollout.status == "aborted" and "it is odd" in rollout.failure for rollout in rollouts[4:8])
    assert [rollout.env_reward for rollout in rollouts[8:]] == [Reward(0.25)] * 4


def test_step_timeout_aborts_requests_in_the_engine(qwen3_moe: RunningEngine) -> None:
    config = replace(qwen3_moe.config.rollout, step_timeout=0.3, max_new_tokens=200, max_turns=1)
    chat = ChatTemplate.load(str(qwen3_moe.folder), load_tools(config.tools))
    prompts = [Prompt(id=str(i), messages=({"role": "user", "content": f"{i} + {i}"},)) for i in range(4)]
    runner = RolloutRunner(qwen3_moe.engine, chat, config)
    rollouts = runner.generate(prompts, samples=64).rollouts
    runner.close()
    assert len(rollouts) == 256 and [r.group for r in rollouts] == [g for g in range(4) for _ in range(64)]
    aborted = [rollout for rollout in rollouts if rollout.status == "aborted"]
    assert len(aborted) > 100 and {r.failure for r in aborted} == {"it did not finish within rollout.step_timeout"}
    qwen3_moe.engine._call("/flush_cache")  # refused while requests run
    assert generate(qwen3_moe.engine)


def test_unexpected_weight_version_stops_the_run(qwen3_moe: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ChatTemplate.load(str(qwen3_moe.folder))
    runner = RolloutRunner(qwen3_moe.engine, chat, qwen3_moe.config.rollout)
    version = qwen3_moe.engine.weight_version
    monkeypatch.setattr(qwen3_moe.engine, "weight_version", 71)
    with pytest.raises(RuntimeError, match=f"with weight version {version}, .* version 71"):
        runner.generate([Prompt("p", ({"role": "user", "content": "1"},))], samples=2)
    runner.close()


@pytest.mark.nightly
def test_request_timeout_excludes_the_queue_and_engine_restarts(tmp_path: Path, host: str) -> None:
    """With one slot the two long requests time out, but not the short one that waits for both. Then the engine is
    killed while it generates."""
    settings = {"request_timeout": 0.3, "sglang": {"max_running_requests": 1}, "max_new_tokens": 200}
    with start_engine(host, tiny_models.qwen3_moe(), tmp_path, **settings) as running:
        engine = running.engine

        async def run() -> list[Any]:
            async with HTTPClient(engine.url, engine.api_key, 300.0) as client:

                async def generate_tokens(tokens: int) -> Any:
                    return await client.generate(list(range(20, 30)), {"max_new_tokens": tokens, "ignore_eos": True})

                return await asyncio.gather(
                    generate_tokens(240), generate_tokens(240), generate_tokens(1), return_exceptions=True
                )

        *long, short = asyncio.run(run())
        assert [type(out) for out in long] == [RequestFailed] * 2
        assert {str(out) for out in long} == {"the engine did not finish within rollout.request_timeout"}
        assert short.finish_reason == "length" and len(short.token_ids) == 1

        def kill() -> None:
            sockets = psutil.net_connections("tcp4")
            (pid,) = {s.pid for s in sockets if s.status == psutil.CONN_LISTEN and s.laddr.port == engine.port}
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

        runner = RolloutRunner(engine, ChatTemplate.load(str(running.folder)), running.config.rollout)
        timer = threading.Timer(0.2, kill)
        timer.start()
        queue = GroupQueue(1)
        result = runner.generate([Prompt("p", ({"role": "user", "content": "1"},))], samples=300, queue=queue)
        timer.join()
        assert result.engine_loss is not None and result.engine_loss.fault == "died" and result.rollouts == []
        assert re.match(r"engine 0 is not running; the last lines of .*engine_0.log:", str(result.engine_loss))
        assert 0 < result.num_interrupted <= 300 and queue.count_unclaimed() == 1
        engine.restart()
        assert not engine.is_usable
        engine.wait_ready()
        further = runner.generate([Prompt("p", ({"role": "user", "content": "1"},))], samples=1)
        runner.close()
        assert further.engine_loss is None and len(further.rollouts) == 1 and engine.start_number == 2
        assert "--- started again" in engine.log.read_text()


def test_routing_by_turns_equals_routing_of_one_pass(qwen3_moe: RunningEngine) -> None:
    """Three turns, each requesting only the missing routing, then one pass without the cache. Greedy, because seeds
    have no effect on the CPU. Experts are sorted, because some tokens have two equally good ones."""
    engine, observed = qwen3_moe.engine, [list(range(50, 57)), list(range(90, 95))]

    async def generate_turns() -> tuple[torch.Tensor, torch.Tensor]:
        async with HTTPClient(engine.url, engine.api_key, 300.0, engine_routing_shape(engine)) as client:
            context, parts = list(range(20, 60)), []
            for observation in [*observed, []]:
                params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
                out = await client.generate(context, params, RecordedPrefix(sum(map(len, parts)), None))
                assert out.routing is not None
                parts.append(out.routing)
                context += [*out.token_ids, *observation]
            engine._call("/flush_cache")
            full = (await client.generate(context, {"max_new_tokens": 1})).routing
            assert full is not None and [len(part) for part in parts] == [45, 13, 11]
            return torch.cat(parts), full

    parts, full = asyncio.run(generate_turns())
    assert torch.equal(parts.sort(-1).values, full[:-1].sort(-1).values)


def test_rollouts_that_slept_equal_uninterrupted_ones(qwen3_moe: RunningEngine) -> None:
    """Sleep within turns until the longest has gone on twice, and drop the cache each time."""
    engine = qwen3_moe.engine
    config = replace(qwen3_moe.config.rollout, max_new_tokens=400, max_turns=1, temperature=0.0)
    chat = ChatTemplate.load(str(qwen3_moe.folder))
    prompts = [Prompt(id=str(i), messages=({"role": "user", "content": f"{i} + {i}"},)) for i in range(4)]
    runner = RolloutRunner(engine, chat, config, engine_routing_shape(engine))
    full = {rollout.prompt.id: rollout for rollout in runner.generate(prompts, samples=1, greedy=True).rollouts}
    engine._call("/flush_cache")
    runner.start_stream(GroupQueue(UNLIMITED), samples=1, max_groups=4, version=engine.weight_version)
    runner.admit([AdmittedPrompt(prompt, 1, index) for index, prompt in enumerate(prompts)])
    lengths, delay = [0], 0.01
    while len(lengths) < 3:
        time.sleep(delay)
        delay += 0.01  # the shortest that lets the engine go on: a turn ends after about a second
        runner.sleep("retract")
        engine._call("/flush_cache")
        partials = [partial for (partial,) in runner.snapshot() if partial.status is None]
        longest = max((partial.num_turn_tokens for partial in partials), default=0)
        assert longest >= lengths[-1], "all turns ended before the engine slept twice"
        lengths += {longest} - {lengths[-1]}
        runner.wake()
    out = runner.collect(4, 0).result()
    runner.close()
    assert 0 < lengths[1] < lengths[2] and out is not None, lengths
    assert sorted(rollout.group for rollout in out.rollouts) == [0, 1, 2, 3]
    for rollout in out.rollouts:
        reference = full[rollout.prompt.id]
        assert rollout.status == reference.status and rollout.token_ids.tolist() == reference.token_ids.tolist()
        assert abs(rollout.turns[1].logprobs - reference.turns[1].logprobs).max() < 1e-5
        assert rollout.routing is not None and reference.routing is not None
        assert len(rollout.routing) == rollout.num_tokens - 1
        assert torch.equal(rollout.routing.sort(-1).values, reference.routing.sort(-1).values)


def test_parses_calls_in_the_configured_format(qwen3_moe: RunningEngine) -> None:
    engine = qwen3_moe.engine
    assert engine.tool_call_marker == "<tool_call>"
    schemas = [load_tools(["megarl.environments.ready.calculator:calculator"])["calculator"].schema]

    async def parse(text: str) -> object:
        async with HTTPClient(engine.url, engine.api_key, 300.0) as client:
            return await client.parse_tool_calls(text, schemas, "qwen25")

    parsed = asyncio.run(parse('a <tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>'))
    assert parsed == ("a", [{"tool_index": 0, "name": "calculator", "parameters": '{"expression": "1"}'}])
    unknown_tool = asyncio.run(parse('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'))
    assert unknown_tool == ("", [{"tool_index": -1, "name": "weather", "parameters": "{}"}])
    assert asyncio.run(parse("<tool_call>\n{oops\n</tool_call>")) == ("", [])
    assert asyncio.run(parse("<tool_call>\n[1]\n</tool_call>")) is None  # SGLang's parser raises


def test_parsers_read_calls_of_each_familys_template(qwen3_moe: RunningEngine) -> None:
    """The check that a rollout worker runs before training, with short templates and SGLang's parsers."""
    engine, tools = qwen3_moe.engine, load_tools(["megarl.environments.ready.calculator:calculator"])
    for name, family in templates.PUBLISHED.items():
        chat = ChatTemplate(family.tokenizer(), tools)
        assert check_parser(chat, engine.connect(60.0), family.parser, "") == "", name
        mismatch = check_parser(chat, engine.connect(60.0), "qwen25" if family.parser != "qwen25" else "glm45", "")
        assert "does not parse how the chat template" in mismatch and "\n" not in mismatch
        assert family.parser in mismatch.partition("set rollout.tool_call_parser to ")[2], mismatch
    of_family = check_parser(
        ChatTemplate(templates.PUBLISHED["glm"].tokenizer(), tools), engine.connect(60.0), "qwen25", "", True
    )
    assert of_family.startswith("qwen25, the parser of the model's family, does not parse how the chat template")
    chat = ChatTemplate(templates.PUBLISHED["qwen"].tokenizer(), tools)
    assert check_parser(chat, engine.connect(60.0), "qwen25", "<another>")
    without = tiny_models.tokenizer()
    without.chat_template = tiny_models.WITHOUT_CALLS
    assert "does not support tool calls" in check_parser(
        ChatTemplate(without, tools), engine.connect(60.0), "qwen25", ""
    )


def test_rejects_requests_without_the_key(qwen3_moe: RunningEngine) -> None:
    async def run() -> None:
        async with HTTPClient(qwen3_moe.engine.url, "wrong", 30.0) as client:
            await client.generate([5], {"max_new_tokens": 1})

    with pytest.raises(RuntimeError, match="refused to generate"):
        asyncio.run(run())


def test_unknown_setting_is_a_config_error_before_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean attention_backend"):
        SGLangEngine(make_config(tmp_path, tmp_path, sglang={"atention_backend": "x"}))


@pytest.mark.parametrize(
    "preloaded",
    [
        pytest.param(True, id="forked"),
        pytest.param(False, id="separate program, as with CUDA", marks=pytest.mark.nightly),
    ],
)
def test_failed_start_shows_the_log(
    tmp_path: Path, host: str, monkeypatch: pytest.MonkeyPatch, preloaded: bool
) -> None:
    if preloaded:
        monkeypatch.setenv(HOST_VARIABLE, host)
    else:
        monkeypatch.setattr(sglang_arguments, "START_METHOD", "")
    model = tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"not weights")
    engine = SGLangEngine(make_config(model, tmp_path / "run"), threads=1)
    engine.start()
    with pytest.raises(EngineError, match=r"engine 0 did not start; the last lines of .*engine_0.log:\n(?s:.)*Error"):
        engine.wait_ready()
    assert not engine.is_usable


def test_start_timeout_ends_the_engine_and_its_host(tmp_path: Path) -> None:
    model = tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model")
    engine = SGLangEngine(make_config(model, tmp_path / "run"), threads=1)
    engine.start()
    assert engine._host is not None
    host_process = psutil.Process(engine._host.process.pid)
    with pytest.raises(EngineError, match="was not ready after 2 s"):
        engine.wait_ready(2.0)
    assert not host_process.is_running()


def is_running(process: psutil.Process) -> bool:
    """Return False for zombies, too."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def rank_with_engine(model: Path, run: Path, host: str) -> Iterator[subprocess.Popen[str]]:
    """Start a rank that starts an engine and waits."""
    rank = subprocess.Popen(
        [
            sys.executable,
            "-W",
            "ignore",
            str(Path(__file__).parents[2] / "helpers/hold_engine.py"),
            str(model),
            str(run),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, HOST_VARIABLE: host},
        # A shell ignores Ctrl-C for background jobs, and the tests may be one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        yield rank
    finally:
        rank.kill()
        rank.wait()


def wait_until_ended(processes: list[psutil.Process]) -> None:
    wait_until(lambda: not any(is_running(process) for process in processes), processes)


def wait_until(condition: Callable[[], object], description: object) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, description
        time.sleep(0.1)


def find_load_files(folder: Path) -> list[Path]:
    """Return the files in shared memory of the engine with this folder."""
    return list(Path("/dev/shm").glob(f"sglang_loads_{instance_id(str(folder))}_*"))


@pytest.mark.nightly
def test_engine_ends_with_its_rank_supervisor_or_host(tmp_path: Path) -> None:
    """No process, folder or file in shared memory remains."""
    model = tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model")
    shared = start_host(make_config(model, tmp_path / "run"), threads=1)
    host_process = psutil.Process(shared.process.pid)
    victims = [
        ("rank", signal.SIGKILL),
        ("rank", signal.SIGINT),
        ("supervisor", signal.SIGKILL),
        ("host", signal.SIGKILL),
    ]
    try:
        for victim, kill_signal in victims:
            with rank_with_engine(model, tmp_path / "run", shared.path) as rank:
                deadline = time.monotonic() + 300
                while len(family := host_process.children(recursive=True)) < 4 and time.monotonic() < deadline:
                    time.sleep(0.1)
                assert len(family) >= 4, "supervisor, server, scheduler, detokenizer"
                supervisor = host_process.children()[0].pid
                engine_folder = Path(shared.path).parent / str(supervisor)
                wait_until(lambda engine_folder=engine_folder: find_load_files(engine_folder), engine_folder)
                os.kill({"rank": rank.pid, "supervisor": supervisor, "host": host_process.pid}[victim], kill_signal)
                wait_until_ended([*family, host_process] if victim == "host" else family)
                wait_until(
                    lambda engine_folder=engine_folder: (
                        not engine_folder.exists() and not find_load_files(engine_folder)
                    ),
                    engine_folder,
                )
            assert engine_folder.parent.exists() and is_running(host_process) == (victim != "host")
        wait_until(lambda: shared.process.pid != host_process.pid and shared.process.poll() is None, "another host")
    finally:
        shared.close()
    assert not Path(shared.path).parent.exists()


def test_killed_rank_ends_its_own_host(tmp_path: Path) -> None:
    model = tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model")
    with rank_with_engine(model, tmp_path / "run", "") as rank:
        assert rank.stdout is not None
        pid, path = rank.stdout.readline().split()
        host_process = psutil.Process(int(pid))
        assert Path(path).exists()
        rank.kill()
        wait_until_ended([host_process])
        wait_until(lambda: not Path(path).parent.exists(), path)  # removed by the process that has watched the host


@pytest.mark.nightly
@pytest.mark.parametrize("kill_signal", [signal.SIGKILL, signal.SIGSTOP])
def test_engine_starts_despite_a_killed_or_stopped_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_signal: signal.Signals
) -> None:
    """Signal the host while it imports SGLang and once the engine runs. A killed host takes the engine with it."""
    model = tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "model")
    shared = start_host(make_config(model, tmp_path / "run"), threads=1)
    monkeypatch.setenv(HOST_VARIABLE, shared.path)
    engine = SGLangEngine(make_config(model, tmp_path / "run"), threads=1)
    try:
        engine.start()
        os.kill(first := shared.process.pid, kill_signal)
        engine.wait_ready()
        os.kill(second := shared.process.pid, kill_signal)
        if kill_signal == signal.SIGKILL:
            wait_until(lambda: is_lost(engine.check_running), "the engine is lost")
        engine.restart()
        engine.wait_ready()
        engine.check_running()
        assert len({first, second, shared.process.pid}) == (3 if kill_signal == signal.SIGKILL else 1)
    finally:
        engine.shutdown()
        shared.close()
    assert not Path(shared.path).parent.exists()


def is_lost(check: Callable[[], None]) -> bool:
    try:
        check()
    except EngineLost:
        return True
    return False


def test_failed_import_and_missing_host_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise ImportError('no kernel for this machine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    config = make_config(tmp_path, tmp_path / "run")
    shared = start_host(config)
    try:
        monkeypatch.setenv(HOST_VARIABLE, shared.path)
        engine = SGLangEngine(config)
        engine.start()
        with pytest.raises(EngineError, match="did not start; (?s:.)*no kernel for this machine"):
            engine.wait_ready()
    finally:
        shared.close()
    with pytest.raises(EngineError, match="no engine host listens at .*socket"):
        engine.start()


PORT_IN_USE = (
    "OSError: [Errno 98] error while attempting to bind: address already in use\n" + "  a long traceback\n" * 200
)


@pytest.mark.parametrize(
    "log_texts, attempts", [([PORT_IN_USE] * 4, 3), ([PORT_IN_USE, "RuntimeError: something else\n", PORT_IN_USE], 2)]
)
def test_retries_with_another_port_if_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_texts: list[str], attempts: int
) -> None:
    """Starts fail with SGLang's message for a port in use, followed by a long traceback, or with another message."""
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    ports: list[int] = []

    class FailedServer(HostedServer):
        is_abandoned = False

        def __init__(self, path: str, module: str, log: Path, environment: Any, settings: Any, python: str) -> None:
            ports.append(settings["server_args"]["port"])
            with log.open("a") as file:
                file.write(log_texts[len(ports) - 1])

        def poll(self) -> int:
            return 1

        def close(self) -> None:
            pass

    monkeypatch.setenv(HOST_VARIABLE, "nobody is there")
    monkeypatch.setattr("megarl.engine.http_engine.HostedServer", FailedServer)
    engine = SGLangEngine(make_config(tmp_path, tmp_path / "run"), threads=1)
    engine.start()
    with pytest.raises(EngineError, match=log_texts[attempts - 1].splitlines()[-1]):
        engine.wait_ready(60.0)
    assert len(ports) == attempts
