"""Rejected, failed, late, closed and disconnected requests, as OpenAI's client sees them."""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from scripted import PROMPT, FailingPolicy, ScriptedPolicy, make_generation
from serving import PARAMS, QUESTION, NumberedPolicy, ServedSession, run_with_server, serve_session

from megarl.engine.engine_protocol import RequestFailed
from megarl.rollout.conversation import Deadline
from megarl.rollout.session_server.requests import CompletionRequest, RequestRefused
from megarl.rollout.session_server.server import MAX_BODY_BYTES

pytestmark = pytest.mark.alone


def test_session_accepts_only_its_own_key() -> None:
    async def test(session: ServedSession) -> None:
        other_session = session.server.open(PROMPT, NumberedPolicy("b"), PARAMS)
        assert other_session.key != session.recording.key and other_session.id != session.recording.id
        for key in (other_session.key, "nonsense", session.recording.key[:-1]):
            with pytest.raises(openai.AuthenticationError, match="belongs to another session") as refused:
                await session.client.with_options(api_key=key).models.list()
            assert refused.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                await session.client.with_options(api_key=key).chat.completions.create(
                    model="policy", messages=QUESTION
                )
        unknown = session.client.with_options(base_url=other_session.base_url.replace(other_session.id, "0" * 16))
        with pytest.raises(openai.NotFoundError, match="no such session"):
            await unknown.chat.completions.create(model="policy", messages=QUESTION)
        await session.server.close(other_session)
        await session.server.close(other_session)
        closed = session.client.with_options(base_url=other_session.base_url, api_key=other_session.key)
        with pytest.raises(openai.NotFoundError):
            await closed.models.list()

    run_with_server(test, NumberedPolicy("a"))


