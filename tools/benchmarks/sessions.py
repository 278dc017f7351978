"""Cost of conversations through the session server, relative to querying the engine directly.

    .venv/bin/python tools/bench.py sessions FOLDER [--conversations 64] [--turns 3] [--tokens 32] [--rounds 5] [--even]

Uses the quickstart's model, as tools/make_quickstart.py writes it to the folder, with a real engine; with --played, a
mocked engine that answers at once, so that all of the time is that of the server and its clients.

Each round runs three methods on the same conversations, with the same number of tokens in each turn of the policy and
the same user messages between them. A turn has from 1 to 2 * tokens - 1 tokens; with --even all have the same number,
so that all answers arrive at the same moment and the engine is idle until the first of the next requests arrive. No
agents behave like this; the server's cost is largest then.

- by the loop: in one event loop of this process, ids in and ids out, like the rollout loop without agents;
- by the clients: in a separate process that queries the engine itself, with ids, and reads its records;
- by the server: the clients' process sends text to the session server and gets text; this process queries the engine.
  The rollouts of a conversation are collected when it ends, as in a run.

The server's cost to an agent is the last over the second, because an agent is a separate process either way; the cost
of agents relative to no agents is the last over the first. No prompt occurs twice, so no method finds another's keys
and values in the cache. The figures are medians, and medians of the ratios within a round; if other work shares the
machine, the CPU seconds of this process mean more than the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.measure import Samples, Stopwatch, compute_ratio, rotate
from benchmarks.output import Report
from benchmarks.workloads import check_quickstart, start_engine
from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import Config, RolloutConfig, from_dict
from megarl.config.command_line import int_in_range
from megarl.engine.engine_protocol import NOT_RECORDED, Generation, Policy
from megarl.engine.http_client import HTTPClient
from megarl.engine.tool_calls import ParsedResponse
from megarl.models.registry import load_hf_config
from megarl.models.routing import routing_shape
from megarl.rollout.conversation import build_sampling_params
from megarl.rollout.session_server import AgentSession, SessionServer
from megarl.types import Ids, Message, Prompt, as_token_ids

LOOP, CLIENTS, SERVER = METHODS = ("by the loop", "by the clients", "by the server")
FOLLOW_UP = {"role": "user", "content": "Are you sure? Say it again, and say how you have found it."}


class MockEngine:
    """A mocked engine that answers at once, with as many tokens as requested."""

    async def generate(self, ids: Ids | Sequence[int], params: dict[str, Any], *_: Any, **__: Any) -> Generation:
        tokens = np.resize(as_token_ids(ids)[-16:], params["max_new_tokens"])
        return Generation(tokens, np.zeros(len(tokens), np.float32), "length", 0)

    async def stop(self) -> None:
        """Do nothing: there is nothing to stop."""


async def parse(text: str, schemas: Any) -> ParsedResponse:
    return ParsedResponse(text)


def prompts(chat: ChatTemplate, options: argparse.Namespace, number: int) -> list[Prompt]:
    """Return rendered prompts of one method in one round; no other prompt starts with the same words."""
    first = number * options.conversations
    texts = (
        {"role": "user", "content": f"{index:07d}: what is {index} + {2 * index}?"}
        for index in range(first, first + options.conversations)
    )
    return [Prompt("", (message,), as_token_ids(chat.encode_prompt(Prompt("", (message,))))) for message in texts]


def lengths(options: argparse.Namespace) -> list[list[int]]:
    """Return the number of tokens of each turn of each conversation."""
    rng = random.Random(options.tokens)
    low, high = (options.tokens, options.tokens) if options.even else (1, 2 * options.tokens - 1)
    return [[rng.randint(low, high) for _ in range(options.turns)] for _ in range(options.conversations)]


async def run_loop(
    policy: Policy, chat: ChatTemplate, session_prompts: list[Prompt], params: dict[str, Any], options: Any
) -> None:
    async def converse(prompt: Prompt, tokens: list[int]) -> None:
        ids, recorded = prompt.token_ids, NOT_RECORDED
        for turn, num_tokens in enumerate(tokens):
            generated = await policy.generate(ids, {**params, "max_new_tokens": num_tokens}, recorded)
            recorded = generated.extend_prefix(recorded)
            await parse(chat.decode(generated.token_ids), ())
            if turn == options.turns - 1:
                return
            continuation = as_token_ids(chat.encode_continuation([FOLLOW_UP], (), int(generated.token_ids[-1])))
            ids = np.concatenate([ids, generated.token_ids, continuation])

    await asyncio.gather(*map(converse, session_prompts, lengths(options)))


async def run_server(
    server: SessionServer, policy: Policy, session_prompts: list[Prompt], params: dict[str, Any], clients: Any
) -> None:
    """Run the conversations through the session server. Return the branches that result."""
    recordings: list[AgentSession] = [server.open(prompt, policy, params) for prompt in session_prompts]
    clients.send(
        [
            (session.base_url, session.key, list(prompt.messages))
            for session, prompt in zip(recordings, session_prompts, strict=True)
        ]
    )
    readable, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(clients.fileno(), readable.set)
    try:
        remaining = len(recordings)
        while remaining:
            await readable.wait()
            readable.clear()
            while remaining and clients.poll():
                recording = recordings[clients.recv()]
                await server.close(recording)
                recording.collect_branches()
                remaining -= 1
    finally:
        loop.remove_reader(clients.fileno())


@dataclass(frozen=True)
class Direct:
    """Settings for clients that query the engine themselves. engine: url, api_key, timeout, routing and version of a
    `EngineClient`."""

    engine: tuple[Any, ...]
    session_prompts: list[Prompt]
    params: dict[str, Any]


def play_clients(pipe: Any, other_end: Any, options: argparse.Namespace) -> None:
    """Run as the clients' process. It reports each conversation that has ended by its number; if it queries the engine
    itself, only once after all of them."""
    other_end.close()  # so that it notices when the parent ends
    chats: list[ChatTemplate] = []
    tokens = lengths(options)

    async def converse(number: int, http: aiohttp.ClientSession, url: str, key: str, messages: list[Message]) -> None:
        for num_tokens in tokens[number]:
            body = {"model": "policy", "messages": messages, "max_tokens": num_tokens}
            async with http.post(
                f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            ) as response:
                completion = await response.json()
                assert response.status == 200, completion
            messages += [completion["choices"][0]["message"], FOLLOW_UP]
        pipe.send(number)

    async def run_sessions(sessions: list[tuple[str, str, list[Message]]]) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            await asyncio.gather(*(converse(number, http, *session) for number, session in enumerate(sessions)))

    async def run_direct(request: Direct) -> None:
        async with HTTPClient(*request.engine) as client:
            await run_loop(client, chats[0], request.session_prompts, request.params, options)
        pipe.send(len(request.session_prompts))

    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        if isinstance(request, Direct):
            chats = chats or [ChatTemplate.load(str(options.folder.resolve() / "model"))]
            asyncio.run(run_direct(request))
        else:
            asyncio.run(run_sessions(request))


async def compare(
    chat: ChatTemplate, config: RolloutConfig, engine: Any, options: argparse.Namespace, clients: Any, report: Report
) -> Samples:
    """Return seconds and CPU seconds of this process of every round, by method. engine: None to mock it."""
    methods = [method for method in METHODS if engine is not None or method != CLIENTS]
    samples = Samples(methods)
    async with AsyncExitStack() as stack:
        policy: Policy = MockEngine()
        engine_settings: tuple[Any, ...] = ()
        if engine is not None:
            shape = routing_shape(load_hf_config(engine.config.model.path), {})
            engine_settings = (engine.url, engine.api_key, 600.0, shape, engine.weight_version)
            policy = await stack.enter_async_context(HTTPClient(*engine_settings))
        server = SessionServer(chat, parse, config)
        await server.start()
        stack.push_async_callback(server.aclose)
        params = {**build_sampling_params(config, chat, False, 1), "ignore_eos": True}
        gc.collect()
        gc.freeze()  # as a run does before its first step
        stack.callback(gc.unfreeze)
        for number in range(options.rounds + 1):  # the first round is not counted
            for method in rotate(methods, number):
                round_prompts = prompts(chat, options, len(METHODS) * number + METHODS.index(method))
                with Stopwatch(time.process_time) as watch:
                    if method == LOOP:
                        await run_loop(policy, chat, round_prompts, params, options)
                    elif method == CLIENTS:
                        clients.send(Direct(engine_settings, round_prompts, params))
                        await asyncio.to_thread(clients.recv)
                    else:
                        await run_server(server, policy, round_prompts, params, clients)
                if number:
                    samples.add(method, watch.seconds, watch.processor_s)
                    report.progress(
                        f"round {number}, {method:14} {watch.seconds:.2f} s, of this process {watch.processor_s:.3f} s"
                    )
        figures = server.metrics
        expected = (options.rounds + 1) * options.conversations
        assert (figures.branches, figures.forks) == (expected, 0), figures
    return samples


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="of tools/make_quickstart.py")
    parser.add_argument("--played", action="store_true", help="no real engine: one that answers at once")
    for name, value in {"conversations": 64, "turns": 3, "tokens": 32, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int_in_range(), default=value, help="default %(default)s")
    parser.add_argument("--even", action="store_true", help="no turn is longer than another")


def run(options: argparse.Namespace, report: Report) -> None:
    options.folder = check_quickstart(options.folder, "model")
    report.start()
    context = multiprocessing.get_context("fork")
    clients, peer = context.Pipe()
    process = context.Process(target=play_clients, args=(peer, clients, options), daemon=True)
    process.start()
    peer.close()
    try:
        with tempfile.TemporaryDirectory() as folder:
            samples = run_methods(options, Path(folder), clients, report)
    finally:
        clients.close()
        process.join()
    requests = options.conversations * options.turns
    rows = []
    for method, seconds in samples.seconds.items():
        row = {"way": method, "seconds": statistics.median(seconds)}
        row |= compare_with_server("", samples.seconds, method, requests)
        if method != CLIENTS:  # whose CPU time is in another process
            row |= compare_with_server(" of this process", samples.processor_s, method, requests)
        rows.append(row | {"samples": {"seconds": seconds, "processor s": samples.processor_s[method]}})
    report.table(f"{requests} requests a round, medians of {options.rounds} rounds", rows)


def compare_with_server(unit: str, seconds: dict[str, list[float]], method: str, requests: int) -> dict[str, Any]:
    """Return what a request takes more through the server than by a method, and how many times that is."""
    extra = statistics.median(seconds[SERVER]) - statistics.median(seconds[method])
    ratio = compute_ratio(seconds[SERVER], seconds[method])
    return {f"server, ms more a request{unit}": 1000 * extra / requests, f"server, times{unit}": ratio}


def run_methods(options: argparse.Namespace, folder: Path, clients: Any, report: Report) -> Samples:
    model = str(options.folder / "model")
    settings = {"max_context": 2048, "max_new_tokens": 2 * options.tokens, "concurrency": options.conversations}
    config: Config = from_dict(
        {
            "run": {"dir": str(folder)},
            "model": {"path": model, "dtype": "float32"},
            "rollout": settings,
            "train": {"routing_replay": True},
        }
    )
    chat = ChatTemplate.load(model)
    if options.played:
        return asyncio.run(compare(chat, config.rollout, None, options, clients, report))
    with start_engine(config) as engine:
        return asyncio.run(compare(chat, config.rollout, engine, options, clients, report))
