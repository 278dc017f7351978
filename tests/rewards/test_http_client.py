"""The HTTP client of reward services: private addresses, redirects, proxies, credentials and size limits."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from megarl.config import ConfigError
from megarl.rewards import service as module
from megarl.rewards.service import HttpOptions, HttpResponse, Service, ServiceOptions, preview
from megarl.types.reward_values import RewardFailure
from megarl.utils.addresses import is_public

sys.path.insert(0, str(Path(__file__).parent))
from reward_server import RewardServer  # noqa: E402

SECRET = "sk-0123456789abcdef"


@pytest.fixture
def server() -> Iterator[RewardServer]:
    with RewardServer(reply=lambda body: body) as judging:
        yield judging


def make_service(url: Any, **options: Any) -> Service:
    return Service(ServiceOptions.read({"url": url, "pause": 0, "tries": 2, **options}))


@pytest.mark.alone
@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700:4700::1111", True),
        ("127.0.0.1", False),
        ("127.9.9.9", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("172.32.0.1", True),
        ("192.168.0.1", False),
        ("100.64.0.1", False),  # carrier-grade NAT
        ("169.254.169.254", False),  # cloud metadata
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True),
        ("2002:7f00:1::", False),
        ("2002:a00:1::1", False),
    ],
)
def test_classifies_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.alone
@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/", "http://localhost/x", "http://a.localhost", "http://[::1]:80/", "http://10.0.0.1"]
)
def test_refuses_private_urls_at_startup(url: str) -> None:
    with pytest.raises(ConfigError, match="in a private network: set roles.reward.options.private=true if it is"):
        HttpOptions.read({"url": url})
    assert HttpOptions.read({"url": url, "private": True}).url == (url,)


@pytest.mark.alone
@pytest.mark.parametrize("address", ["2130706433", "127.1", "0x7f000001"])
def test_refuses_noncanonical_loopback_addresses(server: RewardServer, address: str) -> None:
    """These do not look like addresses, but system resolvers map them to 127.0.0.1."""
    url = server.url.replace("127.0.0.1", address)
    (failed,) = make_service(url).post_all([b"1"])
    assert isinstance(failed, RewardFailure) and "tries" not in failed.reason
    assert "is at 127.0.0.1, on this machine" in failed.reason or "is not a canonical IPv4 address" in failed.reason
    assert server.requests == []


@pytest.fixture
def dns_answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Addresses that successive DNS lookups of any host return; the last one repeats."""
    answers: list[str] = []

    async def resolve(self: Any, host: str, port: int = 0, family: Any = 0) -> list[Any]:
        address = answers.pop(0) if len(answers) > 1 else answers[0]
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        info = {"hostname": host, "host": address, "port": port, "family": address_family, "proto": 0}
        return [{**info, "flags": socket.AI_NUMERICHOST}]

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)
    monkeypatch.setattr(aiohttp.DefaultResolver, "resolve", resolve)
    yield answers


@pytest.mark.alone
@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_refuses_hostnames_that_resolve_to_private_addresses(
    server: RewardServer, dns_answers: list[str], address: str
) -> None:
    dns_answers.append(address)
    url = server.url.replace("127.0.0.1", "judge.example")
    (failed,) = make_service(url).post_all([b"1"])
    assert isinstance(failed, RewardFailure) and f"is at {address}, on this machine" in failed.reason
    assert "tries" not in failed.reason and server.requests == []
    with pytest.raises(ConfigError, match="in a private network"):
        make_service(url).check_reachable()
    assert make_service(url, private=True).post_all([b"1"]) == [HttpResponse(url, b"1")]


