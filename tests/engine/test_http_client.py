"""The engine's client with a fake server that returns chosen answers. `test_engine.py` has real engines."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from megarl.engine import http_client as module
from megarl.engine.engine_protocol import EngineLoad, EngineLost, Generation, RequestFailed
from megarl.engine.http_client import HTTPClient, decode_indices, decode_routing, is_truncated_sampling
from megarl.models.routing import RoutingShape
from megarl.models.sparse_indices import IndexShape

pytestmark = pytest.mark.alone

SHAPE = RoutingShape(num_layers=3, moe_layers=(1, 2), topk=2, num_experts=400)


def encode_record(*shape: int) -> str:
    return base64.b64encode(np.arange(np.prod(shape), dtype=np.int32).reshape(shape).tobytes()).decode()


@pytest.mark.parametrize(("experts", "dtype"), [(12, torch.uint8), (256, torch.uint8), (257, torch.int16)])
def test_decodes_routing_of_moe_layers_in_the_smallest_dtype(experts: int, dtype: torch.dtype) -> None:
    shape = replace(SHAPE, num_experts=experts)
    result = decode_routing(encode_record(2, 3, 2), 2, shape)
    assert result.dtype == dtype and result.tolist() == [[[2, 3], [4, 5]], [[8, 9], [10, 11]]]
    subset = decode_routing(encode_record(2, 3, 2), 2, replace(shape, moe_layers=(0, 2)))
    assert subset.tolist() == [[[0, 1], [4, 5]], [[6, 7], [10, 11]]]
    assert decode_routing(encode_record(0, 3, 2), 0, shape).shape == (0, 2, 2)


@pytest.mark.parametrize("expert", [-1, 12, 256])
def test_unknown_expert_in_the_routing_record_is_an_error(expert: int) -> None:
    record = np.arange(12, dtype=np.int32)
    record[-1] = expert
    text = base64.b64encode(record.tobytes()).decode()
    with pytest.raises(
        RequestFailed, match=rf"experts from {min(expert, 2)} to {max(expert, 10)}, but config.json has 12"
    ):
        decode_routing(text, 2, replace(SHAPE, num_experts=12))
    record[-1], record[0] = 11, expert  # the record of a dense layer is not read
    decode_routing(base64.b64encode(record.tobytes()).decode(), 2, replace(SHAPE, num_experts=12))


def test_routing_record_of_another_size_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="has 16 numbers, not those of 2 tokens in 3 layers with 2 experts each"):
        decode_routing(encode_record(2, 4, 2), 2, SHAPE)
    with pytest.raises(RuntimeError, match="did not record routing"):
        decode_routing(None, 2, SHAPE)


def test_decodes_sparse_attention_indices() -> None:
    shape = IndexShape(layers=(0, 3), topk=2, is_short=True)
    record = np.array([[[0, 2], [1, 2]], [[3, 0], [1, 3]]], dtype=np.int16)  # of the tokens 2 and 3
    for dtype in (np.int16, np.int32):
        text = base64.b64encode(record.astype(dtype).tobytes()).decode()
        result = decode_indices(text, 2, 2, shape)
        assert result.dtype == torch.int16 and result.tolist() == record.tolist()
    assert decode_indices("", 0, 2, shape).shape == (0, 2, 2)
    with pytest.raises(RequestFailed, match="names keys after their query"):
        decode_indices(base64.b64encode(record.tobytes()).decode(), 2, 1, shape)
    with pytest.raises(RequestFailed, match="has 16 bytes, not 2 or 4 for each of 3 tokens in 2 layers with 2 keys"):
        decode_indices(base64.b64encode(record.tobytes()).decode(), 3, 2, shape)
    with pytest.raises(RequestFailed, match="did not record its sparse attention"):
        decode_indices(None, 2, 2, shape)


def make_answer(**changes: Any) -> dict[str, Any]:
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "3", "output_token_logprobs": [[-0.5, 8, None]]}
    ids = changes.pop("output_ids", [8])
    meta |= changes
    return {"output_ids": ids, "meta_info": {name: value for name, value in meta.items() if value is not ...}}


def generate(
    answer: Any,
    status: int = 200,
    timeout: float = 30.0,
    version: int | None = 3,
    params: dict[str, Any] | None = None,
    bodies: list[dict[str, Any]] | None = None,
    has_masks: bool = True,
) -> Generation:
    """Generate with a server that returns `answer`, or never answers if None. version: the weight version that the
    client expects. bodies: collects the bodies of requests."""

    kind = "application/json" if status == 200 else "text/plain"

    async def run() -> Generation:
        async def respond(request: web.Request) -> web.StreamResponse:
            if bodies is not None:
                bodies.append(await request.json())
            if answer is None:
                await asyncio.sleep(3600)
            if isinstance(answer, str):
                return web.Response(text=answer, status=status, content_type=kind)
            return web.json_response(answer, status=status)

        async def disconnect(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Length": "100", "Content-Type": kind})
            await response.prepare(request)
            await response.write(b"{")
            assert request.transport is not None
            request.transport.close()
            return response

        app = web.Application()
        app.router.add_post("/generate", disconnect if answer == "broken off" else respond)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        try:
            async with HTTPClient(f"http://127.0.0.1:{port}", "key", timeout, weight_version=version) as client:
                client.should_request_masks = has_masks
                return await client.generate([5, 6], params or {})
        finally:
            await runner.cleanup()

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the delays between retries."""
    monkeypatch.setattr(module, "_RETRY_DELAY_S", 0.01)
    monkeypatch.setattr(module, "_DEATH_CHECK_S", 0.1)