def test_lists_one_model_and_rejects_others() -> None:
    async def test(session: ServedSession) -> None:
        assert [model.id async for model in session.client.models.list()] == ["policy"]
        assert (await session.client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError):
            await session.client.models.retrieve("gpt-4o")
        with pytest.raises(openai.BadRequestError, match="'gpt-4o' does not exist; use 'policy'") as refused:
            await session.client.chat.completions.create(model="gpt-4o", messages=QUESTION)
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
            await session.client.embeddings.create(model="policy", input="x")

    run_with_server(test, NumberedPolicy("a"))


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"{", "not JSON", None),
        (b"\xff\xfe", "not JSON", None),
        (b"[" * 100_000, "not JSON", None),
        (b"[]", "must be a JSON object", None),
        (b'{"model": "policy"}', "'messages' must be a list of at least one", "messages"),
        (b'{"messages": []}', "'model' is missing", "model"),
    ],
)
def test_invalid_bodies_are_rejected(body: bytes, message: str, param: str | None) -> None:
    async def test(session: ServedSession) -> None:
        headers = {"Authorization": f"Bearer {session.recording.key}", "Content-Type": "application/json"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            answer = await client.post(f"{session.recording.base_url}/chat/completions", content=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and message in error["message"] and error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert (await session.create(QUESTION)).choices[0].message.content == "a"  # the session continues

    run_with_server(test, NumberedPolicy("a"))


def test_invalid_headers_and_compressed_bodies_are_rejected() -> None:
    async def test(session: ServedSession) -> None:
        authorization = f"Bearer {session.recording.key}".encode()
        url = f"{session.recording.base_url}/chat/completions"
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(url, content=b"{}", headers={"Authorization": b"Bearer \xff\xfe"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            for body in (b"nonsense", gzip.compress(b"{}")):
                headers = {"Authorization": authorization, "Content-Encoding": b"gzip"}
                answer = await client.post(url, content=body, headers=headers)
                assert answer.status_code == 400
                assert "has the encoding 'gzip'; send it unencoded" in answer.json()["error"]["message"]
        assert (await session.create(QUESTION)).choices[0].message.content == "a"

    run_with_server(test, NumberedPolicy("a"))


def test_oversized_bodies_and_other_methods_are_rejected() -> None:
    async def test(session: ServedSession) -> None:
        headers = {"Authorization": f"Bearer {session.recording.key}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            url = f"{session.recording.base_url}/chat/completions"
            answer = await client.post(url, content=b" " * (MAX_BODY_BYTES + 1))
            assert answer.status_code == 413 and "larger than" in answer.json()["error"]["message"]
            answer = await client.get(url)
            assert answer.status_code == 405 and answer.json()["error"]["type"] == "invalid_request_error"

    run_with_server(test, NumberedPolicy("a"))


def test_failed_request_aborts_the_session_unless_retried() -> None:
    async def test(session: ServedSession) -> None:
        with pytest.raises(openai.InternalServerError, match="the engine refused"):
            await session.create(QUESTION)
        (branch,) = session.recording.collect_branches()
        assert (branch.status, branch.failure, branch.num_turns) == ("aborted", "the engine refused", 0)
        await session.create(QUESTION)
        (branch,) = session.recording.collect_branches()
        assert (branch.status, branch.failure) == ("stop", "")
        with pytest.raises(openai.APIError, match="the engine refused"):
            async for _ in await session.create([*QUESTION, *QUESTION], stream=True):
                pass
        assert [item.status for item in session.recording.collect_branches()] == ["aborted"]

    lines: Any = RequestFailed("the engine refused"), "a", RequestFailed("the engine refused")
    run_with_server(test, FailingPolicy(*lines))


def test_openai_client_retries_engine_failures() -> None:
    async def test(session: ServedSession) -> None:
        assert (await session.create(QUESTION)).choices[0].message.content == "a"
        assert [item.status for item in session.recording.collect_branches()] == ["stop"]
        metrics = session.recording.metrics
        assert (metrics.failed, metrics.refused, metrics.requests) == (1, 0, 2)

    lines: Any = RequestFailed("the engine refused"), "a"
    run_with_server(test, FailingPolicy(*lines), retries=2)


def test_aborted_response_is_an_error() -> None:
    aborted = replace(make_generation("It is", finish="abort"), abort_reason="the engine aborted the answer: gone")

    async def test(session: ServedSession) -> None:
        with pytest.raises(openai.InternalServerError, match="aborted the answer"):
            await session.create(QUESTION)
        assert session.recording.collect_branches()[0].failure == "the engine aborted the answer: gone"

    run_with_server(test, ScriptedPolicy(aborted))


def test_lost_engine_raises_in_the_session_owner() -> None:
    async def test(session: ServedSession) -> None:
        with pytest.raises(openai.InternalServerError, match="the engine is gone"):
            await session.create(QUESTION)
        with pytest.raises(RuntimeError, match="the engine is gone"):
            session.recording.collect_branches()

    lines: Any = (RuntimeError("the engine is gone"),)
    run_with_server(test, FailingPolicy(*lines), retries=2)


def test_session_past_its_deadline_is_aborted() -> None:
    async def run() -> None:
        lines: Any = ("a", None)
        async with serve_session(
            FailingPolicy(*lines), deadline=Deadline(asyncio.get_running_loop().time() + 1.0), retries=2
        ) as session:
            answer = await session.create(QUESTION)
            for _ in range(2):
                with pytest.raises(openai.InternalServerError, match=r"rollout\.step_timeout"):
                    await session.create([*QUESTION, answer.choices[0].message, *QUESTION])
            (branch,) = session.recording.collect_branches()
            assert (branch.status, branch.num_turns) == ("aborted", 1)
            assert branch.failure == "it did not finish within rollout.step_timeout"

    asyncio.run(asyncio.wait_for(run(), 240))


def test_close_answers_running_requests() -> None:
    async def test(session: ServedSession) -> None:
        waiting = [asyncio.create_task(session.create(QUESTION, stream=stream)) for stream in (False, True)]
        while session.recording.metrics.requests < 2:
            await asyncio.sleep(0.01)
        await session.server.close(session.recording)
        with pytest.raises(openai.InternalServerError, match="the session is closed"):
            await waiting[0]
        with pytest.raises(openai.APIError, match="the session is closed"):
            async for _ in await waiting[1]:
                pass
        (branch,) = session.recording.collect_branches()
        assert (branch.status, branch.failure) == ("aborted", "the session made no request")

    lines: Any = (None, None)
    run_with_server(test, FailingPolicy(*lines), retries=2)


def test_internal_server_error_aborts_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(session: ServedSession) -> None:
        monkeypatch.setattr(session.recording.tree, "find_answer", None)
        with pytest.raises(openai.InternalServerError, match="cannot be read: TypeError"):
            await session.create(QUESTION)
        (branch,) = session.recording.collect_branches()
        assert branch.status == "aborted" and "TypeError" in branch.failure

    run_with_server(test, NumberedPolicy("a"), retries=2)


def test_closed_session_rejects_located_requests() -> None:
    async def run() -> None:
        lines: Any = (None,)
        async with serve_session(FailingPolicy(*lines)) as session:
            request = CompletionRequest(tuple(QUESTION))
            location = session.recording.locate_request(request)
            await session.server.close(session.recording)
            with pytest.raises(RequestRefused, match="the session is closed"):
                await session.recording.run_request(lambda: session.recording.answer(request, location))

    asyncio.run(asyncio.wait_for(run(), 240))


def test_disconnect_cancels_only_the_clients_own_request() -> None:
    class WaitingPolicy(NumberedPolicy):
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

    policy = WaitingPolicy()

    async def test(session: ServedSession) -> None:
        first = asyncio.create_task(session.create(QUESTION))
        second = asyncio.create_task(session.create(QUESTION, n=2))
        while session.recording.metrics.requests < 2:
            await asyncio.sleep(0.01)
        second.cancel()
        while policy.cancelled < 2:
            await asyncio.sleep(0.01)
        policy.go.set()
        assert (await first).choices[0].message.content == "a"
        assert policy.cancelled == 2 and len(session.recording.collect_branches()) == 1
        assert [item.status for item in session.recording.collect_branches()] == ["stop"]

    run_with_server(test, policy)
