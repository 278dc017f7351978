"""Real vLLM engines on a CPU: tokens, records, pauses and weights, compared with transformers."""

from __future__ import annotations

import asyncio
import glob
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from compare import PROMPTS, assert_matches_transformers, engine_routing_shape
from engines import RunningEngine, start_engine
from orders import check_orders, overwrite_weights
from transformers import PreTrainedModel

from megarl.engine.engine_host import LEFTOVERS, HostProcess
from megarl.engine.engine_protocol import EngineLost, Generation, RecordedPrefix, RequestFailed
from megarl.engine.http_client import HTTPClient
from megarl.reshard.plan.layout import EngineLayout

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
LONG: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 480, "ignore_eos": True}
ENDLESS: dict[str, Any] = LONG | {"max_new_tokens": 65000}  # a busy machine pauses it before its end


def qwen3_moe(seed: int = 0) -> PreTrainedModel:
    """With heads of 32, the smallest of vLLM's attention on a CPU; two ranks share a key-value head, and the vocabulary
    is no multiple of 64."""
    return tiny_models.qwen3_moe(
        seed, head_dim=32, num_key_value_heads=1, vocab_size=500, max_position_embeddings=65536
    )


@pytest.fixture(scope="module")
def running(vllm_host: HostProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine with two tensor parallel ranks, each with half of the experts."""
    folder = tmp_path_factory.mktemp("vllm")
    with start_engine(vllm_host.path, qwen3_moe(), folder, engine="vllm", tp=2, ep=2, max_context=65536) as engine:
        yield engine


def connect(running: RunningEngine, timeout: float = 300.0) -> HTTPClient:
    client = running.engine.connect(timeout, engine_routing_shape(running.engine))
    assert isinstance(client, HTTPClient)
    return client


async def stop(client: HTTPClient, tasks: Sequence[asyncio.Task[Generation]]) -> None:
    """Abort all requests, again until they have ended, as the callers of `HTTPClient.stop` do."""
    while not all(task.done() for task in tasks):
        await client.stop()
        await asyncio.wait(tasks, timeout=0.5)


def shared_files(host: HostProcess) -> set[Path]:
    """Return the files in shared memory that the host's engines have listed as leftovers."""
    lists = Path(host.path).parent.glob(f"*/{LEFTOVERS}")
    return {Path(path) for file in lists for line in file.read_text().splitlines() for path in glob.glob(line)}


def bits(generations: list[Generation]) -> list[tuple[list[int], bytes]]:
    return [(out.token_ids.tolist(), out.logprobs.tobytes()) for out in generations]


def generate_in_turn(running: RunningEngine) -> list[Generation]:
    """Generate one response after another, because the bits of a log-prob depend on the batch."""

    async def run() -> list[Generation]:
        async with connect(running) as client:
            return [await client.generate(prompt, GREEDY) for prompt in PROMPTS]

    return asyncio.run(run())


def test_matches_transformers_before_and_after_a_weight_sync(
    running: RunningEngine, vllm_host: HostProcess, tmp_path: Path
) -> None:
    """The synced engine then equals, bit by bit, one that has loaded the new weights itself."""
    assert_matches_transformers(running.engine, running.model, 0)
    check_orders(running, EngineLayout(2, ep=2), qwen3_moe(seed=6), tmp_path)
    synced = generate_in_turn(running)
    with start_engine(vllm_host.path, qwen3_moe(seed=6), tmp_path, engine="vllm", tp=2, ep=2, max_context=512) as fresh:
        assert bits(synced) == bits(generate_in_turn(fresh))
    overwrite_weights(running.engine, EngineLayout(2, ep=2), running.folder, 8)


def test_reports_its_load(running: RunningEngine) -> None:
    """Prompt tokens in the prefix cache are not computed again, and those of a long prompt count in each step."""

    async def run() -> None:
        async with connect(running) as client:
            long = [7 + i % 400 for i in range(6000)]
            await client.generate(long[:1000], GREEDY)
            before = await client.read_load()
            out = await client.generate(long, GREEDY)
            after = await client.read_load()
            assert before is not None and after is not None and after.capacity >= len(long)
            assert after.prefilled - before.prefilled == len(long) - out.cached < 6000
            assert after.prefill_s > before.prefill_s
            task = asyncio.create_task(client.generate(long, ENDLESS))
            while not ((load := await client.read_load()) and load.num_running):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (load.num_running, load.num_waiting) == (1, 0) and load.cache_usage >= 6000 / load.capacity
            await stop(client, [task])

    asyncio.run(run())


def assert_mask(probs: torch.Tensor, out: Generation, top_p: float, top_k: int = 500, min_p: float = 0.0) -> None:
    """Check masks and log-probs against `probs` [tokens, vocabulary], fp64, before truncation.

    vLLM applies min_p, then top_k, then top_p to what is left, renormalised. SGLang applies top_p to all. Masks are not
    compared where a token is within 1e-6 of a boundary.
    """
    assert out.sampling_mask is not None and len(out.sampling_mask) == len(out.token_ids) == len(probs)
    sets, num_compared = out.sampling_mask.ids.split(out.sampling_mask.counts.tolist()), 0
    for row, mask, token, logprob in zip(probs, sets, out.token_ids.tolist(), out.logprobs.tolist(), strict=True):
        ordered, ids = row.sort(descending=True)
        is_left = (ordered >= min_p * ordered[0]) & (torch.arange(len(row)) < top_k)
        left = ordered[is_left] / ordered[is_left].sum()
        before = left.cumsum(0) - left
        if float(torch.cat([before - top_p, ordered - min_p * ordered[0] if min_p else before - 2]).abs().min()) > 1e-6:
            assert set(mask.tolist()) == set(ids[is_left][before < top_p].tolist())
            num_compared += 1
        assert abs(float((row[token] / row[mask.long()].sum()).log()) - logprob) < 1e-4
    assert num_compared > len(probs) // 2


@pytest.mark.parametrize(
    "params", [{"top_p": 0.6, "top_k": 20, "min_p": 0.05}, {"top_p": 0.7}], ids=["all", "top_p alone"]
)
def test_reports_sampling_masks(running: RunningEngine, params: dict[str, Any]) -> None:
    """Also beside requests that want none, and in a stream."""

    async def run() -> list[Generation]:
        async with connect(running) as client:
            wanted = {"temperature": 0.7, "max_new_tokens": 12, "ignore_eos": True, **params}
            tokens: list[int] = []
            tasks = [client.generate(prompt, wanted, on_tokens=tokens.extend) for prompt in PROMPTS]
            *outs, plain = await asyncio.gather(*tasks, client.generate(PROMPTS[0], LONG))
            assert plain.sampling_mask is None and len(tokens) == 12 * len(PROMPTS)
            return outs

    for prompt, out in zip(PROMPTS, asyncio.run(run()), strict=True):
        with torch.no_grad():
            logits = running.model(torch.tensor([[*prompt, *out.token_ids.tolist()]])).logits[0].double()
        assert_mask((logits[len(prompt) - 1 : -1] / 0.7).softmax(-1), out, **params)


def test_records_routing_only_of_what_the_caller_lacks(running: RunningEngine) -> None:
    async def run() -> None:
        async with connect(running) as client:
            first = await client.generate(list(range(20, 90)), GREEDY)
            context = [*range(20, 90), *first.token_ids.tolist()]
            known = RecordedPrefix(len(context) - 1, first.weight_version)
            second = await client.generate(context, GREEDY, recorded=known)
            assert second.cached >= 64 and second.record_start == len(context) - 1
            whole = await client.generate([*context, *second.token_ids.tolist()], {**GREEDY, "max_new_tokens": 1})
            parts = [first.routing, second.routing]
            assert whole.routing is not None and all(part is not None for part in parts)
            joined = torch.cat([part for part in parts if part is not None])
            assert whole.cached >= 64 and len(joined) == len(whole.routing) - 1
            # The rest is computed again, in another batch, where a tie of experts may end otherwise.
            cached, again = joined[: whole.cached], whole.routing[: whole.cached]
            assert torch.equal(cached.sort(-1).values, again.sort(-1).values)

    asyncio.run(run())


def qwen2_tied(seed: int) -> PreTrainedModel:
    """With a vocabulary that is no multiple of 64."""
    return tiny_models.qwen2(seed, hidden_size=128, tie_word_embeddings=True, vocab_size=500)


def llama(seed: int) -> PreTrainedModel:
    return tiny_models.llama(seed, hidden_size=128)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "tp"),
    [
        pytest.param(qwen2_tied, 2, id="qwen2"),
        pytest.param(tiny_models.qwen3, 1, id="qwen3"),
        pytest.param(llama, 1, id="llama"),
        pytest.param(tiny_models.deepseek_v3, 2, id="deepseek_v3"),
    ],
)
def test_other_families(
    vllm_host: HostProcess, tmp_path: Path, model: Callable[[int], PreTrainedModel], tp: int
) -> None:
    with start_engine(vllm_host.path, model(0), tmp_path, engine="vllm", tp=tp) as running:
        assert_matches_transformers(running.engine, running.model, 0)
        check_orders(running, EngineLayout(tp), model(6), tmp_path)