def test_parses_an_answer() -> None:
    out = generate(make_answer())
    assert (out.token_ids.tolist(), out.logprobs.tolist(), out.finish_reason) == ([8], [-0.5], "stop")
    assert (out.token_ids.dtype, out.logprobs.dtype) == (np.int32, np.float32)
    assert (out.weight_version, out.versions) == (3, ())


@pytest.mark.parametrize(
    ("cached", "expected"), [(0, 0), (2, 2), (..., -1), (None, -1), (3, -1), (-3, -1), ("1", -1), (True, -1)]
)
def test_cached_tokens_are_within_the_prompt_or_unknown(cached: object, expected: int) -> None:
    assert generate(make_answer(cached_tokens=cached)).cached == expected


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        ({"detail": "Request running timeout reached."}, 503, "did not finish within rollout.request_timeout"),
        ({"error": {"message": "too long"}}, 400, "refused to generate: .*too long"),
        ("Internal Server Error", 500, "refused to generate: Internal Server Error"),
        ("{not json", 200, "cannot be read"),
        ("broken off", 200, "cannot be reached"),
        ([1], 200, "is invalid: TypeError"),
        ({}, 200, "is invalid: KeyError.'meta_info'"),
        ({"output_ids": [8], "meta_info": None}, 200, "is invalid"),
        (make_answer(output_token_logprobs=...), 200, "is invalid: KeyError.'output_token_logprobs'"),
        (make_answer(weight_version=...), 200, "is invalid: KeyError.'weight_version'"),
        (make_answer(output_token_logprobs=[]), 200, "wrote 1 tokens and returned 0 log-probs"),
        (
            make_answer(output_token_logprobs=[[-0.5, 9, None]]),
            200,
            "wrote 1 tokens and returned 1 log-probs of others",
        ),
        (make_answer(output_token_logprobs=[[None, 8, None]]), 200, "a log-prob that is not finite"),
        (make_answer(output_token_logprobs=[[float("-inf"), 8, None]]), 200, "cannot be read"),  # not JSON
        (make_answer(output_token_logprobs=[["x", 8, None]]), 200, "is invalid: ValueError"),
        (make_answer(output_token_logprobs=[[-0.5]]), 200, "is invalid: IndexError"),
        (make_answer(output_token_logprobs=[8]), 200, "is invalid: TypeError"),
        (make_answer(output_ids=["x"]), 200, "is invalid: ValueError"),
        (make_answer(output_ids=[8.5]), 200, "is invalid: ValueError"),
        (make_answer(output_ids=[-8]), 200, "is invalid: ValueError.'a token id is negative"),
        (make_answer(output_ids=[2**31]), 200, "is invalid: ValueError.'no token has the id"),
        (make_answer(output_ids=[], output_token_logprobs=[]), 200, "answered without a token"),
    ],
)
def test_invalid_answer_fails_only_its_request(answer: Any, status: int, message: str) -> None:
    with pytest.raises(RequestFailed, match=message):
        generate(answer, status)


