"""What an engine may answer, by a server that answers that; engines are in `test_engine.py`."""

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

from megarl.engine import client as module
from megarl.engine.client import Client, decode_routing, is_truncated_sampling
from megarl.engine.engine_protocol import EngineLost, Generation, RequestFailed
from megarl.models.routing import RoutingShape

pytestmark = pytest.mark.alone

SHAPE = RoutingShape(num_layers=3, moe_layers=(1, 2), topk=2, num_experts=400)


def sent(*shape: int) -> str:
    return base64.b64encode(np.arange(np.prod(shape), dtype=np.int32).reshape(shape).tobytes()).decode()


@pytest.mark.parametrize(("experts", "dtype"), [(12, torch.uint8), (256, torch.uint8), (257, torch.int16)])
def test_only_layers_with_experts_are_kept_in_the_smallest_type(experts: int, dtype: torch.dtype) -> None:
    shape = replace(SHAPE, num_experts=experts)
    result = decode_routing(sent(2, 3, 2), 2, shape)
    assert result.dtype == dtype and result.tolist() == [[[2, 3], [4, 5]], [[8, 9], [10, 11]]]
    others = decode_routing(sent(2, 3, 2), 2, replace(shape, moe_layers=(0, 2)))
    assert others.tolist() == [[[0, 1], [4, 5]], [[6, 7], [10, 11]]]
    assert decode_routing(sent(0, 3, 2), 0, shape).shape == (0, 2, 2)


@pytest.mark.parametrize("odd", [-1, 12, 256])
def test_an_expert_that_the_model_has_not_is_one_error(odd: int) -> None:
    record = np.arange(12, dtype=np.int32)
    record[-1] = odd
    text = base64.b64encode(record.tobytes()).decode()
    with pytest.raises(RequestFailed, match=rf"experts from {min(odd, 2)} to {max(odd, 10)}, but config.json has 12"):
        decode_routing(text, 2, replace(SHAPE, num_experts=12))
    record[-1], record[0] = 11, odd  # of a layer without experts nothing is read
    decode_routing(base64.b64encode(record.tobytes()).decode(), 2, replace(SHAPE, num_experts=12))


def test_a_record_of_another_size_is_one_error() -> None:
    with pytest.raises(RuntimeError, match="has 16 numbers, not those of 2 tokens in 3 layers with 2 experts each"):
        decode_routing(sent(2, 4, 2), 2, SHAPE)
    with pytest.raises(RuntimeError, match="did not record routing"):
        decode_routing(None, 2, SHAPE)


def answer(**changes: Any) -> dict[str, Any]:
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "3", "output_token_logprobs": [[-0.5, 8, None]]}
    ids = changes.pop("output_ids", [8])
    meta |= changes
    return {"output_ids": ids, "meta_info": {name: value for name, value in meta.items() if value is not ...}}


