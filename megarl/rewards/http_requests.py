"""Requests to what judges rollouts elsewhere: where they may go, how often they are made, how much may come back.

A lost connection, a time-out and the statuses 429 and 5xx may pass: the request is made again, to the next URL, after a
pause that doubles. Anything else is an answer. No redirect is followed, no proxy of the environment is used, and
addresses of this machine and of private networks are refused unless the options allow them: that is looked at where a
connection is made, of the address that it goes to, so a name that comes to mean another address later is refused, too.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self
from urllib.parse import parse_qsl, urlsplit

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from megarl.config import Config, ConfigError, Range, plugins, strict
from megarl.config.strict import PositiveInt, Seconds
from megarl.rewards.failed_rewards import NOT_SCORED
from megarl.types.reward_values import RewardFailure
from megarl.utils.addresses import is_known_private, is_public

OPTIONS_PREFIX = "roles.reward.options."
_LONGEST_PAUSE_S = 10.0
_CHUNK = 1 << 16
_SECRET = re.compile(r"(^|[_-])(token|key|apikey|secret|password|signature|sig|auth)s?($|[_-])", re.I)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}  # what is packed has no known size


@dataclass(frozen=True)
class HttpOptions:
    url: tuple[str, ...] = ()
    """Where it is; of several each gets its turn."""
    concurrency: PositiveInt = 8
    """Requests at once, of each rank that has rollouts."""
    timeout: Seconds = 60.0
    """Seconds that an answer may take."""
    tries: PositiveInt = 5
    """How often a request is made before its rollouts have failed."""
    pause: Annotated[float, Range(0, _LONGEST_PAUSE_S)] = 0.5
    """Seconds before the second try, at most; twice as many before each one after it, up to ten."""
    private: bool = False
    """Whether it may be on this machine or in a private network."""
    auth_env: str = ""
    """Name of an environment variable, of all ranks: what it holds is sent as `Authorization: Bearer ..`, or as it is
    where it names another scheme. It is in no file and no log."""
    answer_mb: Annotated[float, Range(above=0, most=1024)] = 16.0
    """MB that an answer may have."""

    @classmethod
    def read(cls, options: dict[str, Any]) -> Self:
        """Raises ConfigError for what is none of these, and where there is no URL, or one that may not be asked."""
        found: Self = strict.build_dataclass(cls, options, OPTIONS_PREFIX, root=Config)
        if not found.url:
            raise ConfigError(
                f"{OPTIONS_PREFIX}url is not set; it must name where to ask, such as http://judge:8000/score"
            )
        for url in found.url:
            try:
                parts = urlsplit(url)
                good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
            except ValueError:  # of a port that is none
                good = False
            if not good:
                raise ConfigError(f"{OPTIONS_PREFIX}url: {url!r} is no address such as http://judge:8000/score")
            if parts.username or parts.password:
                raise ConfigError(
                    f"{OPTIONS_PREFIX}url holds a password, which would be in every log; use {OPTIONS_PREFIX}auth_env"
                )
            if any(_SECRET.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
                raise ConfigError(
                    f"{OPTIONS_PREFIX}url holds a key, which would be in every log; use {OPTIONS_PREFIX}auth_env"
                )
            if not found.private and is_known_private(parts.hostname or ""):
                raise ConfigError(f"{OPTIONS_PREFIX}url: {url} {_remedy(parts.hostname or '')}")
        if found.auth_env and not _NAME.fullmatch(found.auth_env):
            raise ConfigError(
                f"{OPTIONS_PREFIX}auth_env must be the name of an environment variable, not what it holds"
            )
        return found


@dataclass(frozen=True)
class HttpResponse:
    url: str
    data: bytes


class HttpClient:
    """what: how messages call what is asked."""

    def __init__(self, options: HttpOptions, what: str) -> None:
        self.options, self.service_name = options, what
        self._random = random.Random()  # not the one that a checkpoint restores
        self._limit = int(options.answer_mb * 1e6)

    def check_credentials(self) -> None:
        """Raise ConfigError unless this process has what is sent with each request."""
        self._headers()

    def check_reachable(self, path: str = "") -> None:
        """Raise ConfigError unless somebody answers at each URL, whatever it is."""
        asyncio.run(self._check_reachable(path))

    def post_all(
        self,
        bodies: Sequence[bytes],
        path: str = "",
        goes_on: Callable[[int, HttpResponse | RewardFailure], bool] = lambda number, answer: True,
    ) -> list[HttpResponse | RewardFailure]:
        """What comes back for each, in their order: the body of an answer with status 200. goes_on: is told of each
        answer when it comes; where it says no, no request is made any more, those under way are broken off, and what
        has no answer is `NOT_SCORED`."""
        return asyncio.run(self._post_all(bodies, path, goes_on))

    def max_duration(self, requests: int) -> float:
        """Seconds that so many may take at most."""
        in_turn = -(-requests // self.options.concurrency)
        return in_turn * self.options.tries * (self.options.timeout + _LONGEST_PAUSE_S)

    def to_failure(self, url: str, problem: str) -> RewardFailure:
        """In one line, without what is secret."""
        return RewardFailure(self._redact(f"the {self.service_name} {url}: {problem}"))

    async def _check_reachable(self, path: str) -> None:
        async with self._session() as session:
            for url in self.options.url:
                found = await self._request_with_retry(session, [url], path, None)
                if isinstance(found, RewardFailure):
                    raise ConfigError(found.reason)

    async def _post_all(
        self, bodies: Sequence[bytes], path: str, goes_on: Callable[[int, HttpResponse | RewardFailure], bool]
    ) -> list[HttpResponse | RewardFailure]:
        at_once = asyncio.Semaphore(self.options.concurrency)
        urls = self.options.url
        answers: list[HttpResponse | RewardFailure] = [NOT_SCORED] * len(bodies)
        over = asyncio.Event()

        async def one(number: int, body: bytes) -> None:
            async with at_once:
                first = number % len(urls)
                answers[number] = await self._request_with_retry(session, urls[first:] + urls[:first], path, body)
            if not goes_on(number, answers[number]):
                over.set()

        async with self._session() as session:
            tasks = [asyncio.create_task(one(number, body)) for number, body in enumerate(bodies)]
            stopping = asyncio.create_task(_cancel_when(over, tasks))
            try:
                await asyncio.gather(*tasks)
            except asyncio.CancelledError:
                if not over.is_set():
                    raise
                await asyncio.wait(tasks)
            finally:
                stopping.cancel()
        return answers

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, happy_eyeballs_delay=None, socket_factory=self._socket)
        limit = aiohttp.ClientTimeout(total=self.options.timeout)
        return aiohttp.ClientSession(
            timeout=limit,
            connector=connector,
            headers=self._headers(),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def _request_with_retry(
        self, session: aiohttp.ClientSession, urls: Sequence[str], path: str, body: bytes | None
    ) -> HttpResponse | RewardFailure:
        """The first good answer, and whose it is. Without a body, any answer."""
        turns, url = itertools.cycle(urls), ""

        async def once() -> HttpResponse:
            nonlocal url
            url = next(turns)
            return HttpResponse(url, await self._request(session, url.rstrip("/") + path if path else url, body))

        tries = self.options.tries
        retrying = AsyncRetrying(
            stop=stop_after_attempt(tries),
            wait=self._retry_delay,
            retry=retry_if_exception_type(_TransientError),
            reraise=True,
        )
        try:
            return await retrying(once)
        except _TransientError as error:
            return self.to_failure(url, f"{error} ({tries} tries); see that it runs, or set {OPTIONS_PREFIX}url")
        except _PermanentError as error:
            return self.to_failure(url, str(error))

    def _retry_delay(self, state: RetryCallState) -> float:
        """Seconds before the next try; not the same for all that have failed at once."""
        longest: float = self.options.pause * 2.0 ** min(state.attempt_number - 1, 30)
        return min(longest, _LONGEST_PAUSE_S) * self._random.uniform(0.5, 1.0)

    async def _request(self, session: aiohttp.ClientSession, url: str, body: bytes | None) -> bytes:
        asked = session.get if body is None else session.post
        try:
            async with asked(url, data=body, allow_redirects=False) as reply:
                status, data = reply.status, bytearray()
                async for chunk in reply.content.iter_chunked(_CHUNK):
                    data += chunk
                    if len(data) > self._limit:
                        raise _PermanentError(
                            f"its answer has more than {self.options.answer_mb:g} MB; see {OPTIONS_PREFIX}answer_mb"
                        )
                target = reply.headers.get("Location", "")
        except TimeoutError:
            raise _TransientError(f"there was no answer within {self.options.timeout:g} s") from None
        except ValueError as error:  # of a host that no name can be
            raise _PermanentError(f"{plugins.format_error(error)}; set {OPTIONS_PREFIX}url") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _TransientError(plugins.format_error(error)) from None
        if body is None or status == 200:
            return bytes(data)
        if 300 <= status < 400:
            raise _PermanentError(
                f"it redirects to {preview(target.encode())}, which is not followed; set {OPTIONS_PREFIX}url to where it is"
            )
        problem = f"it answered with status {status}: {preview(data)}"
        raise (_TransientError if status >= 500 or status == 429 else _PermanentError)(problem)

    def _socket(self, info: Any) -> socket.socket:
        """Of a connection that is about to be made, to this address and no other."""
        family, kind, protocol, _, address = info
        if not self.options.private and not is_public(str(address[0])):
            raise _PermanentError(_remedy(str(address[0])))
        return socket.socket(family, kind, protocol)

    def _headers(self) -> dict[str, str]:
        return _HEADERS | ({"Authorization": self._secret()} if self.options.auth_env else {})

    def _secret(self) -> str:
        held = os.environ.get(self.options.auth_env, "").strip()
        where = f"{OPTIONS_PREFIX}auth_env: the environment variable {self.options.auth_env}"
        if not held:
            raise ConfigError(f"{where} is not set on this machine; export it before the run, on all machines")
        if not (held.isascii() and held.isprintable()):
            raise ConfigError(f"{where} holds characters that no header may have")
        return held if " " in held else f"Bearer {held}"

    def _redact(self, text: str) -> str:
        if not self.options.auth_env:
            return text
        _, _, secret = self._secret().partition(" ")
        return text.replace(secret, "***")


async def _cancel_when(over: asyncio.Event, tasks: Sequence[asyncio.Task[None]]) -> None:
    await over.wait()
    for task in tasks:
        task.cancel()


def preview(data: bytes | bytearray | str) -> str:
    """The beginning of an answer, in a message."""
    text = data[:400] if isinstance(data, str) else data[:400].decode(errors="replace")
    text = "".join(sign if sign.isprintable() else " " for sign in text)
    return " ".join(text.split())[:200] or "nothing"


def _remedy(address: str) -> str:
    return f"is at {address}, on this machine or in a private network: set {OPTIONS_PREFIX}private=true if it is one of yours"


class _PermanentError(Exception):
    """What asking again would not change."""


class _TransientError(_PermanentError):
    pass
