"""What is refused, what fails, what is late, closed or left, as OpenAI's own client sees it."""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from scripted import PROMPT, Fails, Script, said
from serving import ASK, PARAMS, Numbered, Served, run, serving

from megarl.engine.engine_protocol import RequestFailed
from megarl.rollout.session_server.requests import CompletionRequest, RequestRefused
from megarl.rollout.session_server.server import MAX_BODY_BYTES

pytestmark = pytest.mark.alone


def test_only_the_own_key_opens_a_session() -> None:
    async def test(served: Served) -> None:
        other = served.server.open(PROMPT, Numbered("b"), PARAMS)
        assert other.key != served.recording.key and other.id != served.recording.id
        for key in (other.key, "nonsense", served.recording.key[:-1]):
            with pytest.raises(openai.AuthenticationError, match="belongs to another session") as refused:
                await served.client.with_options(api_key=key).models.list()
            assert refused.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                await served.client.with_options(api_key=key).chat.completions.create(model="policy", messages=ASK)
        unknown = served.client.with_options(base_url=other.base_url.replace(other.id, "0" * 16))
        with pytest.raises(openai.NotFoundError, match="no such session"):
            await unknown.chat.completions.create(model="policy", messages=ASK)
        await served.server.close(other)
        await served.server.close(other)
        closed = served.client.with_options(base_url=other.base_url, api_key=other.key)
        with pytest.raises(openai.NotFoundError):
            await closed.models.list()

    run(test, Numbered("a"))


def test_models() -> None:
    async def test(served: Served) -> None:
        assert [model.id async for model in served.client.models.list()] == ["policy"]
        assert (await served.client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError):
            await served.client.models.retrieve("gpt-4o")
        with pytest.raises(openai.BadRequestError, match="'gpt-4o' does not exist; use 'policy'") as refused:
            await served.client.chat.completions.create(model="gpt-4o", messages=ASK)
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
            await served.client.embeddings.create(model="policy", input="x")

    run(test, Numbered("a"))