@pytest.mark.nightly
def test_drafts_of_deepseek_v3(vllm_host: HostProcess, tmp_path: Path) -> None:
    """Greedy and sampled tokens with drafts have the policy's log-probs and masks, also after a weight sync of both."""

    def model(seed: int) -> PreTrainedModel:
        return tiny_models.deepseek_v3(seed, num_nextn_predict_layers=1)

    options: dict[str, Any] = {"engine": "vllm", "num_speculative_tokens": 2}
    with start_engine(vllm_host.path, model(0), tmp_path, **options) as running:
        assert_matches_transformers(running.engine, running.model, 0)
        check_orders(running, EngineLayout(1, draft=True), new := model(6), tmp_path)
        params = {"top_p": 0.8, "top_k": 20}

        async def run() -> list[Generation]:
            async with connect(running) as client:
                wanted = {"temperature": 0.7, "max_new_tokens": 30, "ignore_eos": True, **params}
                plain = {**wanted, "top_p": 1.0, "top_k": 4}  # alone in a step, once without drafts
                return [await client.generate(PROMPTS[0], plain)] + await asyncio.gather(
                    *(client.generate(prompt, wanted) for prompt in PROMPTS)
                )

        for prompt, out in zip(PROMPTS, asyncio.run(run())[1:], strict=True):
            assert out.drafted > 0 and len(out.token_ids) == 30
            with torch.no_grad():
                logits = new(torch.tensor([[*prompt, *out.token_ids.tolist()]])).logits[0].double()
            assert_mask((logits[len(prompt) - 1 : -1] / 0.7).softmax(-1), out, **params)


