"""Rewards from an external service over HTTP, and the HTTP client that judges use, too.

The complete protocol: each request is a `POST` with `Content-Type: application/json` and a batch of conversations:

    {"conversations": [{"id": "17", "data_source": "gsm8k", "prompt": [{"role": "user", "content": "2+3?"}],
                        "messages": [.., {"role": "assistant", "content": "5"}], "answer": "5", "status": "stop",
                        "ground_truth": "5", "extra": {}}]}

`messages` is the whole conversation, `prompt` its beginning, `answer` the policy's last message, and `status` the
reason why it ended; the other fields come from the data set's row. The response has status 200 and is a JSON list with
one entry per conversation, in order: a number, or `{"reward": 0.5, "parts": {"style": 0.2}}`. The parts are logged but
not added. Before the first step each URL receives a `GET`, to which any response will do.

An entry of any other form fails its rollout. A response that is not such a list fails all rollouts of its request. A
lost connection, a timeout, and the statuses 429 and 5xx are transient: the request is retried on the next URL after an
exponentially growing delay. Anything else is final. Redirects are not followed, and proxies from the environment are
ignored. Loopback and private addresses are refused unless the options allow them. The check runs when a connection is
made, on the address that it goes to, so a name that later resolves to another address is refused, too.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self
from urllib.parse import parse_qsl, urlsplit

import aiohttp
import orjson
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from megarl.config import Config, ConfigError, Range, plugins, strict
from megarl.config.strict import PositiveInt, Seconds
from megarl.rewards.composite import NOT_SCORED
from megarl.types import Rollout
from megarl.types.reward_values import RewardError, RewardFailure, ServiceReward, parse_number
from megarl.utils.addresses import is_known_private, is_public

OPTIONS_PREFIX = "roles.reward.options."
_MAX_PAUSE_S = 10.0
_CHUNK = 1 << 16
_SECRET = re.compile(r"(^|[_-])(token|key|apikey|secret|password|signature|sig|auth)s?($|[_-])", re.I)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # a compressed body has no known size


@dataclass(frozen=True)
class HttpOptions:
    """Options of an HTTP client, under `roles.reward.options`."""

    url: tuple[str, ...] = ()
    """URLs of the service. Requests rotate over them."""
    concurrency: PositiveInt = 8
    """Concurrent requests of each rank that has rollouts."""
    timeout: Seconds = 60.0
    """Seconds per request."""
    tries: PositiveInt = 5
    """Attempts per request before its rollouts fail."""
    pause: Annotated[float, Range(0, _MAX_PAUSE_S)] = 0.5
    """Maximum delay in seconds before the second attempt. Doubles with each further attempt, up to 10 s."""
    private: bool = False
    """Allow addresses of this machine and of private networks."""
    auth_env: str = ""
    """Name of an environment variable, set on all ranks. Its value is sent as `Authorization: Bearer ..`, or unchanged
    if it names another scheme. It never appears in a file or a log."""
    answer_mb: Annotated[float, Range(above=0, most=1024)] = 16.0
    """Maximum size of a response in MB."""

    @classmethod
    def read(cls, options: dict[str, Any]) -> Self:
        """Parse options. Raises ConfigError for an unknown option, a missing URL, and a URL that is not allowed."""
        result: Self = strict.build_dataclass(cls, options, OPTIONS_PREFIX, root=Config)
        if not result.url:
            raise ConfigError(f"{OPTIONS_PREFIX}url is not set; it must be a URL such as http://judge:8000/score")
        for url in result.url:
            try:
                parts = urlsplit(url)
                is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
            except ValueError:  # an invalid port
                is_valid = False
            if not is_valid:
                raise ConfigError(f"{OPTIONS_PREFIX}url: {url!r} is not a URL such as http://judge:8000/score")
            if parts.username or parts.password:
                raise ConfigError(
                    f"{OPTIONS_PREFIX}url holds a password, which would be in every log; use {OPTIONS_PREFIX}auth_env"
                )
            if any(_SECRET.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
                raise ConfigError(
                    f"{OPTIONS_PREFIX}url holds a key, which would be in every log; use {OPTIONS_PREFIX}auth_env"
                )
            if not result.private and is_known_private(parts.hostname or ""):
                raise ConfigError(f"{OPTIONS_PREFIX}url: {url} {_remedy(parts.hostname or '')}")
        if result.auth_env and not _NAME.fullmatch(result.auth_env):
            raise ConfigError(
                f"{OPTIONS_PREFIX}auth_env must be the name of an environment variable, not what it holds"
            )
        return result


@dataclass(frozen=True)
class HttpResponse:
    """A successful response. url: the URL that responded."""

    url: str
    data: bytes


class HttpClient:
    """Client of one service. service_name: its name in messages."""

    def __init__(self, options: HttpOptions, service_name: str) -> None:
        self.options, self.service_name = options, service_name
        self._random = random.Random()  # separate from the generator that a checkpoint restores
        self._limit = int(options.answer_mb * 1e6)

    def check_credentials(self) -> None:
        """Raise ConfigError if this process lacks the `auth_env` variable."""
        self._headers()

    def check_reachable(self, path: str = "") -> None:
        """Raise ConfigError unless each URL responds, with whatever status."""
        asyncio.run(self._check_reachable(path))

    def post_all(
        self,
        bodies: Sequence[bytes],
        path: str = "",
        should_continue: Callable[[int, HttpResponse | RewardFailure], bool] = lambda number, answer: True,
    ) -> list[HttpResponse | RewardFailure]:
        """Send one request per body and return the responses in order.

        should_continue: called with each response as it arrives. Once it returns False, no further request is sent,
        requests in flight are cancelled, and bodies without a response get `NOT_SCORED`. Only status 200 is a response.
        """
        return asyncio.run(self._post_all(bodies, path, should_continue))

    def max_duration(self, requests: int) -> float:
        """Return the maximum seconds that this many requests may take."""
        num_rounds = -(-requests // self.options.concurrency)
        return num_rounds * self.options.tries * (self.options.timeout + _MAX_PAUSE_S)

    def to_failure(self, url: str, problem: str) -> RewardFailure:
        """Return a one-line failure with secrets redacted."""
        return RewardFailure(self._redact(f"the {self.service_name} {url}: {problem}"))

    async def _check_reachable(self, path: str) -> None:
        async with self._session() as session:
            for url in self.options.url:
                response = await self._request_with_retry(session, [url], path, None)
                if isinstance(response, RewardFailure):
                    raise ConfigError(response.reason)

    async def _post_all(
        self, bodies: Sequence[bytes], path: str, should_continue: Callable[[int, HttpResponse | RewardFailure], bool]
    ) -> list[HttpResponse | RewardFailure]:
        semaphore = asyncio.Semaphore(self.options.concurrency)
        urls = self.options.url
        responses: list[HttpResponse | RewardFailure] = [NOT_SCORED] * len(bodies)

        async def post(number: int, body: bytes) -> None:
            async with semaphore:
                start = number % len(urls)
                responses[number] = await self._request_with_retry(session, urls[start:] + urls[:start], path, body)
            if not should_continue(number, responses[number]):
                for task in set(tasks) - {asyncio.current_task()}:
                    task.cancel()

        async with self._session() as session:
            tasks = [asyncio.create_task(post(number, body)) for number, body in enumerate(bodies)]
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                    raise result
        return responses

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, happy_eyeballs_delay=None, socket_factory=self._socket)
        timeout = aiohttp.ClientTimeout(total=self.options.timeout)
        return aiohttp.ClientSession(
            timeout=timeout,
            connector=connector,
            headers=self._headers(),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def _request_with_retry(
        self, session: aiohttp.ClientSession, urls: Sequence[str], path: str, body: bytes | None
    ) -> HttpResponse | RewardFailure:
        """Return the first successful response. Without a body, any response counts as success."""
        rotation, url = itertools.cycle(urls), ""

        async def attempt() -> HttpResponse:
            nonlocal url
            url = next(rotation)
            return HttpResponse(url, await self._request(session, url.rstrip("/") + path if path else url, body))

        tries = self.options.tries
        retrying = AsyncRetrying(
            stop=stop_after_attempt(tries),
            wait=self._retry_delay,
            retry=retry_if_exception_type(_TransientError),
            reraise=True,
        )
        try:
            return await retrying(attempt)
        except _TransientError as error:
            return self.to_failure(url, f"{error} ({tries} tries); check that it runs, or set {OPTIONS_PREFIX}url")
        except _PermanentError as error:
            return self.to_failure(url, str(error))

    def _retry_delay(self, state: RetryCallState) -> float:
        """Return the seconds before the next attempt.

        The jitter keeps requests that failed together from retrying together.
        """
        longest: float = self.options.pause * 2.0 ** min(state.attempt_number - 1, 30)
        return min(longest, _MAX_PAUSE_S) * self._random.uniform(0.5, 1.0)

    async def _request(self, session: aiohttp.ClientSession, url: str, body: bytes | None) -> bytes:
        method = session.get if body is None else session.post
        try:
            async with method(url, data=body, allow_redirects=False) as response:
                status, data = response.status, bytearray()
                async for chunk in response.content.iter_chunked(_CHUNK):
                    data += chunk
                    if len(data) > self._limit:
                        raise _PermanentError(
                            f"its answer has more than {self.options.answer_mb:g} MB; see {OPTIONS_PREFIX}answer_mb"
                        )
                location = response.headers.get("Location", "")
        except TimeoutError:
            raise _TransientError(f"no answer within {self.options.timeout:g} s") from None
        except ValueError as error:  # an invalid host name
            raise _PermanentError(f"{plugins.format_error(error)}; set {OPTIONS_PREFIX}url") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _TransientError(plugins.format_error(error)) from None
        if body is None or status == 200:
            return bytes(data)
        if 300 <= status < 400:
            raise _PermanentError(
                f"it redirects to {preview(location.encode())}, which is not followed; set {OPTIONS_PREFIX}url to its "
                f"target"
            )
        problem = f"it answered with status {status}: {preview(data)}"
        raise (_TransientError if status >= 500 or status == 429 else _PermanentError)(problem)

    def _socket(self, info: Any) -> socket.socket:
        """Create the socket for a connection to this address, or refuse the address."""
        family, kind, protocol, _, address = info
        if not self.options.private and not is_public(str(address[0])):
            raise _PermanentError(_remedy(str(address[0])))
        return socket.socket(family, kind, protocol)

    def _headers(self) -> dict[str, str]:
        return _HEADERS | ({"Authorization": self._secret()} if self.options.auth_env else {})

    def _secret(self) -> str:
        secret = os.environ.get(self.options.auth_env, "").strip()
        prefix = f"{OPTIONS_PREFIX}auth_env: the environment variable {self.options.auth_env}"
        if not secret:
            raise ConfigError(f"{prefix} is not set on this machine; export it before the run, on all machines")
        if not (secret.isascii() and secret.isprintable()):
            raise ConfigError(f"{prefix} holds characters that are not allowed in a header")
        return secret if " " in secret else f"Bearer {secret}"

    def _redact(self, text: str) -> str:
        if not self.options.auth_env:
            return text
        _, _, secret = self._secret().partition(" ")
        return text.replace(secret, "***")


def preview(data: bytes | bytearray | str) -> str:
    """Return the beginning of a response, for a message."""
    text = data[:400] if isinstance(data, str) else data[:400].decode(errors="replace")
    text = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(text.split())[:200] or "nothing"


def _remedy(address: str) -> str:
    return f"is at {address}, on this machine or in a private network: set {OPTIONS_PREFIX}private=true if it is yours"


class _PermanentError(Exception):
    """A failure that a retry would not change."""


class _TransientError(_PermanentError):
    pass


PART = "service"
"""Name of this part of the reward."""
_MAX_PARTS = 32
_PART_NAME = re.compile(r"[\w./-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class ServiceOptions(HttpOptions):
    """Options of a reward service."""

    batch: PositiveInt = 16
    """Conversations per request."""


class HttpScorer(ABC):
    """Client that scores rollouts by requests, each of which holds up to `batch_size` rollouts."""

    part: str
    """Name of its part of the reward."""
    path = ""
    """Appended to the URLs of requests."""

    def __init__(self, options: HttpOptions, service_name: str, batch_size: int) -> None:
        self.client, self._batch_size = HttpClient(options, service_name), batch_size

    def check_reachable(self) -> None:
        """Raise ConfigError unless each URL responds, with whatever status."""
        self.client.check_reachable()

    def score(self, rollouts: Sequence[Rollout], max_failed: float = math.inf) -> list[ServiceReward | RewardFailure]:
        """Return the reward of each rollout, or the reason of a failure.

        max_failed: once more rollouts than this have failed, the others are no longer sent and are `NOT_SCORED`.
        """
        rewards: list[ServiceReward | RewardFailure] = [NOT_SCORED] * len(rollouts)
        encoded: list[tuple[int, bytes]] = []
        for number, rollout in enumerate(rollouts):
            text = self._encode(rollout)
            if isinstance(text, RewardFailure):
                rewards[number] = text
            else:
                encoded.append((number, text))
        failed = len(rollouts) - len(encoded)
        batches = [encoded[i : i + self._batch_size] for i in range(0, len(encoded), self._batch_size)]

        def record(index: int, response: HttpResponse | RewardFailure) -> bool:
            nonlocal failed
            count = len(batches[index])
            parsed = [response] * count if isinstance(response, RewardFailure) else self._parse(response, count)
            for (number, _), reward in zip(batches[index], parsed, strict=True):
                rewards[number] = reward
                failed += isinstance(reward, RewardFailure)
            return failed <= max_failed

        self.client.post_all([self._join([text for _, text in batch]) for batch in batches], self.path, record)
        return rewards

    def max_duration(self, count: int) -> float:
        """Return the maximum seconds that this many rollouts of a rank may take."""
        return self.client.max_duration(-(-count // self._batch_size))

    @abstractmethod
    def _encode(self, rollout: Rollout) -> bytes | RewardFailure: ...

    @abstractmethod
    def _join(self, texts: Sequence[bytes]) -> bytes:
        """Return the body of a request for these encoded rollouts."""

    @abstractmethod
    def _parse(self, response: HttpResponse, count: int) -> Sequence[ServiceReward | RewardFailure]:
        """Return the `count` rewards of a response."""


class Service(HttpScorer):
    """Client of a reward service."""

    part = PART

    def __init__(self, options: ServiceOptions) -> None:
        super().__init__(options, "reward service", options.batch)

    def _encode(self, rollout: Rollout) -> bytes | RewardFailure:
        prompt = rollout.prompt
        fields = {
            "id": prompt.id,
            "data_source": prompt.data_source,
            "prompt": prompt.messages,
            "messages": rollout.messages,
            "answer": rollout.answer,
            "status": rollout.status,
            "ground_truth": prompt.ground_truth,
            "extra": prompt.extra,
        }
        try:
            return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            return RewardFailure(f"the sample cannot be sent to a reward service as JSON: {error}")

    def _join(self, texts: Sequence[bytes]) -> bytes:
        return b'{"conversations": [' + b", ".join(texts) + b"]}"

    def _parse(self, response: HttpResponse, count: int) -> Sequence[ServiceReward | RewardFailure]:
        try:
            entries = orjson.loads(response.data)
        except ValueError:
            problem = f"its answer is not JSON: {preview(response.data)}"
            return [self.client.to_failure(response.url, problem)] * count
        if not isinstance(entries, list) or len(entries) != count:
            what = f"a list of {len(entries)}" if isinstance(entries, list) else f"a {type(entries).__name__}"
            problem = f"its answer to {count} conversations must be a list of as many, not {what}: "
            return [self.client.to_failure(response.url, problem + preview(response.data))] * count
        return [self._parse_entry(response.url, entry) for entry in entries]

    def _parse_entry(self, url: str, entry: Any) -> ServiceReward | RewardFailure:
        parts: dict[str, Any] = {}
        try:
            if isinstance(entry, dict):
                if "reward" not in entry:
                    raise RewardError(f"it returned no `reward`, but {preview(strict.short_repr(entry))}")
                entry, parts = entry["reward"], _check_parts(entry.get("parts") or {})
            reward = parse_number(entry, "it")
            return reward, {name: parse_number(part, f"it, as the part {name},") for name, part in parts.items()}
        except RewardError as error:
            return self.client.to_failure(url, str(error))


def _check_parts(parts: Any) -> dict[str, Any]:
    """Return the parts of an entry. Their names are restricted, because they become log columns and metric names."""
    if not isinstance(parts, dict):
        raise RewardError(f"it returned `parts` that are not a mapping, but {preview(strict.short_repr(parts))}")
    if len(parts) > _MAX_PARTS:
        raise RewardError(f"it returned {len(parts)} parts; {_MAX_PARTS} are allowed")
    for name in parts:
        if not _PART_NAME.fullmatch(name):
            raise RewardError(f"it returned a part with the name {preview(strict.short_repr(name))}; use letters")
    return parts