@pytest.mark.parametrize(
    ("body", "complaint", "param"),
    [
        (b"{", "not JSON", None),
        (b"\xff\xfe", "not JSON", None),
        (b"[" * 100_000, "not JSON", None),
        (b"[]", "must be a JSON object", None),
        (b'{"model": "policy"}', "'messages' must be a list of at least one", "messages"),
        (b'{"messages": []}', "'model' is missing", "model"),
    ],
)
def test_a_body_that_is_none(body: bytes, complaint: str, param: str | None) -> None:
    async def test(served: Served) -> None:
        headers = {"Authorization": f"Bearer {served.recording.key}", "Content-Type": "application/json"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            answer = await client.post(f"{served.recording.base_url}/chat/completions", content=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and complaint in error["message"] and error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert (await served.create(ASK)).choices[0].message.content == "a"  # the session goes on

    run(test, Numbered("a"))


def test_headers_of_any_bytes_and_a_body_that_is_compressed_are_refused_in_words() -> None:
    async def test(served: Served) -> None:
        local = f"Bearer {served.recording.key}".encode()
        url = f"{served.recording.base_url}/chat/completions"
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(url, content=b"{}", headers={"Authorization": b"Bearer \xff\xfe"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            for body in (b"nonsense", gzip.compress(b"{}")):
                headers = {"Authorization": local, "Content-Encoding": b"gzip"}
                answer = await client.post(url, content=body, headers=headers)
                assert answer.status_code == 400
                assert "has the encoding 'gzip'; send it unencoded" in answer.json()["error"]["message"]
        assert (await served.create(ASK)).choices[0].message.content == "a"

    run(test, Numbered("a"))


def test_a_body_has_a_most_size_and_methods_are_named() -> None:
    async def test(served: Served) -> None:
        headers = {"Authorization": f"Bearer {served.recording.key}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            url = f"{served.recording.base_url}/chat/completions"
            answer = await client.post(url, content=b" " * (MAX_BODY_BYTES + 1))
            assert answer.status_code == 413 and "larger than" in answer.json()["error"]["message"]
            answer = await client.get(url)
            assert answer.status_code == 405 and answer.json()["error"]["type"] == "invalid_request_error"

    run(test, Numbered("a"))


def test_a_request_that_fails_aborts_the_session_unless_it_is_answered_later() -> None:
    async def test(served: Served) -> None:
        with pytest.raises(openai.InternalServerError, match="the engine refused"):
            await served.create(ASK)
        (branch,) = served.recording.collect_branches()
        assert (branch.status, branch.failure, branch.num_turns) == ("aborted", "the engine refused", 0)
        await served.create(ASK)
        (branch,) = served.recording.collect_branches()
        assert (branch.status, branch.failure) == ("stop", "")
        with pytest.raises(openai.APIError, match="the engine refused"):
            async for _ in await served.create([*ASK, *ASK], stream=True):
                pass
        assert [item.status for item in served.recording.collect_branches()] == ["aborted"]

    lines: Any = RequestFailed("the engine refused"), "a", RequestFailed("the engine refused")
    run(test, Fails(*lines))


def test_openais_client_asks_again_where_the_engine_failed() -> None:
    async def test(served: Served) -> None:
        assert (await served.create(ASK)).choices[0].message.content == "a"
        assert [item.status for item in served.recording.collect_branches()] == ["stop"]
        figures = served.recording.metrics
        assert (figures.failed, figures.refused, figures.requests) == (1, 0, 2)

    lines: Any = RequestFailed("the engine refused"), "a"
    run(test, Fails(*lines), retries=2)


def test_an_answer_that_was_cut_off_is_none() -> None:
    cut = replace(said("It is", finish="abort"), abort_reason="the engine aborted the answer: gone")

    async def test(served: Served) -> None:
        with pytest.raises(openai.InternalServerError, match="aborted the answer"):
            await served.create(ASK)
        assert served.recording.collect_branches()[0].failure == "the engine aborted the answer: gone"

    run(test, Script(cut))


def test_an_engine_that_is_gone_is_an_error_for_the_owner() -> None:
    async def test(served: Served) -> None:
        with pytest.raises(openai.InternalServerError, match="the engine is gone"):
            await served.create(ASK)
        with pytest.raises(RuntimeError, match="the engine is gone"):
            served.recording.collect_branches()

    lines: Any = (RuntimeError("the engine is gone"),)
    run(test, Fails(*lines), retries=2)


def test_a_session_that_is_late_has_failed() -> None:
    async def late() -> None:
        lines: Any = ("a", None)
        async with serving(Fails(*lines), deadline=asyncio.get_running_loop().time() + 1.0, retries=2) as served:
            answer = await served.create(ASK)
            for _ in range(2):
                with pytest.raises(openai.InternalServerError, match=r"rollout\.step_timeout"):
                    await served.create([*ASK, answer.choices[0].message, *ASK])
            (branch,) = served.recording.collect_branches()
            assert (branch.status, branch.num_turns) == ("aborted", 1)
            assert branch.failure == "it did not finish within rollout.step_timeout"

    asyncio.run(asyncio.wait_for(late(), 240))


def test_closing_answers_what_is_under_way() -> None:
    async def test(served: Served) -> None:
        waiting = [asyncio.create_task(served.create(ASK, stream=stream)) for stream in (False, True)]
        while served.recording.metrics.requests < 2:
            await asyncio.sleep(0.01)
        await served.server.close(served.recording)
        with pytest.raises(openai.InternalServerError, match="the session is closed"):
            await waiting[0]
        with pytest.raises(openai.APIError, match="the session is closed"):
            async for _ in await waiting[1]:
                pass
        (branch,) = served.recording.collect_branches()
        assert (branch.status, branch.failure) == ("aborted", "the session made no request")

    lines: Any = (None, None)
    run(test, Fails(*lines), retries=2)


def test_an_error_of_the_servers_own_fails_the_session_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(served: Served) -> None:
        monkeypatch.setattr(served.recording.tree, "find_answer", None)
        with pytest.raises(openai.InternalServerError, match="cannot be read: TypeError"):
            await served.create(ASK)
        (branch,) = served.recording.collect_branches()
        assert branch.status == "aborted" and "TypeError" in branch.failure

    run(test, Numbered("a"), retries=2)


def test_closing_ends_what_has_not_begun_either() -> None:
    async def begun_late() -> None:
        lines: Any = (None,)
        async with serving(Fails(*lines)) as served:
            requested = CompletionRequest(tuple(ASK))
            place = served.recording.locate_request(requested)
            await served.server.close(served.recording)
            with pytest.raises(RequestRefused, match="the session is closed"):
                await served.recording.run_request(lambda: served.recording.answer(requested, place))

    asyncio.run(asyncio.wait_for(begun_late(), 240))


def test_a_client_that_goes_away_cancels_its_own_request_only() -> None:
    class Waits(Numbered):
        def __init__(self) -> None:
            super().__init__("a")
            self.go, self.cancelled = asyncio.Event(), 0

        async def generate(self, *args: Any, **settings: Any) -> Any:
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return await super().generate(*args, **settings)

    policy = Waits()

    async def test(served: Served) -> None:
        first = asyncio.create_task(served.create(ASK))
        second = asyncio.create_task(served.create(ASK, n=2))
        while served.recording.metrics.requests < 2:
            await asyncio.sleep(0.01)
        second.cancel()
        while policy.cancelled < 2:
            await asyncio.sleep(0.01)
        policy.go.set()
        assert (await first).choices[0].message.content == "a"
        assert policy.cancelled == 2 and len(served.recording.collect_branches()) == 1
        assert [item.status for item in served.recording.collect_branches()] == ["stop"]

    run(test, policy)