def test_seeds_end_tokens_and_refusals(running: RunningEngine) -> None:
    async def run() -> None:
        async with connect(running) as client:
            seeded = {"temperature": 1.0, "max_new_tokens": 20, "ignore_eos": True, "top_k": -1, "sampling_seed": 7}
            one, same = await client.generate([5, 6], seeded), await client.generate([5, 6], seeded)
            other = await client.generate([5, 6], {**seeded, "sampling_seed": 8})
            assert one.token_ids.tolist() == same.token_ids.tolist() != other.token_ids.tolist()
            full = (await client.generate([5, 6, 7], GREEDY)).token_ids.tolist()
            stopped = await client.generate([5, 6, 7], {**GREEDY, "ignore_eos": False, "stop_token_ids": [full[4]]})
            assert stopped.finish_reason == "stop" and stopped.token_ids.tolist() == full[: full.index(full[4]) + 1]
            word = tiny_models.tokenizer().decode(full[6:8])
            cut = await client.generate([5, 6, 7], {**GREEDY, "stop": [word]})
            assert cut.finish_reason == "stop" and cut.token_ids.tolist() == full[: len(cut.token_ids)] and word
            assert tiny_models.tokenizer().decode(cut.token_ids.tolist()).endswith(word)
            for prompt, params, text in (
                ([20] * 70000, GREEDY, "maximum|longer|length"),
                ([5], {**GREEDY, "typo": 1}, "typo is not supported"),
            ):
                with pytest.raises(RequestFailed, match=text):
                    await client.generate(prompt, params)
        wrong = HTTPClient(running.engine.url, "wrong key", 60.0)
        async with wrong:
            with pytest.raises(RequestFailed, match="unauthorized"):
                await wrong.generate([5], GREEDY)

    asyncio.run(run())