def ask(
    said: Any,
    status: int = 200,
    timeout: float = 30.0,
    version: int | None = 3,
    params: dict[str, Any] | None = None,
    bodies: list[dict[str, Any]] | None = None,
    has_masks: bool = True,
) -> Generation:
    """What a client whose engine holds this version makes of this answer; `said` None for none at all. bodies: what was
    asked is added to these."""

    kind = "application/json" if status == 200 else "text/plain"

    async def run() -> Generation:
        async def respond(request: web.Request) -> web.StreamResponse:
            if bodies is not None:
                bodies.append(await request.json())
            if said is None:
                await asyncio.sleep(3600)
            if isinstance(said, str):
                return web.Response(text=said, status=status, content_type=kind)
            return web.json_response(said, status=status)

        async def broken(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Length": "100", "Content-Type": kind})
            await response.prepare(request)
            await response.write(b"{")
            assert request.transport is not None
            request.transport.close()
            return response

        app = web.Application()
        app.router.add_post("/generate", broken if said == "broken off" else respond)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        try:
            async with Client(f"http://127.0.0.1:{port}", "key", timeout, weight_version=version) as client:
                client.should_request_masks = has_masks
                return await client.generate([5, 6], params or {})
        finally:
            await runner.cleanup()

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for again is so at once."""
    monkeypatch.setattr(module, "_RETRY_DELAY_S", 0.01)
    monkeypatch.setattr(module, "_DEATH_CHECK_S", 0.1)


def test_a_good_answer() -> None:
    out = ask(answer())
    assert (out.token_ids.tolist(), out.logprobs.tolist(), out.finish_reason) == ([8], [-0.5], "stop")
    assert (out.token_ids.dtype, out.logprobs.dtype) == (np.int32, np.float32)
    assert (out.weight_version, out.versions) == (3, ())


@pytest.mark.parametrize(
    ("said", "known"), [(0, 0), (2, 2), (..., -1), (None, -1), (3, -1), (-3, -1), ("1", -1), (True, -1)]
)
def test_what_the_engine_had_cached_is_a_number_of_what_it_was_asked_for_or_nothing(said: object, known: int) -> None:
    assert ask(answer(cached_tokens=said)).cached == known


@pytest.mark.parametrize(
    ("said", "status", "complaint"),
    [
        ({"detail": "Request running timeout reached."}, 503, "did not finish within rollout.request_timeout"),
        ({"error": {"message": "too long"}}, 400, "refused to generate: .*too long"),
        ("Internal Server Error", 500, "refused to generate: Internal Server Error"),
        ("{not json", 200, "cannot be read"),
        ("broken off", 200, "cannot be reached"),
        ([1], 200, "is invalid: TypeError"),
        ({}, 200, "is invalid: KeyError.'meta_info'"),
        ({"output_ids": [8], "meta_info": None}, 200, "is invalid"),
        (answer(output_token_logprobs=...), 200, "is invalid: KeyError.'output_token_logprobs'"),
        (answer(weight_version=...), 200, "is invalid: KeyError.'weight_version'"),
        (answer(output_token_logprobs=[]), 200, "wrote 1 tokens and returned 0 log-probs"),
        (answer(output_token_logprobs=[[-0.5, 9, None]]), 200, "wrote 1 tokens and returned 1 log-probs of others"),
        (answer(output_token_logprobs=[[None, 8, None]]), 200, "a log-prob that is not finite"),
        (answer(output_token_logprobs=[[float("-inf"), 8, None]]), 200, "cannot be read"),  # it is not JSON
        (answer(output_token_logprobs=[["x", 8, None]]), 200, "is invalid: ValueError"),
        (answer(output_token_logprobs=[[-0.5]]), 200, "is invalid: IndexError"),
        (answer(output_token_logprobs=[8]), 200, "is invalid: TypeError"),
        (answer(output_ids=["x"]), 200, "is invalid: ValueError"),
        (answer(output_ids=[8.5]), 200, "is invalid: ValueError"),
        (answer(output_ids=[-8]), 200, "is invalid: ValueError.'a token id is negative"),
        (answer(output_ids=[2**31]), 200, "is invalid: ValueError.'no token has the id"),
        (answer(output_ids=[], output_token_logprobs=[]), 200, "answered without a token"),
    ],
)
def test_what_can_be_no_answer_fails_this_request_only(said: Any, status: int, complaint: str) -> None:
    with pytest.raises(RequestFailed, match=complaint):
        ask(said, status)


def test_no_answer_at_all() -> None:
    with pytest.raises(RequestFailed, match="did not answer /generate within 0.2 s"):
        ask(None, timeout=0.2)


def test_of_an_answer_that_was_cut_off_only_what_is_whole_is_kept() -> None:
    cut = {"type": "abort", "message": "Aborted"}
    out = ask(answer(finish_reason=cut))
    assert (out.token_ids.tolist(), out.finish_reason, out.abort_reason) == (
        [8],
        "abort",
        "the engine aborted the answer: Aborted",
    )
    for odd in ({"output_token_logprobs": ...}, {"output_token_logprobs": [[None, 8, None]]}):
        out = ask(answer(finish_reason=cut, **odd))
        assert (len(out.token_ids), len(out.logprobs), out.finish_reason) == (0, 0, "abort")
    assert ask(answer(finish_reason=None)).abort_reason.endswith("it gives no reason")


CUT = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}


def masked(**changes: Any) -> dict[str, Any]:
    """An answer of two tokens with what else they could have been; without the log-probs over all tokens."""
    said: dict[str, Any] = {"output_ids": [8, 9], "output_token_logprobs": ...}
    said |= {"output_token_sampling_mask": [[3, 8], [9]], "output_token_sampling_logprobs": [-0.25, 0.0]}
    return answer(**said | changes)


def test_an_engine_whose_sampling_is_cut_off_is_asked_what_it_could_have_sampled() -> None:
    bodies: list[dict[str, Any]] = []
    out = ask(masked(), params=CUT, bodies=bodies)
    assert (out.token_ids.tolist(), out.logprobs.tolist()) == ([8, 9], [-0.25, 0.0])
    assert out.sampling_mask is not None
    assert (out.sampling_mask.counts.tolist(), out.sampling_mask.ids.tolist()) == ([2, 1], [3, 8, 9])
    assert bodies[0]["return_sampling_mask"] is True and bodies[0]["return_logprob"] is False
    assert ask(answer(), params={"temperature": 0.7}, bodies=bodies).sampling_mask is None
    assert "return_sampling_mask" not in bodies[1] and bodies[1]["return_logprob"] is True
    assert ask(answer(), params=CUT, bodies=bodies, has_masks=False).sampling_mask is None  # of an evaluation
    assert "return_sampling_mask" not in bodies[2] and bodies[2]["return_logprob"] is True


@pytest.mark.parametrize(
    ("params", "cut"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}, False),
        ({"top_p": 0.99}, True),
        ({"top_k": 50}, True),
        ({"min_p": 0.01}, True),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 50, "min_p": 0.1}, False),  # the likeliest token in any case
    ],
)
def test_when_sampling_is_cut_off(params: dict[str, Any], cut: bool) -> None:
    assert is_truncated_sampling(params) is cut


@pytest.mark.parametrize(
    ("changes", "complaint"),
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
def test_a_record_that_cannot_be_one_fails_the_request_or_what_was_cut_off(
    changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RequestFailed, match=complaint):
        ask(masked(**changes), params=CUT)
    if "is invalid" not in complaint:
        out = ask(masked(**changes, finish_reason={"type": "abort"}), params=CUT)
        assert len(out.token_ids) == 0 and out.sampling_mask is None


@pytest.mark.parametrize("changes", [{"weight_version": "2"}, {"weight_version": "default"}], ids=str)
def test_another_version_of_the_weights_is_not_an_answers_fault(changes: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="version (2|default), but .* was version 3") as failure:
        ask(answer(**changes))
    assert not isinstance(failure.value, RequestFailed)


def test_a_version_that_changed_within_an_answer_is_seen() -> None:
    spans = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 2}]
    with pytest.raises(RuntimeError, match="version 2, but"):
        ask(answer(weight_versions=spans))
    assert ask(answer(weight_versions=spans[1:])).weight_version == 3


def spans(*ends: int) -> list[dict[str, Any]]:
    """By version 1 up to the first end, by version 2 to the next, and so on."""
    return [{"version": str(i), "start": a, "end": b} for i, (a, b) in enumerate(pairwise((0, *ends)), 1)]


def test_an_answer_during_which_weights_changed_is_by_the_oldest() -> None:
    wrote: dict[str, Any] = {"output_ids": [8, 9, 8], "output_token_logprobs": [[-0.5, i, None] for i in (8, 9, 8)]}
    out = ask(answer(**wrote, weight_version="2", weight_versions=spans(1, 3)), version=None)
    assert (out.weight_version, out.versions) == (1, ())  # what follows has keys and values of older weights
    assert ask(answer(**wrote, weight_versions=spans(3)), version=None).versions == ()
    cut = answer(finish_reason=None, output_ids=[], output_token_logprobs=[], weight_versions=spans(0))
    assert ask(cut, version=None).versions == ()
    for ends in ((1, 2), (1, 4), (2, 1, 3)):
        with pytest.raises(RequestFailed, match="wrote 3 tokens with weight versions of another|is invalid"):
            ask(answer(**wrote, weight_versions=spans(*ends)), version=None)


def test_weights_may_change_while_an_answer_is_under_way_and_each_version_has_its_own_cache() -> None:
    salts: list[str] = []

    async def run() -> list[int]:
        async def respond(request: web.Request) -> web.StreamResponse:
            salts.append((await request.json())["extra_key"])
            client.weight_version = 4  # a push, while the engine is at work
            both = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
            new = [{"version": "4", "start": 0, "end": 2}]
            two: dict[str, Any] = {"output_ids": [8, 9], "output_token_logprobs": [[-0.5, i, None] for i in (8, 9)]}
            spans = new if len(salts) > 1 else both
            return web.json_response(answer(**two, weight_version="4", weight_versions=spans))

        app = web.Application()
        app.router.add_post("/generate", respond)
        server = TestServer(app)
        await server.start_server()
        async with Client(f"http://127.0.0.1:{server.port}", "key", 30.0, weight_version=3) as client:
            result = [(await client.generate([1], {})).weight_version for _ in range(2)]
        await server.close()
        return result

    assert asyncio.run(run()) == [3, 4] and salts == ["3", "4"]


@pytest.mark.parametrize("gone", [False, True])
def test_a_lost_connection_is_one_requests_fault_unless_the_engine_is_gone(gone: bool) -> None:
    looks: list[int] = []

    def check_runs() -> None:
        looks.append(1)
        if gone and len(looks) > 1:  # it takes a moment to die
            raise EngineLost("died", "engine 0 is not running")

    async def run() -> None:
        async with Client("http://127.0.0.1:9", "key", 30.0, check_running=check_runs) as client:
            try:
                await client.generate([5], {})
            finally:
                assert client.num_pending == 0

    with pytest.raises(EngineLost if gone else RequestFailed, match="is not running" if gone else "cannot be reached"):
        asyncio.run(run())


def test_who_has_an_engine_stop_need_not_know_that_the_generation_has_ended() -> None:
    """One that is gone is tried again, and its client may be closed between two tries."""

    async def run() -> None:
        async with Client("http://127.0.0.1:9", "key", 30.0) as client:
            stopping = asyncio.create_task(client.stop())
            await asyncio.sleep(0.005)
        await stopping
        await client.stop()

    asyncio.run(run())


@pytest.mark.parametrize(("faults", "fails"), [(2, False), (3, True)])
def test_an_answer_that_the_engine_fails_at_is_asked_for_again_a_few_times(faults: int, fails: bool) -> None:
    requested: list[int] = []

    async def run() -> int:
        async def respond(request: web.Request) -> web.StreamResponse:
            requested.append(1)
            if len(requested) <= faults:
                if len(requested) == 2 and request.transport is not None:
                    request.transport.close()  # the connection is lost
                return web.Response(status=500, text="CUDA error")
            return web.json_response(answer())

        app = web.Application()
        app.router.add_post("/generate", respond)
        server = TestServer(app)
        await server.start_server()
        try:
            async with Client(f"http://127.0.0.1:{server.port}", "key", 30.0, weight_version=3) as client:
                return len((await client.generate([1], {})).token_ids)
        finally:
            await server.close()

    if fails:
        with pytest.raises(RequestFailed, match="refused to generate: CUDA error"):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == 1
    assert len(requested) == 3
