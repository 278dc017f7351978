"""The client of reward services against a local server: requests, responses, retries and failures."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import ConfigError
from megarl.rewards.composite import NOT_SCORED
from megarl.rewards.service import Service, ServiceOptions
from megarl.types import Prompt, Rollout, Turn
from megarl.types.reward_values import Reward, RewardFailure

sys.path.insert(0, str(Path(__file__).parent))
from reward_server import RewardServer  # noqa: E402

pytestmark = pytest.mark.alone


def rollout(number: int, answer: str, **fields: Any) -> Rollout:
    messages = ({"role": "user", "content": "how many?"}, {"role": "assistant", "content": answer})
    prompt = Prompt(str(number), messages[:1], data_source="words", **fields)
    return Rollout(prompt, (Turn((1, 2)), Turn((3,), (0.0,), True, 0)), messages=messages)


ROLLOUTS = [rollout(number, " ".join(["word"] * (number + 1))) for number in range(7)]


@pytest.fixture
def server() -> Iterator[RewardServer]:
    with RewardServer() as judging:
        yield judging


def service(server: RewardServer, **options: Any) -> Service:
    return Service(ServiceOptions.read({"url": server.url, "pause": 0.01, "private": True, **options}))


def test_sends_conversations_as_json(server: RewardServer) -> None:
    response = rollout(3, "a b", ground_truth=np.int64(2), extra={"level": [1, 2]})
    assert service(server).score([response]) == [Reward(2.0, {"style": 0.5})]
    ((kind, path, body),) = server.requests
    assert (kind, path) == ("POST", "/score")
    user, assistant = ({"role": "user", "content": "how many?"}, {"role": "assistant", "content": "a b"})
    fields = {"id": "3", "data_source": "words", "status": "stop", "ground_truth": 2, "extra": {"level": [1, 2]}}
    assert body == {"conversations": [{**fields, "prompt": [user], "messages": [user, assistant], "answer": "a b"}]}


def test_keeps_rollout_order_across_concurrent_batches(server: RewardServer) -> None:
    server.answers = [0.3, 0.0, 0.1]
    result = service(server, batch=2, concurrency=3).score(ROLLOUTS)
    assert result == [Reward(number, {"style": 0.5}) for number in range(1, 8)]
    assert sorted(len(batch) for batch in server.batches()) == [1, 2, 2, 2]
    assert service(server).score([]) == []


def test_limits_concurrent_requests() -> None:
    with RewardServer() as slow:
        slow.answers = [0.05] * 7
        service(slow, batch=1, concurrency=2).score(ROLLOUTS)
        assert slow.max_concurrent == 2


def test_accepts_plain_numbers_as_rewards() -> None:
    with RewardServer(lambda conversation: len(conversation["answer"]) > 4) as judging:
        assert service(judging).score(ROLLOUTS[:2]) == [Reward(0.0), Reward(1.0)]


def test_alternates_between_urls(server: RewardServer) -> None:
    with RewardServer() as second:
        service(server, url=[server.url, second.url], batch=1).score(ROLLOUTS)
        assert (len(server.batches()), len(second.batches())) == (4, 3)


def test_retries_transient_failures(server: RewardServer) -> None:
    """A dropped connection, a timeout, status 429 and status 503."""
    server.answers = [None, 5.0, (429, b"slowly"), (503, b"not yet")]
    assert service(server, timeout=0.5).score(ROLLOUTS[:1]) == [Reward(1.0, {"style": 0.5})]
    assert len(server.requests) == 5


def test_fails_over_to_another_url(server: RewardServer) -> None:
    result = service(server, url=[server.unreachable_url, server.url], batch=1).score(ROLLOUTS)
    assert len(result) == 7 and len(server.requests) == 7


LARGE = b"[" + b"1" * 300 + b"]"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, b"no such page"), "it answered with status 404: no such page"),
        ((500, b"trace\nback"), "it answered with status 500: trace back (2 tries); check that it runs, or set roles."),
        ((500, b""), "status 500: nothing (2 tries)"),
        (None, "Server"),
        (2.0, "no answer within 0.5 s (2 tries)"),
        ((301, b"", {"Location": "http://evil/x"}), "it redirects to http://evil/x, which is not followed; set roles."),
        ((307, b"moved"), "it redirects to nothing, which is not followed"),
        ((200, b"[" + b" " * 2000 + b"1]"), "its answer has more than 0.001 MB; see roles.reward.options.answer_mb"),
        ((200, b"<html>"), "its answer is not JSON: <html>"),
        ((200, b"\x1b[31m\x00\xff"), "its answer is not JSON: [31m \ufffd"),
        ((200, b"[NaN]"), "its answer is not JSON: [NaN]"),
        ((200, b"[" * 400 + b"]" * 400), "it returned a list"),
        ((200, b"{}"), "its answer to 1 conversations must be a list of as many, not a dict: {}"),
        ((200, b"[1, 2]"), "must be a list of as many, not a list of 2: [1, 2]"),
        ((200, b"[null]"), "it returned a NoneType"),
        ((200, b'["good"]'), "it returned a str, 'good'; it must return a number"),
        ((200, b"[1e7]"), "it returned 1e+07; beyond 1e+06"),
        ((200, LARGE), "it returned 1.11111e+299; beyond"),
        ((200, b'[{"score": 1}]'), "it returned no `reward`, but {'score': 1}"),
        ((200, b'[{"reward": 1, "parts": [2]}]'), "it returned `parts` that are not a mapping, but [2]"),
        ((200, b'[{"reward": 1, "parts": {"a": "b"}}]'), "it, as the part a, returned a str, 'b'"),
        ((200, b'[{"reward": 1, "parts": {"a b": 1}}]'), "it returned a part with the name 'a b'; use letters"),
        ((200, b'[{"reward": 1, "parts": {"%s": 1}}]' % (b"a" * 65)), "a part with the name 'aaaa"),
        (
            (200, b'[{"reward": 1, "parts": {%s}}]' % b", ".join(b'"p%d": 1' % i for i in range(33))),
            "it returned 33 parts; 32 are allowed",
        ),
    ],
)
def test_invalid_responses_name_the_url_and_problem(server: RewardServer, answer: Any, message: str) -> None:
    server.answers = [answer, answer]
    (failed,) = service(server, timeout=0.5, tries=2, answer_mb=0.001).score(ROLLOUTS[:1])
    assert isinstance(failed, RewardFailure) and failed.reason.isprintable()
    assert failed.reason.startswith(f"the reward service {server.url}: ") and message in failed.reason


def test_an_invalid_reward_fails_only_its_rollout(server: RewardServer) -> None:
    server.answers = [(200, b'[1, null, {"reward": 3, "parts": {"a": 1}}]')]
    first, second, third = service(server, batch=3).score(ROLLOUTS[:3])
    assert (first, third) == (Reward(1.0), Reward(3.0, {"a": 1.0}))
    assert isinstance(second, RewardFailure) and "it returned a NoneType" in second.reason


def test_a_failed_request_fails_only_its_batch(server: RewardServer) -> None:
    server.answers = [(400, b"no")]
    result = service(server, batch=3, concurrency=1).score(ROLLOUTS)
    assert [isinstance(reward, RewardFailure) for reward in result] == [True] * 3 + [False] * 4


def test_unserializable_samples_fail_without_a_request(server: RewardServer) -> None:
    rollouts = [rollout(1, "x", extra={"a": {1}}), ROLLOUTS[1], rollout(2, "\ud800")]
    first, second, third = service(server).score(rollouts)
    assert second == Reward(2.0, {"style": 0.5})
    for failed in (first, third):
        assert isinstance(failed, RewardFailure)
        assert failed.reason.startswith("the sample cannot be sent to a reward service as JSON: ")
    assert [len(batch) for batch in server.batches()] == [1]


def test_reachability_check_accepts_any_status(server: RewardServer) -> None:
    service(server).check_reachable()
    assert server.requests == [("GET", "/score", None)]
    with pytest.raises(
        ConfigError, match=rf"the reward service {server.unreachable_url}: Client.* \(2 tries\); check that it runs"
    ):
        service(server, url=[server.url, server.unreachable_url], tries=2).check_reachable()


def test_max_duration_counts_batches_tries_and_pauses() -> None:
    remote = Service(ServiceOptions.read({"url": "http://a/b", "batch": 4, "concurrency": 2, "timeout": 6, "tries": 3}))
    assert remote.max_duration(9) == 2 * 3 * (6 + 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "roles.reward.options.url is not set"),
        ({"url": []}, "roles.reward.options.url is not set"),
        ({"url": "judge:8000"}, "'judge:8000' is not a URL such as http"),
        ({"url": ["http://a/b", "http://:80"]}, "'http://:80' is not a URL"),
        ({"url": "http://a:99999/"}, "is not a URL"),
        ({"url": "ftp://a/b"}, "is not a URL"),
        ({"url": 3}, "roles.reward.options.url must be a list of text, not 3"),
        ({"urls": "http://a/b"}, "unknown key roles.reward.options.urls; did you mean roles.reward.options.url?"),
        ({"url": "http://a/b", "batch": 0}, "roles.reward.options.batch must be a whole number, at least 1"),
        ({"url": "http://a/b", "timeout": 0}, "roles.reward.options.timeout must be a number, above 0"),
        ({"url": "http://a/b", "answer_mb": 0}, "roles.reward.options.answer_mb must be a number, above 0"),
    ],
)
def test_refuses_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServiceOptions.read(options)
    assert message in str(error.value)


def test_stops_scoring_after_too_many_failures(server: RewardServer) -> None:
    """Of two concurrent requests at a time, the first three to arrive fail and the others would take minutes."""
    server.answers = [(400, b"no")] * 3 + [600.0] * 4
    started = time.monotonic()
    result = service(server, batch=1, concurrency=2, timeout=700.0).score(ROLLOUTS, max_failed=2.0)
    assert time.monotonic() - started < 30.0
    assert sum(reward is NOT_SCORED for reward in result) == 4
    assert all(reward is NOT_SCORED for reward in result[5:])
    assert len(server.batches()) <= 5
