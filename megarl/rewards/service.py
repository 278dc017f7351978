"""Rewards from an external service over HTTP, whose protocol `SCORERS.md` documents, and the client of such services.

A lost connection, a timeout, and the statuses 429 and 5xx are retried on the next URL; anything else is final. Whether
an address is public is checked when a connection is made, so a name that later resolves to another one is refused, too.
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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Self
from urllib.parse import parse_qsl, urlsplit

import aiohttp
import orjson
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from megarl.config import Config, ConfigError, Range, plugins, strict
from megarl.config.strict import PositiveInt, Seconds
from megarl.rewards.composite import NOT_SCORED, call_while
from megarl.types import Rollout
from megarl.types.reward_values import Reward, RewardError, RewardFailure, RewardResult, parse_number
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
            query = parse_qsl(parts.query, keep_blank_values=True)
            has_key = any(_SECRET.search(name) for name, _ in query)
            if secret := "a password" if parts.username or parts.password else "a key" if has_key else "":
                raise ConfigError(
                    f"{OPTIONS_PREFIX}url holds {secret}, which would be in every log; use {OPTIONS_PREFIX}auth_env"
                )
            if not result.private and is_known_private(parts.hostname or ""):
                raise ConfigError(f"{OPTIONS_PREFIX}url: {url} {_remedy(parts.hostname or '')}")
        if result.auth_env and not _NAME.fullmatch(result.auth_env):
            raise ConfigError(
                f"{OPTIONS_PREFIX}auth_env must be the name of an environment variable, not what it holds"
            )
        return result


class HttpResponse(NamedTuple):
    """A successful response. url: the URL that responded."""

    url: str
    data: bytes


class HttpScorer(ABC):
    """Client of a service that scores rollouts, up to `batch_size` per request. service_name: its name in messages."""

    part: str
    """Name of its part of the reward."""
    options_prefix = OPTIONS_PREFIX
    """Prefix of its options in messages."""
    path, status_path = "", ""
    """Appended to the URLs of requests, and of the check whether they respond."""

    def __init__(self, options: HttpOptions, service_name: str, batch_size: int) -> None:
        self.options, self.service_name, self._batch_size = options, service_name, batch_size
        self._random = random.Random()  # separate from the generator that a checkpoint restores
        self._api_key = ""
        """Key of the service, in place of `auth_env`."""

    @abstractmethod
    def _encode(self, rollout: Rollout) -> Mapping[str, Any]:
        """Return what is sent of a rollout."""

    def _join(self, texts: Sequence[bytes]) -> bytes:
        """Return the body of a request for these encoded rollouts."""
        return texts[0]

    @abstractmethod
    def _parse(self, response: HttpResponse, count: int) -> Sequence[RewardResult]:
        """Return the `count` rewards of a response."""

    def check_credentials(self) -> None:
        """Raise ConfigError if this process lacks the `auth_env` variable."""
        self._headers()

    def check_reachable(self) -> None:
        """Raise ConfigError unless each URL responds, with whatever status."""

        async def check() -> None:
            async with self._session() as session:
                for url in self.options.url:
                    response = await self._request_with_retry(session, [url], self.status_path, None)
                    if isinstance(response, RewardFailure):
                        raise ConfigError(response.reason)

        asyncio.run(check())

    def score(
        self,
        rollouts: Sequence[Rollout],
        max_failed: float = math.inf,
        watch: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> list[RewardResult]:
        """Return the reward of each rollout, or the reason of a failure.

        max_failed: once more rollouts than this have failed, the others are no longer sent and are `NOT_SCORED`.
        watch: see `post_all`.
        """
        results: list[RewardResult] = [NOT_SCORED] * len(rollouts)
        encoded: list[tuple[int, bytes]] = []
        for number, rollout in enumerate(rollouts):
            try:
                encoded.append((number, orjson.dumps(self._encode(rollout), option=orjson.OPT_SERIALIZE_NUMPY)))
            except TypeError as error:  # also a lone surrogate
                reason = f"the sample cannot be sent to a {self.service_name} as JSON: {error}"
                results[number] = RewardFailure(reason)
        num_failed = len(rollouts) - len(encoded)
        batches = [encoded[i : i + self._batch_size] for i in range(0, len(encoded), self._batch_size)]

        def record(index: int, response: HttpResponse | RewardFailure) -> bool:
            nonlocal num_failed
            count = len(batches[index])
            parsed = [response] * count if isinstance(response, RewardFailure) else self._parse(response, count)
            for (number, _), result in zip(batches[index], parsed, strict=True):
                results[number] = result
                num_failed += isinstance(result, RewardFailure)
            return num_failed <= max_failed

        self.post_all([self._join([text for _, text in batch]) for batch in batches], record, watch)
        return results

    def post_all(
        self,
        bodies: Sequence[bytes],
        should_continue: Callable[[int, HttpResponse | RewardFailure], bool] = lambda number, response: True,
        watch: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> list[HttpResponse | RewardFailure]:
        """Send one request per body and return the responses in order.

        should_continue: called with each response as it arrives. Once it returns False, no further request is sent,
        requests in flight are cancelled, and bodies without a response get `NOT_SCORED`. Only status 200 is a response.
        watch: runs meanwhile; its exception ends all requests, and is raised.
        """
        urls = self.options.url
        responses: list[HttpResponse | RewardFailure] = [NOT_SCORED] * len(bodies)

        async def post_bodies() -> None:
            async def post(number: int) -> bool:
                start = number % len(urls)
                rotation = urls[start:] + urls[:start]
                responses[number] = await self._request_with_retry(session, rotation, self.path, bodies[number])
                return should_continue(number, responses[number])

            async with self._session() as session:
                await call_while(post, len(bodies), self.options.concurrency)

        async def post_watched() -> None:
            tasks = [asyncio.create_task(post_bodies()), *([] if watch is None else [asyncio.create_task(watch())])]
            try:
                for task in (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

        asyncio.run(post_watched())
        return responses

    def max_duration(self, count: int) -> float:
        """Return the maximum seconds that this many rollouts of a rank may take."""
        num_rounds = -(-count // (self._batch_size * self.options.concurrency))
        return num_rounds * self.options.tries * (self.options.timeout + _MAX_PAUSE_S)

    def to_failure(self, url: str, problem: str) -> RewardFailure:
        """Return a one-line failure with secrets redacted."""
        text = f"the {self.service_name} {url}: {problem.replace(OPTIONS_PREFIX, self.options_prefix)}"
        if self.options.auth_env or self._api_key:
            text = text.replace(self._secret().partition(" ")[2], "***")
        return RewardFailure(text)

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self.options.timeout),
            connector=aiohttp.TCPConnector(limit=0, happy_eyeballs_delay=None, socket_factory=self._socket),
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
        is_transient = retry_if_exception_type(_TransientError)
        retrying = AsyncRetrying(
            stop=stop_after_attempt(tries), wait=self._retry_delay, retry=is_transient, reraise=True
        )
        try:
            return await retrying(attempt)
        except _TransientError as error:
            return self.to_failure(url, f"{error} ({tries} tries); check that it runs, or set {OPTIONS_PREFIX}url")
        except _PermanentError as error:
            return self.to_failure(url, str(error))

    def _retry_delay(self, state: RetryCallState) -> float:
        """Return the seconds before the next attempt, with jitter so that failed requests do not retry together."""
        longest: float = self.options.pause * 2.0 ** min(state.attempt_number - 1, 30)
        return min(longest, _MAX_PAUSE_S) * self._random.uniform(0.5, 1.0)

    async def _request(self, session: aiohttp.ClientSession, url: str, body: bytes | None) -> bytes:
        method = session.get if body is None else session.post
        try:
            async with method(url, data=body, allow_redirects=False) as response:
                status, data = response.status, bytearray()
                async for chunk in response.content.iter_chunked(_CHUNK):
                    data += chunk
                    if len(data) > self.options.answer_mb * 1e6:
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
            target = preview(location.encode())
            raise _PermanentError(
                f"it redirects to {target}, which is not followed; set {OPTIONS_PREFIX}url to its target"
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
        has_secret = self.options.auth_env or self._api_key
        return _HEADERS | ({"Authorization": self._secret()} if has_secret else {})

    def _secret(self) -> str:
        if self._api_key:
            return f"Bearer {self._api_key}"
        secret = os.environ.get(self.options.auth_env, "").strip()
        prefix = f"{OPTIONS_PREFIX}auth_env: the environment variable {self.options.auth_env}"
        if not secret:
            raise ConfigError(f"{prefix} is not set on this machine; export it before the run, on all machines")
        if not (secret.isascii() and secret.isprintable()):
            raise ConfigError(f"{prefix} holds characters that are not allowed in a header")
        return secret if " " in secret else f"Bearer {secret}"


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


_MAX_PARTS = 32
_PART_NAME = re.compile(r"[\w./-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class ServiceOptions(HttpOptions):
    """Options of a reward service."""

    batch: PositiveInt = 16
    """Conversations per request."""


class Service(HttpScorer):
    """Client of a reward service."""

    part = "service"

    def __init__(self, options: ServiceOptions) -> None:
        super().__init__(options, "reward service", options.batch)

    def _encode(self, rollout: Rollout) -> Mapping[str, Any]:
        prompt = rollout.prompt
        return {
            "id": prompt.id,
            "data_source": prompt.data_source,
            "prompt": prompt.messages,
            "messages": rollout.messages,
            "answer": rollout.answer,
            "status": rollout.status,
            "ground_truth": prompt.ground_truth,
            "extra": prompt.extra,
        }

    def _join(self, texts: Sequence[bytes]) -> bytes:
        return b'{"conversations": [' + b", ".join(texts) + b"]}"

    def _parse(self, response: HttpResponse, count: int) -> Sequence[RewardResult]:
        try:
            entries = orjson.loads(response.data)
        except ValueError:
            problem = f"its answer is not JSON: {preview(response.data)}"
            return [self.to_failure(response.url, problem)] * count
        if not isinstance(entries, list) or len(entries) != count:
            what = f"a list of {len(entries)}" if isinstance(entries, list) else f"a {type(entries).__name__}"
            problem = f"its answer to {count} conversations must be a list of as many, not {what}: "
            return [self.to_failure(response.url, problem + preview(response.data))] * count
        results: list[RewardResult] = []
        for entry in entries:
            try:
                results.append(_parse_entry(entry))
            except RewardError as error:
                results.append(self.to_failure(response.url, str(error)))
        return results


def _parse_entry(entry: Any) -> Reward:
    if not isinstance(entry, dict):
        return Reward(parse_number(entry, "it"))
    if "reward" not in entry:
        raise RewardError(f"it returned no `reward`, but {preview(strict.short_repr(entry))}")
    parts = entry.get("parts") or {}
    if not isinstance(parts, dict):
        raise RewardError(f"it returned `parts` that are not a mapping, but {preview(strict.short_repr(parts))}")
    if len(parts) > _MAX_PARTS:
        raise RewardError(f"it returned {len(parts)} parts; {_MAX_PARTS} are allowed")
    for name in parts:  # it becomes a column of the log and a metric
        if not _PART_NAME.fullmatch(name):
            raise RewardError(f"it returned a part with the name {preview(strict.short_repr(name))}; use letters")
    reward = parse_number(entry["reward"], "it")
    return Reward(reward, {name: parse_number(part, f"it, as the part {name},") for name, part in parts.items()})