def test_aborted_requests_keep_what_they_have(running: RunningEngine) -> None:
    """Aborts, and clients that go away; the engine is then idle."""

    async def begin_and_abort(client: HTTPClient) -> list[Generation]:
        params = LONG | {"max_new_tokens": 8000}
        begun = [asyncio.Event() for _ in range(5)]
        tasks = []
        for n, event in enumerate(begun):
            generation = client.generate([9 + n, 6], params, on_tokens=lambda ids, event=event: event.set())  # type: ignore[misc]
            tasks.append(asyncio.create_task(generation))
        await asyncio.gather(*(event.wait() for event in begun))
        tasks.pop().cancel()
        await stop(client, tasks)
        return await asyncio.gather(*tasks)

    async def run() -> None:
        async with connect(running) as client:
            outs = await begin_and_abort(client)
            while "length" in {out.finish_reason for out in outs}:  # the order came after a last token
                outs = await begin_and_abort(client)
            assert {out.finish_reason for out in outs} == {"abort"}
            for out in outs:
                assert 0 < len(out.token_ids) < 8000 and out.routing is not None
                assert len(out.routing) == 2 + len(out.token_ids) - 1

    asyncio.run(run())
    running.engine.abort_requests()


def test_a_response_goes_on_after_a_pause_with_new_weights(running: RunningEngine, tmp_path: Path) -> None:
    """Paused, no token comes; afterwards the new weights continue with the keys and values of the old ones."""
    engine, old, new = running.engine, running.engine.weight_version, qwen3_moe(seed=3)

    async def run() -> tuple[Generation, int]:
        async with connect(running) as client:
            begun, tokens = asyncio.Event(), []

            def add(ids: Any) -> None:
                tokens.extend(ids)
                begun.set()

            task = asyncio.create_task(client.generate([5, 6, 7], ENDLESS, on_tokens=add))
            await begun.wait()
            await asyncio.to_thread(engine.pause_generation)
            count = -1
            while count != len(tokens):  # events on their way
                count = len(tokens)
                await asyncio.sleep(1.0)
            path = tiny_models.save(new, tmp_path / "new")
            await asyncio.to_thread(overwrite_weights, engine, EngineLayout(2, ep=2), path, old + 1)
            client.weight_version = old + 1
            assert len(tokens) == count < 64000
            await asyncio.to_thread(engine.resume_generation)
            while len(tokens) < count + 100:
                await asyncio.sleep(0.1)
            await stop(client, [task])
            return await task, count

    out, count = asyncio.run(run())
    assert out.finish_reason in ("abort", "length")  # a busy machine stops it too late
    assert out.weight_version == old
    tokens, begin = torch.tensor([[5, 6, 7, *out.token_ids.tolist()]]), 3 + count - 1
    with torch.no_grad():
        cache = running.model(tokens[:, :begin], use_cache=True).past_key_values
        continued = new(tokens[:, begin:-1], past_key_values=cache).logits[0].log_softmax(-1)
        unchanged = running.model(tokens[:, :-1]).logits[0, begin:].log_softmax(-1)
    sampled = torch.tensor(out.logprobs[count:])
    gaps = [(logits.gather(1, tokens[0, begin + 1 :, None])[:, 0] - sampled).abs() for logits in (continued, unchanged)]
    # The median, because a tie of experts may end otherwise.
    assert float(gaps[0].median()) < 1e-4 and float(gaps[1].median()) > 1e-2, [float(gap.median()) for gap in gaps]
    overwrite_weights(engine, EngineLayout(2, ep=2), running.folder, old + 2)
    assert_matches_transformers(engine, running.model, old + 2)