@pytest.mark.alone
def test_refuses_hostnames_rebound_to_private_addresses(
    server: RewardServer, dns_answers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """127.0.0.2 counts as a public address here, and nothing listens on it."""
    dns_answers.extend(["127.0.0.2", "127.0.0.1"])
    url = server.url.replace("127.0.0.1", "judge.example")
    service = make_service(url)
    monkeypatch.setattr(module, "is_public", lambda address: address == "127.0.0.2")
    first, second = (service.post_all([b"1"])[0] for _ in range(2))
    assert isinstance(first, RewardFailure) and "(2 tries)" in first.reason
    assert isinstance(second, RewardFailure) and "is at 127.0.0.1, on this machine" in second.reason
    assert server.requests == []


@pytest.mark.alone
def test_does_not_follow_redirects(server: RewardServer) -> None:
    with RewardServer(reply=lambda body: body) as other_server:
        server.answers = [(302, b"", {"Location": other_server.url})]
        (failed,) = make_service(server.url, private=True).post_all([b"1"])
        assert (
            isinstance(failed, RewardFailure)
            and f"it redirects to {other_server.url}, which is not followed" in failed.reason
        )
        assert other_server.requests == [] and len(server.requests) == 1


@pytest.mark.alone
def test_ignores_proxy_variables(server: RewardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, server.unreachable_url)
    assert make_service(server.url, private=True).post_all([b"1"]) == [HttpResponse(server.url, b"1")]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("secret", "sent"),
    [(SECRET, f"Bearer {SECRET}"), (f" {SECRET}\n", f"Bearer {SECRET}"), ("Basic eDp5enp6eg==",) * 2],
)
def test_sends_credentials_and_redacts_them_from_errors(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch, secret: str, sent: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", secret)
    service = make_service(server.url, private=True, auth_env="JUDGE_KEY")
    service.check_credentials()
    assert service.post_all([b"1"]) == [HttpResponse(server.url, b"1")]
    service.check_reachable()
    assert [headers["Authorization"] for headers in server.headers] == [sent] * 2
    server.answers = [(401, f"no such key: {sent}".encode())]
    (failed,) = service.post_all([b"1"])
    assert isinstance(failed, RewardFailure) and "status 401: no such key: " in failed.reason and "***" in failed.reason
    assert secret.split()[-1] not in failed.reason + repr(service.options)


@pytest.mark.alone
@pytest.mark.parametrize("name", ["a..b", "a" * 70])
def test_does_not_retry_invalid_hostnames(name: str) -> None:
    (failed,) = make_service(f"http://{name}:1/x").post_all([b"1"])
    assert isinstance(failed, RewardFailure) and failed.reason.endswith("; set roles.reward.options.url")
    assert failed.reason.startswith(f"the reward service http://{name}:1/x: UnicodeError: ")
    assert "tries" not in failed.reason


@pytest.mark.alone
def test_sends_nothing_without_valid_credentials(server: RewardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    assert make_service(server.url, private=True).post_all([b"1"]) == [HttpResponse(server.url, b"1")]
    assert "Authorization" not in server.headers[0] and server.headers[0]["Accept-Encoding"] == "identity"
    service = make_service(server.url, private=True, auth_env="JUDGE_KEY")
    for call in (service.check_credentials, service.check_reachable, lambda: service.post_all([b"1"])):
        with pytest.raises(ConfigError, match="environment variable JUDGE_KEY is not set on this machine; export it"):
            call()
    monkeypatch.setenv("JUDGE_KEY", "a\nb")
    with pytest.raises(ConfigError, match="holds characters that are not allowed in a header") as error:
        service.check_credentials()
    assert "a\nb" not in str(error.value)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auth_env": SECRET}, "must be the name of an environment variable, not what it holds"),
        (
            {"url": f"http://me:{SECRET}@a/b"},
            "holds a password, which would be in every log; use roles.reward.options.auth_env",
        ),
        ({"url": f"http://a/b?room=1&api_key={SECRET}"}, "holds a key, which would be in every log; use roles.reward"),
        ({"url": f"http://a/b?Token={SECRET}"}, "holds a key"),
        ({"private": "yes"}, "roles.reward.options.private must be"),
    ],
)
def test_refuses_secrets_in_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        HttpOptions.read({"url": "http://a/b", **options})
    assert message in str(error.value) and SECRET not in str(error.value)


@pytest.mark.alone
def test_limits_the_response_size(server: RewardServer) -> None:
    """Responses are never decompressed."""
    service = make_service(server.url, private=True, answer_mb=0.01)
    server.answers = [(200, b"1" * 10_000), (200, b"1" * 10_001), (500, b"1" * 10_001)]
    small, *oversized = service.post_all([b"1"]) + service.post_all([b"1"]) + service.post_all([b"1"])
    assert small == HttpResponse(server.url, b"1" * 10_000)
    assert all(isinstance(failed, RewardFailure) and "more than 0.01 MB" in failed.reason for failed in oversized)
    server.answers = [(200, b"\x1f\x8b", {"Content-Encoding": "gzip"})]
    assert service.post_all([b"1"]) == [HttpResponse(server.url, b"\x1f\x8b")]  # as received


@pytest.mark.alone
def test_retry_delay_doubles_up_to_a_limit(server: RewardServer) -> None:
    service = Service(ServiceOptions.read({"url": server.url, "private": True, "pause": 1}))
    state: Any = type("State", (), {})()
    for attempt, max_pause in ((1, 1), (2, 2), (3, 4), (4, 8), (5, 10), (400, 10)):
        state.attempt_number = attempt
        assert all(max_pause / 2 <= service._retry_delay(state) <= max_pause for _ in range(20))


@pytest.mark.alone
@pytest.mark.parametrize(("data", "text"), [(b"", "nothing"), (b" a\n\tb ", "a b"), (b"a\x1b[31m\x00b", "a [31m b")])
def test_previews_response_bodies(data: bytes, text: str) -> None:
    assert preview(data) == text and len(preview(data * 10_000)) <= 200