def test_missing_answer_times_out() -> None:
    with pytest.raises(RequestFailed, match="did not answer /generate within 0.2 s"):
        generate(None, timeout=0.2)


def test_aborted_answer_keeps_only_complete_records() -> None:
    aborted = {"type": "abort", "message": "Aborted"}
    out = generate(make_answer(finish_reason=aborted))
    assert (out.token_ids.tolist(), out.finish_reason, out.abort_reason) == (
        [8],
        "abort",
        "the engine aborted the answer: Aborted",
    )
    for invalid in ({"output_token_logprobs": ...}, {"output_token_logprobs": [[None, 8, None]]}):
        out = generate(make_answer(finish_reason=aborted, **invalid))
        assert (len(out.token_ids), len(out.logprobs), out.finish_reason) == (0, 0, "abort")
    assert generate(make_answer(finish_reason=None)).abort_reason.endswith("it gives no reason")


TRUNCATED = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}


def make_masked_answer(**changes: Any) -> dict[str, Any]:
    """Return an answer of two tokens with sampling masks instead of log-probs over the whole vocabulary."""
    fields: dict[str, Any] = {"output_ids": [8, 9], "output_token_logprobs": ...}
    fields |= {"output_token_sampling_mask": [[3, 8], [9]], "output_token_sampling_logprobs": [-0.25, 0.0]}
    return make_answer(**fields | changes)


def test_requests_sampling_masks_for_truncated_sampling() -> None:
    bodies: list[dict[str, Any]] = []
    out = generate(make_masked_answer(), params=TRUNCATED, bodies=bodies)
    assert (out.token_ids.tolist(), out.logprobs.tolist()) == ([8, 9], [-0.25, 0.0])
    assert out.sampling_mask is not None
    assert (out.sampling_mask.counts.tolist(), out.sampling_mask.ids.tolist()) == ([2, 1], [3, 8, 9])
    assert bodies[0]["return_sampling_mask"] is True and bodies[0]["return_logprob"] is False
    assert generate(make_answer(), params={"temperature": 0.7}, bodies=bodies).sampling_mask is None
    assert "return_sampling_mask" not in bodies[1] and bodies[1]["return_logprob"] is True
    evaluated = generate(make_answer(), params=TRUNCATED, bodies=bodies, has_masks=False)
    assert evaluated.sampling_mask is None
    assert "return_sampling_mask" not in bodies[2] and bodies[2]["return_logprob"] is True


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}, False),
        ({"top_p": 0.99}, True),
        ({"top_k": 50}, True),
        ({"min_p": 0.01}, True),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 50, "min_p": 0.1}, False),  # greedy in any case
    ],
)
def test_is_truncated_sampling(params: dict[str, Any], expected: bool) -> None:
    assert is_truncated_sampling(params) is expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_token_sampling_mask": ...}, "returned no sampling masks"),
        ({"output_token_sampling_mask": None}, "returned no sampling masks"),
        (
            {"output_token_sampling_mask": [[3, 8]]},
            "wrote 2 tokens, but returned sampling masks of 1 with 2 lo",
        ),
        ({"output_token_sampling_logprobs": [-0.5]}, "returned sampling masks of 2 with 1 log-probs"),
        ({"output_token_sampling_mask": [[3, 8], [7]]}, "sampled token 9, which is not in its"),
        ({"output_token_sampling_mask": [[], [9]]}, "sampled token 8, which is not in its"),
        ({"output_token_sampling_mask": [["x"], [9]]}, "is invalid: ValueError"),
        ({"output_token_sampling_mask": [8, 9]}, "is invalid: TypeError"),
        ({"output_token_sampling_logprobs": [None, 0.0]}, "a log-prob that is not finite"),
    ],
    ids=str,
)
def test_invalid_sampling_masks_fail_the_request(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestFailed, match=message):
        generate(make_masked_answer(**changes), params=TRUNCATED)
    if "is invalid" not in message:
        out = generate(make_masked_answer(**changes, finish_reason={"type": "abort"}), params=TRUNCATED)
        assert len(out.token_ids) == 0 and out.sampling_mask is None