@pytest.mark.nightly
def test_request_timeout_excludes_the_queue_and_pauses(vllm_host: HostProcess, tmp_path: Path) -> None:
    """With one slot the two long requests time out, but neither the short one that waits for both, nor one that is
    paused for longer than the limit."""
    settings: dict[str, Any] = {"request_timeout": 1.5, "vllm": {"max_num_seqs": 1}, "max_context": 4096}
    model = tiny_models.qwen3(0, max_position_embeddings=4096)
    with start_engine(vllm_host.path, model, tmp_path, engine="vllm", **settings) as running:
        engine = running.engine

        async def run() -> None:
            async with connect(running) as client:

                def generate(tokens: int, **options: Any) -> Any:
                    return client.generate([5, 6, 7], {**GREEDY, "max_new_tokens": tokens}, **options)

                *long, short = await asyncio.gather(
                    *(generate(4000) for _ in range(2)), generate(1), return_exceptions=True
                )
                assert [str(out) for out in long] == ["the engine did not finish within rollout.request_timeout"] * 2
                assert isinstance(short, Generation) and short.finish_reason == "length"
                begun = asyncio.Event()
                task = asyncio.create_task(generate(60, on_tokens=lambda ids: begun.set()))
                await begun.wait()
                await asyncio.to_thread(engine.pause_generation)
                await asyncio.sleep(2.0)
                await asyncio.to_thread(engine.resume_generation)
                assert (await task).finish_reason == "length"

        asyncio.run(run())
        engine.abort_requests()


def test_sleeps_and_parses_tool_calls(running: RunningEngine) -> None:
    engine = running.engine
    engine.sleep()
    assert engine.is_asleep
    engine.wake_weights()
    engine.wake()
    assert not engine.is_asleep and engine.is_usable and engine.tool_call_marker == "<tool_call>"
    schemas = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

    async def run() -> tuple[str, list[Any]] | None:
        async with connect(running) as client:
            assert await client.is_alive(60.0)
            text = 'so <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
            return await client.parse_tool_calls(text, schemas, engine.tool_call_parser)

    parsed = asyncio.run(run())
    assert parsed is not None and parsed[0] == "so" and parsed[1][0]["name"] == "add"


def list_children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


@pytest.mark.nightly
def test_a_killed_engine_is_lost_and_starts_again(running: RunningEngine, vllm_host: HostProcess) -> None:
    """If a worker is killed, all processes end, and their shared memory is removed."""
    engine, before = running.engine, shared_files(vllm_host)
    assert before
    generation = [vllm_host.process.pid]
    for _ in ("supervisor", "server", "engine core and parsers", "workers and others"):
        generation = [child for pid in generation for child in list_children(pid)]
    workers = [pid for pid in generation if "Worker" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2
    os.kill(workers[-1], signal.SIGKILL)
    deadline = time.monotonic() + 60
    with pytest.raises(EngineLost):
        while time.monotonic() < deadline:
            engine.check_running()
            time.sleep(0.1)
    engine.restart()
    engine.wait_ready()
    assert_matches_transformers(engine, running.model, 0)
    engine.shutdown()
    assert not [path for path in before if path.exists()]