@pytest.mark.parametrize("changes", [{"weight_version": "2"}, {"weight_version": "default"}], ids=str)
def test_unexpected_weight_version_is_not_a_request_failure(changes: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="version (2|default), but .* was version 3") as failure:
        generate(make_answer(**changes))
    assert not isinstance(failure.value, RequestFailed)


def test_detects_a_weight_version_change_within_an_answer() -> None:
    spans = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}]
    with pytest.raises(RuntimeError, match="version 2, but"):
        generate(make_answer(weight_versions=spans))
    assert generate(make_answer(weight_versions=spans[1:])).weight_version == 3


def version_spans(*ends: int) -> list[dict[str, Any]]:
    """Return spans of version 1 up to the first end, version 2 up to the next, and so on."""
    return [{"version": str(i), "start": a, "end": b} for i, (a, b) in enumerate(pairwise((0, *ends)), 1)]


def test_answer_across_versions_has_the_oldest_version() -> None:
    three_tokens: dict[str, Any] = {
        "output_ids": [8, 9, 8],
        "output_token_logprobs": [[-0.5, i, None] for i in (8, 9, 8)],
    }
    out = generate(make_answer(**three_tokens, weight_version="2", weight_versions=version_spans(1, 3)), version=None)
    assert (out.weight_version, out.versions) == (1, ())  # later tokens depend on keys and values of older weights
    assert generate(make_answer(**three_tokens, weight_versions=version_spans(3)), version=None).versions == ()
    aborted = make_answer(finish_reason=None, output_ids=[], output_token_logprobs=[], weight_versions=version_spans(0))
    assert generate(aborted, version=None).versions == ()
    for versions in ((1, 2), (1, 4), (2, 1, 3)):
        with pytest.raises(RequestFailed, match="wrote 3 tokens with weight versions of another|is invalid"):
            generate(make_answer(**three_tokens, weight_versions=version_spans(*versions)), version=None)


def test_weight_versions_have_separate_caches() -> None:
    salts: list[str] = []

    async def run() -> list[int]:
        async def respond(request: web.Request) -> web.StreamResponse:
            salts.append((await request.json())["extra_key"])
            client.weight_version = 4  # a weight sync during the request
            mixed_spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
            new_spans = [{"version": "4", "start": 0, "end": 2}]
            response: dict[str, Any] = {
                "output_ids": [8, 9],
                "output_token_logprobs": [[-0.5, i, None] for i in (8, 9)],
            }
            spans = new_spans if len(salts) > 1 else mixed_spans
            return web.json_response(make_answer(**response, weight_version="4", weight_versions=spans))

        app = web.Application()
        app.router.add_post("/generate", respond)
        server = TestServer(app)
        await server.start_server()
        async with HTTPClient(f"http://127.0.0.1:{server.port}", "key", 30.0, weight_version=3) as client:
            result = [(await client.generate([1], {})).weight_version for _ in range(2)]
        await server.close()
        return result

    assert asyncio.run(run()) == [3, 4] and salts == ["3", "4"]


@pytest.mark.parametrize("is_dead", [False, True])
def test_lost_connection_fails_the_request_unless_the_engine_died(is_dead: bool) -> None:
    checks: list[int] = []

    def check_runs() -> None:
        checks.append(1)
        if is_dead and len(checks) > 1:  # dying takes a moment
            raise EngineLost("died", "engine 0 is not running")

    async def run() -> None:
        async with HTTPClient("http://127.0.0.1:9", "key", 30.0, check_running=check_runs) as client:
            try:
                await client.generate([5], {})
            finally:
                assert client.num_pending == 0

    with pytest.raises(
        EngineLost if is_dead else RequestFailed, match="is not running" if is_dead else "cannot be reached"
    ):
        asyncio.run(run())


def test_stop_tolerates_a_closed_client_and_a_dead_engine() -> None:
    """`stop` retries an unreachable engine, and the client may close between two tries."""

    async def run() -> None:
        async with HTTPClient("http://127.0.0.1:9", "key", 30.0) as client:
            stopping = asyncio.create_task(client.stop())
            await asyncio.sleep(0.005)
        await stopping
        await client.stop()

    asyncio.run(run())


@pytest.mark.parametrize(("faults", "fails"), [(2, False), (3, True)])
def test_retries_failed_requests_a_few_times(faults: int, fails: bool) -> None:
    request_ids: list[int] = []

    async def run() -> int:
        async def respond(request: web.Request) -> web.StreamResponse:
            request_ids.append(1)
            if len(request_ids) <= faults:
                if len(request_ids) == 2 and request.transport is not None:
                    request.transport.close()  # the client loses the connection
                return web.Response(status=500, text="CUDA error")
            return web.json_response(make_answer())

        app = web.Application()
        app.router.add_post("/generate", respond)
        server = TestServer(app)
        await server.start_server()
        try:
            async with HTTPClient(f"http://127.0.0.1:{server.port}", "key", 30.0, weight_version=3) as client:
                return len((await client.generate([1], {})).token_ids)
        finally:
            await server.close()

    if fails:
        with pytest.raises(RequestFailed, match="refused to generate: CUDA error"):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == 1
    assert len(request_ids) == 3


def read_load(answer: Any, status: int = 200) -> EngineLoad | None:
    """Read the load of a server that answers with `answer`, or closes its port if that is None."""

    async def run() -> EngineLoad | None:
        async def respond(request: web.Request) -> web.Response:
            assert request.query["include"] == "core"
            return web.json_response(answer, status=status)

        app = web.Application()
        app.router.add_get("/v1/loads", respond)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        if answer is None:
            await runner.cleanup()
        try:
            async with HTTPClient(f"http://127.0.0.1:{port}", "key", 30.0) as client:
                return await client.read_load()
        finally:
            await runner.cleanup()

    return asyncio.run(run())


RANK_LOAD = {
    **{"num_running_reqs": 3, "num_waiting_reqs": 1, "num_used_tokens": 300, "max_total_num_tokens": 1000},
    **{"total_prefill_uncached_tokens": 500, "total_prefill_busy_us": 2_000_000},
}


def test_reads_the_load_of_all_data_parallel_ranks() -> None:
    assert read_load({"loads": [RANK_LOAD]}) == EngineLoad(3, 1, 0.3, 1000, 500, 2.0)
    assert read_load({"loads": [RANK_LOAD, RANK_LOAD]}) == EngineLoad(6, 2, 0.3, 2000, 1000, 4.0)


@pytest.mark.parametrize(("answer", "status"), [({"loads": []}, 200), ({}, 200), ([], 200), ({}, 404), (None, 200)])
def test_load_is_unknown_without_a_valid_answer(answer: Any, status: int) -> None:
    assert read_load(answer, status) is None


def test_counts_retractions() -> None:
    assert generate(make_answer(num_retractions=2)).retractions == 2
    assert generate(make_answer()).retractions == 0
